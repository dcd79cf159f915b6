"""Quantizing of a model folder, tensor by tensor, and scoring of a text."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.model.digests import text_files, weight_files
from swiftbatch.worker.model.file_checks import INDEX_FILE, PICKLED_FILE, SINGLE_FILE
from swiftbatch.worker.model.formats.contract import ITEM_BITS, StoredTensor
from swiftbatch.worker.model.formats.layout import heads_in
from swiftbatch.worker.model.gguf.gguf_model import link_names
from swiftbatch.worker.model.model_files import ModelFiles, let_others_read, read_whole_config, stored_layout
from swiftbatch.worker.model.pickled_weights import NAMES
from swiftbatch.worker.model.text_config import text_name, text_view
from swiftbatch.worker.model.weight_files import stored_tensors
from swiftbatch.worker.text.tokenizer import TextCodec

GROUP = 32  # divides nearly all models' widths, for half a bit per weight
# the first that divides all matrices is used, as other programs need
BLOCKS = (128, 64, 32)
LARGEST_E4M3 = 448.0
SMALLEST = 1e-12
WORD = 32


@dataclass(frozen=True)
class IntegerRounding:
    """compressed-tensors' `pack-quantized`, symmetric groups of 32 columns.

    Zero points would gain no nats with 4 bits, and not all programs read them.
    """

    bits: int

    def takes(self, columns: int) -> bool:
        """Return whether a matrix of this width can be rounded."""
        return columns % GROUP == 0

    def parts(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the parts of a float32 matrix by the suffixes of their names."""
        groups, most = weight.unflatten(1, (-1, GROUP)), (1 << self.bits) - 1
        # Rounding uses scales as stored, in bfloat16. A group's greatest number keeps its value: clipping it costs more
        # than finer steps gain.
        scales = (groups.abs().amax(-1) / (most // 2)).clamp(min=SMALLEST).to(torch.bfloat16)
        codes = ((groups / scales.float()[..., None]).round() + (most + 1) // 2).clamp(0, most)
        return {
            "weight_packed": _words(codes.flatten(1), self.bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }

    def config(self, left: list[str]) -> dict[str, Any]:
        """Return the quantization config of a model, with these linear layers left plain."""
        weights = {"num_bits": self.bits, "type": "int", "strategy": "group", "group_size": GROUP}
        weights |= {"symmetric": True, "dynamic": False}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
        return said | {"ignore": left, "kv_cache_scheme": None, "quantization_status": "compressed"}


@dataclass(frozen=True)
class FloatRounding:
    """FP8 (e4m3) in square blocks, as in `quant_method: fp8`."""

    block: int

    def takes(self, columns: int) -> bool:
        return True

    def parts(self, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % self.block, 0, -rows % self.block))
        blocks = padded.unflatten(0, (-1, self.block)).unflatten(2, (-1, self.block))
        scales = (blocks.abs().amax((1, 3)) / LARGEST_E4M3).clamp(min=SMALLEST)
        codes = (blocks / scales[:, None, :, None]).clamp(-LARGEST_E4M3, LARGEST_E4M3)
        stored = codes.flatten(2).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
        return {"weight": stored, "weight_scale_inv": scales}

    def config(self, left: list[str]) -> dict[str, Any]:
        said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return said | {"weight_block_size": [self.block, self.block], "modules_to_not_convert": left}


Rounding = IntegerRounding | FloatRounding
FORMATS = ("int4", "int8", "fp8")


def rounding_of(format_: str, shapes: Mapping[str, tuple[int, ...]]) -> Rounding:
    if format_ != "fp8":
        return IntegerRounding(int(format_.removeprefix("int")))
    sizes = {size for shape in shapes.values() for size in shape}
    return FloatRounding(next((block for block in BLOCKS if all(size % block == 0 for size in sizes)), BLOCKS[0]))


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into 32-bit words, lowest bits first."""
    grouped = codes.long().unflatten(1, (-1, WORD // bits)) << torch.arange(0, WORD, bits, device=codes.device)
    words: Tensor = grouped.sum(-1).to(torch.int32)
    return words


STRETCH = 1024  # a piece's last token follows at most so many
MOST_TOKENS = 8192  # only a text's first tokens are scored


def text_token_ids(files: ModelFiles, text: str) -> list[int]:
    """Raise ModelError for fewer than two tokens."""
    token_ids = TextCodec(files).encode(text)[:MOST_TOKENS]
    if len(token_ids) < 2:
        raise ModelError(f"--text: found {len(token_ids)} tokens; expected two or more")
    return token_ids


def text_loss(target: TargetModel, token_ids: list[int]) -> float:
    """Return nats per token over pieces of a text."""
    length, total, number = min(STRETCH, target.files.max_positions), 0.0, 0
    for start in range(0, len(token_ids) - 1, length):
        piece = token_ids[start : start + length + 1][: target.files.max_positions + 1]
        if len(piece) > 1:
            total += float(cross_entropy(_logits(target, piece[:-1]), torch.tensor(piece[1:]), reduction="sum"))
            number += len(piece) - 1
    return total / number


def _logits(target: TargetModel, token_ids: list[int]) -> torch.Tensor:
    cache, found = target.new_cache(len(token_ids) + TILE_ROWS), []
    while cache.length < len(token_ids):
        found.append(target.logits(target.read(cache, token_ids[cache.length :])).cpu())
    return torch.cat(found)


OF_LAYERS = re.compile(r"^model\.layers\.\d+\..*\.weight$")
ROUTERS = re.compile(r"\.(?:gate|router|router\.layer|shared_expert_gate|block_sparse_moe\.gate|wg)\.weight$")
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot", ".index.json")


@dataclass(frozen=True)
class Quantized:
    """Finished folder, with weight bytes before and after."""

    path: Path
    num_matrices: int
    left: tuple[str, ...]  # names linear layers that stay plain
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class _Plan:
    """Matrices to quantize, and the tensors of the new files."""

    rounding: Rounding
    matrices: frozenset[str]
    left: tuple[str, ...]

    def heads(self, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the tensors of a file in writing order."""
        found: dict[str, StoredTensor] = {}
        for name, head in stored.items():
            if name not in self.matrices:
                found[name] = head
                continue
            parts = self.rounding.parts(torch.empty(head.shape, device="meta"))
            for part, each in parts.items():
                found[f"{name.removesuffix('weight')}{part}"] = StoredTensor(NAMES[each.dtype], tuple(each.shape))
        return found


def quantize_model(files: ModelFiles, format_: str, output: Path) -> Quantized:
    """Write a model with layers' matrices in `format_`; embeddings, head, norms and routers stay plain.

    The folder appears whole or not at all. Raises ModelError.
    """
    _refuse_taken(output)
    if link_names(files.path):
        raise ModelError(f"model {files.name}: it is quantized already (GGUF); give the plain model")
    if (layout := stored_layout(files.name, files.path)).format is not None:
        raise ModelError(f"model {files.name}: it is quantized already ({layout.format.words}); give the plain model")
    try:
        made = _write_aside(files, format_, output)
    except OSError as error:
        _refuse_taken(output)  # another command may have been faster
        raise ModelError(f"output {output}: {error.strerror or error}; name a folder that can be written") from None
    return Quantized(output, len(made.matrices), made.left, _weight_bytes(files.path), _weight_bytes(output))


def _refuse_taken(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ModelError(f"output {output}: found something there already; name a new folder, or an empty one")


def _write_aside(files: ModelFiles, format_: str, output: Path) -> _Plan:
    """Write to a temporary folder, then rename it. Raises OSError."""
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        made = _write(files, format_, aside)
        let_others_read(aside)
        os.replace(aside, output)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return made


def _write(files: ModelFiles, format_: str, folder: Path) -> _Plan:
    config = read_whole_config(files.name, files.path)
    plan = _plan(files, format_, config)
    placed: dict[str, str] = {}
    for file in weight_files(files.path):
        heads = plan.heads(heads_in(file))
        written = SINGLE_FILE if file.name == PICKLED_FILE else f"{file.stem}.safetensors"
        write_tensors(folder / written, heads, _tensors(files.name, file, plan))
        let_others_read(folder / written)
        placed |= dict.fromkeys(heads, written)
    if set(placed.values()) != {SINGLE_FILE}:
        size = sum(file.stat().st_size for file in folder.iterdir())
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": placed})
    _write_json(folder / "config.json", config | {"quantization_config": plan.rounding.config(list(plan.left))})
    copy_small_files(files.path, folder)
    return plan


def _plan(files: ModelFiles, format_: str, config: dict[str, Any]) -> _Plan:
    view = text_view(config)
    stored = {name: head for file in weight_files(files.path) for name, head in heads_in(file).items()}
    linears = {name: head.shape for name, head in stored.items() if len(head.shape) == 2 and name.endswith(".weight")}
    wanted = {name: shape for name, shape in linears.items() if _is_wanted(text_name(name, view))}
    rounding = rounding_of(format_, wanted)
    matrices = frozenset(name for name, (_, columns) in wanted.items() if rounding.takes(columns))
    if not matrices:
        raise ModelError(f"model {files.name}: none of its matrices can be quantized to {format_}")
    left = sorted(name.removesuffix(".weight") for name in set(linears) - matrices if "embed" not in name)
    return _Plan(rounding, matrices, tuple(dict.fromkeys(["lm_head", *left])))


def _is_wanted(name: str | None) -> bool:
    """Exclude routers, where small errors choose other experts."""
    return name is not None and bool(OF_LAYERS.match(name)) and not ROUTERS.search(name)


def _tensors(model: str, file: Path, plan: _Plan) -> Iterator[tuple[str, Tensor]]:
    """Yield a file's tensors or their parts. Raises ModelError for non-finite numbers."""
    for name, tensor in stored_tensors(file):
        if name not in plan.matrices:
            yield name, tensor
            continue
        weight = tensor.float()
        if not bool(weight.isfinite().all()):
            raise ModelError(f"model {model}: {file} has {name} with numbers that are not finite; copy it again")
        parts = plan.rounding.parts(weight)
        yield from ((f"{name.removesuffix('weight')}{part}", each) for part, each in parts.items())


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy all files that are neither weights nor already written."""
    files = [file for file in source.iterdir() if file.is_file() and not file.name.endswith(OTHER_WEIGHTS)]
    for file in dict.fromkeys([*files, *text_files(source)]):
        target = folder / file.relative_to(source)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def write_tensors(file: Path, heads: Mapping[str, StoredTensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors as they come. Raises ValueError for one that differs from its header."""
    header, places, end = dict[str, Any]({"__metadata__": {"format": "pt"}}), dict[str, int](), 0
    # wide numbers are first, so that all are aligned
    for name, head in sorted(heads.items(), key=lambda each: (-ITEM_BITS.get(each[1].dtype, 8), each[0])):
        header[name] = {"dtype": head.dtype, "shape": list(head.shape), "data_offsets": [end, end + head.num_bytes]}
        places[name], end = end, end + head.num_bytes
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with file.open("xb") as stream:
        stream.write(len(words).to_bytes(8, "little") + words)
        start = stream.tell()
        for name, tensor in tensors:
            head = heads[name]
            if (tuple(tensor.shape), tensor.nbytes) != (head.shape, head.num_bytes):
                raise ValueError(f"found {name} {list(tensor.shape)}, expected {list(head.shape)}")
            stream.seek(start + places.pop(name))
            stream.write(memoryview(cast(Any, tensor.contiguous().view(-1).view(torch.uint8).numpy())))
    if places:
        raise ValueError(f"found no {min(places)}")
