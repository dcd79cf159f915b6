"""Checks for files that are missing, damaged or cut off, before weights are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from swiftbatch.worker.model.config_values import shown
from swiftbatch.worker.model.gguf.gguf_model import SUFFIX, link_names
from swiftbatch.worker.model.gguf.header import GGUFError, read_head

ADAPTER_FILE = "adapter_config.json"
GENERATION_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLED = ".bin"
PICKLED_FILE, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"  # read if there are no safetensors
ENTRIES = (SINGLE_FILE, INDEX_FILE, PICKLED_FILE, PICKLED_INDEX)  # the first one counts


def adapter_fault(path: Path) -> str | None:
    if (path / ADAPTER_FILE).exists():
        return f"{path / ADAPTER_FILE} says that it is an adapter; give its base model, and this as --lora NAME={path}"
    return None


def folder_fault(path: Path) -> str | None:
    """Return why a folder with a config is not a complete model, or None if it is."""
    if fault := small_files_fault(path):
        return fault
    if not (names := weight_names(path)):
        return f"no model.safetensors or pytorch_model.bin in {path}, nor an index; other weights are not loaded"
    for name in sorted(names):
        if Path(name).name != name or not os.path.isfile(path / name):
            if (index := index_name(path)) is None:
                return f"{path / name} is no file; copy it again"
            return f"{path / index} names {shown(name)}, which is no file of this folder; copy all files again"
    return None


def small_files_fault(path: Path) -> str | None:
    return _generation_fault(path) or _index_fault(path)


def _generation_fault(path: Path) -> str | None:
    """Return a fault if the generation config is damaged. `transformers` would ignore it silently."""
    file = path / GENERATION_FILE
    if not file.exists():
        return None
    settings, fault = json_object(file)
    return fault or eos_fault(str(file), settings)


def eos_fault(source: str, settings: Mapping[str, Any]) -> str | None:
    """Return a fault if end-of-text tokens are not valid token ids."""
    eos = settings.get("eos_token_id")
    if eos is None or all(type(each) is int for each in (eos if isinstance(eos, list) else [eos])):
        return None
    return f"{source} has eos_token_id = {eos!r:.80}; expected a token id or a list of them"


def weight_names(path: Path) -> set[str]:
    """Return the names of weight files, or no names if there is no valid index."""
    if links := link_names(path):
        return set(links)
    if (index := index_name(path)) is None:
        return {name for name in (SINGLE_FILE, PICKLED_FILE) if name == _entry(path)}
    shards = json_object(path / index)[0].get("weight_map")
    return set(map(str, shards.values())) if isinstance(shards, dict) else set()


def index_name(path: Path) -> str | None:
    """Return the name of the index that lists a model's weight files; None for a single file, or none."""
    return found if (found := _entry(path)) in (INDEX_FILE, PICKLED_INDEX) else None


def _entry(path: Path) -> str | None:
    """Return the name of the file that is a model's weights, or lists their files."""
    return next((name for name in ENTRIES if (path / name).exists()), None)


def _index_fault(path: Path) -> str | None:
    if (name := index_name(path)) is None:
        return None
    file = path / name
    _, fault = json_object(file)
    if fault:
        return fault
    return None if weight_names(path) else f"{file} has no `weight_map` from tensors to files; copy it again"


def json_object(file: Path) -> tuple[dict[str, Any], str | None]:
    """Return a file's JSON object, or an empty object and the fault."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{file} cannot be read: {error}"
    return (value, None) if isinstance(value, dict) else ({}, f"{file} is no JSON object")


# Finds weight files that end in zeros, as left by an interrupted download that had reserved its space.

BLOCK = 512  # bytes; intact weights have at most 16 consecutive zeros
STEP = 1 << 20  # bytes per read
RUN = 32  # zeros that an intact row may have at its end


def zero_tail_fault(files: Iterable[Path]) -> str | None:
    """Return a fault if a file ends in zeros, as an unfinished download does."""
    for file in files:
        try:
            with file.open("rb") as stream:
                fault = _fault(file, stream)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # its header is damaged, which the reader of its tensors reports
        if fault is not None:
            return fault
    return None


@dataclass(frozen=True)
class _Matrix:
    """The byte range of the last matrix of a tensor, or of a vector."""

    name: str
    start: int
    end: int
    num_rows: int  # 1 for a vector

    def may_end_in(self, num_zeros: int) -> bool:
        """Return whether `num_zeros` zeros at the end may be padding or a few small numbers."""
        num_bytes = self.end - self.start
        if self.num_rows == 1 or num_zeros < BLOCK:
            return True
        return 2 * num_zeros < num_bytes and num_zeros % (num_bytes // self.num_rows) < RUN


def _fault(file: Path, stream: BinaryIO) -> str | None:
    size = stream.seek(0, 2)
    if _num_zeros(stream, max(0, size - BLOCK), size) < BLOCK:
        return None
    has_zero_norm = False
    for matrix in reversed(list(_last_matrices(file, stream))):
        num_zeros = _num_zeros(stream, matrix.start, matrix.end)
        is_zero = num_zeros == matrix.end - matrix.start
        if not matrix.may_end_in(num_zeros) or (has_zero_norm and matrix.num_rows > 1 and num_zeros >= BLOCK):
            file = file.readlink() if file.suffix == SUFFIX and file.is_symlink() else file
            return f"{file} has zeros in place of its end, {shown(matrix.name)} among it: it was cut off; copy it again"
        if not is_zero:
            return None
        has_zero_norm |= matrix.name.endswith("weight")
    return None


def _num_zeros(stream: BinaryIO, start: int, end: int) -> int:
    """Count the zero bytes directly before `end`, but not before `start`."""
    place = end
    while place > start:
        first = max(start, place - STEP)
        stream.seek(first)
        data = stream.read(place - first)
        rest = len(data.rstrip(b"\0"))
        if rest or len(data) < place - first:
            return end - first - rest
        place = first
    return end - start


def _last_matrices(file: Path, stream: BinaryIO) -> Iterator[_Matrix]:
    """Yield a file's tensors in order. Of a tensor with several matrices, yield only the last matrix."""
    for name, shape, start, end in _gguf_spans(file) if file.suffix == SUFFIX else _safetensors_spans(stream):
        if not _is_matrix(name, shape):
            yield _Matrix(name, start, end, 1)
            continue
        num_matrices, num_rows = (1, shape[0]) if len(shape) == 2 else shape[:2]
        yield _Matrix(name, end - (end - start) // num_matrices, end, num_rows)


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has weight matrices, which are never all zeros."""
    is_other = name.endswith(("bias", "zeros", "zero_point")) or "norm" in name
    has_matrices = len(shape) in (2, 3) or (len(shape) == 4 and name.endswith("_blocks"))
    return has_matrices and min(shape) > 0 and min(shape[-2:]) > 1 and not is_other


def _gguf_spans(file: Path) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    try:
        head = read_head(file)
    except GGUFError:
        return
    for tensor in head.tensors:
        start = head.num_bytes + tensor.offset
        yield tensor.name, tensor.shape, start, start + tensor.num_bytes


def _safetensors_spans(stream: BinaryIO) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    stream.seek(0)
    first = 8 + int.from_bytes(stream.read(8), "little")
    if first > stream.seek(0, 2):
        return
    stream.seek(8)
    said = json.loads(stream.read(first - 8))
    entries = [(*entry["data_offsets"], name, entry) for name, entry in said.items() if name != "__metadata__"]
    for start, end, name, entry in sorted(entries, key=lambda each: each[:2]):
        yield name, tuple(entry["shape"]), first + start, first + end
