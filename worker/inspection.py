"""Inspection of a model by its config and weight headers, without torch."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.worker.constraints.thinking import KNOWN
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.kernels.rank_shares import RANK_CHOICES
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory, fewest_gpus, most_together
from swiftbatch.worker.kv.kv_capacity import (
    ITEM_SIZES,
    NUM_UNWRITTEN,
    bytes_per_position,
    held_in_windows,
    held_of,
    state_bytes_of,
)
from swiftbatch.worker.kv.model_sizes import ModelSizes, sizes_of_stored
from swiftbatch.worker.model.architectures.catalogue import recurrent_shape
from swiftbatch.worker.model.bucket import Bucket, is_in_bucket
from swiftbatch.worker.model.compute_path import ComputePath, path_on
from swiftbatch.worker.model.config_faults import config_fault, keys_fault
from swiftbatch.worker.model.config_values import shown
from swiftbatch.worker.model.decoder_config import kernel_config
from swiftbatch.worker.model.digests import has_tekken_alone, weight_files
from swiftbatch.worker.model.file_checks import (
    PICKLED,
    PICKLED_FILE,
    PICKLED_INDEX,
    adapter_fault,
    folder_fault,
    json_object,
    small_files_fault,
    zero_tail_fault,
)
from swiftbatch.worker.model.formats.contract import FormatError, StoredTensor
from swiftbatch.worker.model.formats.layout import Layout, format_of, heads_in, layout_of
from swiftbatch.worker.model.hub import HubName, hub_snapshot
from swiftbatch.worker.model.model_files import (
    CONFIG_FILES,
    EMBEDDED,
    PARTS_FOLDER,
    gguf_of,
    model_folder,
    read_whole_config,
    weights_in,
    what_refuses,
)
from swiftbatch.worker.model.mtp_layers import NoPredictorError, predictor_of
from swiftbatch.worker.model.text_config import is_of_text, text_view

OTHER_WEIGHTS = frozenset((".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".pt", ".pth", ".safetensors"))
SMALL_FILES = ("*config.json", "*.index.json", "*.jinja", "chat_template*.json")


@dataclass(frozen=True)
class Source:
    """Model before its weights are read; `tensors` is None if unknown."""

    name: str
    path: Path
    tensors: tuple[tuple[str, StoredTensor], ...] | None  # has stored names
    has_files: bool  # False on the hub or in an object store, where only tensor headers are read


def source_of(model: str) -> Source:
    """Find `embedded`, a folder, a folder in an object store, or a hub id. Raises ModelError for anything else."""
    path = EMBEDDED if model == "embedded" else Path(model)
    if gguf_of(model) is not None:
        path = model_folder(model, CONFIG_FILES)
    if path.is_dir():
        stored = _stored_in(path)
        return Source(model, path, stored, has_files=stored is not None or _has_others(path))
    if is_in_bucket(model):
        path = model_folder(model, SMALL_FILES)
        return Source(model, path, _stored_in_bucket(Bucket(model), path), has_files=False)
    path = hub_snapshot(model, SMALL_FILES)
    stored = _stored_on_hub(model)
    files = weight_files(path)  # the hub's cache may have them
    return Source(model, path, stored, has_files=bool(files) and all(file.is_file() for file in files))


def _stored_in(path: Path) -> tuple[tuple[str, StoredTensor], ...] | None:
    files = [file for file in weight_files(path) if file.parent == path and file.is_file()]  # an index may name others
    try:
        return tuple(pair for file in files for pair in heads_in(file).items()) or None
    except FormatError as error:
        raise ModelError(f"model {path}: {error}") from None


def _stored_in_bucket(bucket: Bucket, path: Path) -> tuple[tuple[str, StoredTensor], ...] | None:
    names = weights_in(bucket, path)
    if any(name.endswith(PICKLED) for name in names):
        return None
    return tuple(pair for name in names for pair in bucket.heads(name).items())


def _has_others(path: Path) -> bool:
    """Return whether a folder has only weights of other programs; one without weights is accepted."""
    return any(file.suffix in OTHER_WEIGHTS for file in path.iterdir())


def _stored_on_hub(model: str) -> tuple[tuple[str, StoredTensor], ...] | None:
    """Return tensor headers from the hub; None if it is unreachable, or has pickled weights, which have no header.

    Raises ModelError for a model without weights that are loaded.
    """
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError

    name, revision, _ = HubName.of(model)
    try:
        files = get_safetensors_metadata(name, revision=revision).files_metadata.values()
    except NotASafetensorsRepoError:
        _refuse_without_pickles(model)
        return None
    except Exception:  # the hub's client raises many kinds
        return None
    return tuple(
        (name, StoredTensor(str(each.dtype), tuple(each.shape)))
        for file in files
        for name, each in file.tensors.items()
    )


def _refuse_without_pickles(model: str) -> None:
    from huggingface_hub import list_repo_files

    name, revision, _ = HubName.of(model)
    try:
        found = list_repo_files(name, revision=revision)
    except Exception:  # the hub's client raises many kinds
        return
    if not {PICKLED_FILE, PICKLED_INDEX} & set(found):
        raise ModelError(
            f"model {model}: no model.safetensors or pytorch_model.bin on the hub, nor an index; other weights are not "
            "loaded"
        )


DTYPE = "bfloat16"  # bytes and slots are reported for it
GPU_BYTES = 84_000_000_000  # 80 GiB less what programs cannot use
CONTEXT_BYTES = 600_000_000  # an estimate of CUDA's own memory
H100 = GPUMemory(GPU_BYTES - CONTEXT_BYTES)
SLOT_LENGTHS = (8_192, 32_768, 100_000)


class Inspection(Frozen):
    """Model as `swiftbatch inspect` shows it; None means unknown."""

    model: str
    kind: str
    text_kind: str
    refusal: str | None  # says why it does not run here
    num_parameters: int | None
    formats: dict[str, int]  # counts numbers by safetensors' dtype or packed format
    quantization: str | None  # names the format of quantized weights
    num_bytes: int | None
    max_positions: int | None
    bytes_per_position: int | None
    num_whole_positions: int | None  # newest positions that take all these bytes on a CPU; None: all do
    bytes_per_old_position: int | None  # bytes of older positions
    state_bytes: int
    checkpointed_state_bytes: int  # a checkpoint has this part of them
    cpu: ComputePath | None
    cuda: ComputePath | None
    slots: dict[int, int]  # counts jobs that fit on a GPU of 80 GB with plain decoding, by positions
    gpus: dict[int, int]  # the fewest such GPUs that share the model for one job, where one is too few
    has_chat_template: bool
    thinking_markers: tuple[str, str] | None
    predictor: str | None  # says how multi-token prediction layers (MTP) are used; None without any
    engines: tuple[str, ...]  # lists engines with all their parts


def inspect_model(model: str) -> Inspection:
    """Inspect `embedded`, a folder or a hub id. Raises ModelError if there is no config."""
    source = source_of(model)
    if fault := adapter_fault(source.path):
        raise ModelError(f"model {model}: {fault}")
    whole = read_whole_config(model, source.path)
    config = text_view(whole)
    has_numbers = config_fault(config) is None
    layout, fault = _layout(source, whole) if has_numbers else (None, None)
    refusal = _refusal(source, whole) or fault or (keys_fault(config, layout.heads) if layout else None)
    refusal = refusal or (zero_tail_fault(weight_files(source.path)) if source.has_files else None)
    heads = {name: each for name, each in layout.heads.items() if is_of_text(name, config)} if layout else {}
    stored, number = set(heads) or None, sum(each.num_numbers for each in heads.values()) or None
    refusal = refusal or _nowhere(config, stored)
    sizes = sizes_of_stored(config, heads, DTYPE) if number and refusal is None else None
    template = _chat_template(source.path)
    paths = {device: path_on(device, config, stored) for device in ("cpu", "cuda")} if refusal is None else {}
    shape = recurrent_shape(config) if refusal is None else None
    predictor = _predictor(source, config, paths.get("cpu")) if refusal is None else None
    is_planned = sizes is not None and (paths["cuda"].name == "kernels" or shape is not None)
    num_bytes = bytes_per_position(config, DTYPE) if refusal is None else None
    held = held_of(config) if num_bytes is not None else None
    slots = _slots(sizes, config["max_position_embeddings"]) if sizes is not None and is_planned else {}
    return Inspection(
        model=model,
        kind=shown(str(whole.get("model_type"))),
        text_kind=shown(str(config.get("model_type"))),
        refusal=refusal,
        num_parameters=number,
        formats=_formats(source, layout),
        quantization=layout.format.words if layout and layout.format else None,
        num_bytes=sum(each.num_bytes for _, each in source.tensors) if source.tensors else None,
        max_positions=config["max_position_embeddings"] if has_numbers else None,
        bytes_per_position=num_bytes,
        num_whole_positions=held.num_whole if held else None,
        bytes_per_old_position=round(held.share * num_bytes) if held and num_bytes else None,
        state_bytes=state_bytes_of(shape, ITEM_SIZES[DTYPE]) if shape else 0,
        checkpointed_state_bytes=shape.checkpoint_bytes(ITEM_SIZES[DTYPE]) if shape else 0,
        cpu=paths.get("cpu"),
        cuda=paths.get("cuda"),
        slots=slots,
        gpus={} if sizes is None else _gpus(sizes, [length for length in slots if not slots[length]], config),
        has_chat_template=template is not None,
        thinking_markers=next((pair for pair in KNOWN if template and all(each in template for each in pair)), None),
        predictor=predictor,
        engines=_engines(source.path),
    )


def _layout(source: Source, whole: dict[str, Any]) -> tuple[Layout | None, str | None]:
    try:
        return layout_of(source.tensors or (), whole, format_of(text_view(whole), source.path)), None
    except FormatError as error:
        return None, str(error)


def _refusal(source: Source, whole: dict[str, Any]) -> str | None:
    """Return why a model does not run here, without the supported kinds."""
    if said := what_refuses(whole, source.path):
        return said.split("; kinds that run here")[0]
    return (folder_fault if source.has_files else small_files_fault)(source.path)


def _nowhere(config: dict[str, Any], stored: set[str] | None) -> str | None:
    """Return why a model that only our kernels run does not run on CPUs either, or None if it or others do."""
    path = path_on("cpu", config, stored)
    return path.reason if path.name == "none" else None


def _formats(source: Source, layout: Layout | None) -> dict[str, int]:
    if source.tensors is None:
        return {}
    packed = {stored for each in (layout.packed if layout else ()) for stored in each.parts.values()}
    heads = [head for name, head in source.tensors if name not in packed]
    heads += [layout.heads[each.name] for each in (layout.packed if layout else ()) if layout]
    numbers: Counter[str] = Counter()
    for each in heads:
        numbers[each.dtype] += each.num_numbers
    return dict(numbers.most_common())


def _slots(sizes: ModelSizes, most_positions: int) -> dict[int, int]:
    return {length: _num_together(sizes, length) for length in SLOT_LENGTHS if length <= most_positions}


def _num_together(sizes: ModelSizes, length: int) -> int:
    sizes = replace(sizes, held=held_in_windows(sizes.windows, NUM_UNWRITTEN))
    return most_together(sizes, H100, length)


def _gpus(sizes: ModelSizes, lengths: list[int], config: dict[str, Any]) -> dict[int, int]:
    """Return the fewest GPUs by a job's positions, without lengths for which none are enough."""
    if (decoder := kernel_config(config)) is None:
        return {}
    sizes = replace(sizes, held=held_in_windows(sizes.windows, NUM_UNWRITTEN))
    fewest = {length: fewest_gpus(sizes, decoder, H100, length, RANK_CHOICES[1:]) for length in lengths}
    return {length: number for length, number in fewest.items() if number}


def _chat_template(path: Path) -> str | None:
    for file in sorted(path.glob("*.jinja")):
        return file.read_text(encoding="utf-8", errors="replace")
    for file in (*sorted(path.glob("chat_template*.json")), path / "tokenizer_config.json"):
        if said := json_object(file)[0].get("chat_template"):
            return json.dumps(said, ensure_ascii=False)
    return "" if has_tekken_alone(path) else None  # mistral-common writes its chats


def _predictor(source: Source, config: dict[str, Any], on_a_cpu: ComputePath | None) -> str | None:
    """Return the use of a checkpoint's multi-token prediction layers; None without any."""
    try:
        predictor_of(source.tensors or (), config, source.path)
    except NoPredictorError as error:
        return f"not used: {error}" if str(error) else None
    if on_a_cpu is None or on_a_cpu.name != "kernels":
        return "not used: the kernels do not run the model"
    return "auto drafts with the first of them, where that is faster"


def _engines(path: Path) -> tuple[str, ...]:
    return tuple(
        name
        for name, entry in ENGINES.items()
        if entry.part is None or (path / PARTS_FOLDER / entry.part.name).exists()
    )
