"""Reads a model's weights and hashes the bytes that it reads: what is computed with is what was hashed.

The memory is the process's own. A mapped file would change under a running model when somebody writes into it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase
from typing import Any, cast

import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.kernels.packed import Weight, plain
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.files import ModelFiles, read_config, stored_layout
from swiftbatch.worker.model.formats.assembly import Assembly
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.text_view import EMBEDDING, HEAD

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


def read_tensors(files: ModelFiles, dtype: torch.dtype, place: Callable[[Weight], Weight]) -> dict[str, Weight]:
    """All weights of a text model's files by their names in it, each as `place` gives it back: on its device, say.

    Quantized ones come as packed matrices of this dtype, or as its numbers; all others as they are stored. Those that
    change no text are read and hashed, and left out; so is a head that is the tied embedding once more.

    While one tensor is hashed the next one is read, so the host holds two at most that `place` has taken elsewhere,
    and the parts of a matrix that is not whole. Raises ModelError for a damaged file, OtherModelError for one whose
    bytes are not those of `files.digests`.
    """
    weights: dict[str, Weight] = {}
    assembly = Assembly(stored_layout(files.name, files.path), dtype)
    for file in weight_files(files.path):
        with file.open("rb", buffering=0) as stream, ThreadPoolExecutor(max_workers=1) as thread:
            hashing = _Hashing(thread)
            try:
                for name, tensor in _stored(cast(RawIOBase, stream), hashing):
                    if (found := assembly.take(name, tensor)) is not None:
                        weights[found[0]] = place(found[1])
            except FormatError as error:
                raise ModelError(f"model {files.name}: {file} has {error}") from None
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ModelError(
                    f"model {files.name}: {file} can't be read as safetensors ({error}); copy it again"
                ) from None
            files.refuse_other_weights(file.name, hashing.digest())
    if read_config(files.name, files.path).get("tie_word_embeddings") and EMBEDDING in weights:
        _drop_head_of(weights, files)
    return weights


def _drop_head_of(weights: dict[str, Weight], files: ModelFiles) -> None:
    """Drop a head that is stored beside the embedding it is tied to. Raises ModelError for another one."""
    head = weights.pop(HEAD, None)
    if head is not None and not torch.equal(plain(head), plain(weights[EMBEDDING])):
        raise ModelError(
            f"model {files.name}: config.json ties the head to the embedding, and its weights hold another {HEAD}; "
            "copy all files again, or say tie_word_embeddings = false"
        )


class _Hashing:
    """A SHA-256 that is computed in another thread, one piece at a time."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._sha256 = hashlib.sha256()
        self._thread = thread
        self._pending: Future[None] | None = None

    def take(self, data: bytes | memoryview) -> None:
        """Hash the next bytes, once those before are done."""
        self._finish()
        self._pending = self._thread.submit(self._sha256.update, data)

    def digest(self) -> str:
        self._finish()
        return self._sha256.hexdigest()

    def _finish(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None


def _stored(stream: RawIOBase, hashing: _Hashing) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file in the order of their bytes. Raises ValueError for one that is damaged."""
    start = _exactly(stream, 8)
    size = int.from_bytes(start, "little")
    if size > LONGEST_HEADER:
        raise ValueError(f"found a header of {size:,} bytes")
    header = _exactly(stream, size)
    hashing.take(start + header)
    said = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    end = 0
    for name, entry in sorted(said.items(), key=lambda pair: tuple(pair[1]["data_offsets"])):
        shape, dtype = _form(name, entry, end)
        end = entry["data_offsets"][1]
        data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        room = memoryview(cast(Any, data.numpy()))
        _fill(stream, room)
        hashing.take(room)
        yield name, data.view(dtype).view(shape)
    if stream.read(1):
        raise ValueError(f"found more than the {end:,} bytes of its tensors")


def _form(name: str, entry: dict[str, Any], expected_start: int) -> tuple[list[int], torch.dtype]:
    """Shape and dtype of a tensor. Raises ValueError where its bytes are none, or not those behind the last one's."""
    shape, said, (start, end) = entry["shape"], entry["dtype"], entry["data_offsets"]
    if said not in DTYPES:
        raise ValueError(f"found {name} as {said}, expected one of {', '.join(DTYPES)}")
    if start != expected_start or end - start != math.prod(shape) * DTYPES[said].itemsize or min(shape, default=0) < 0:
        raise ValueError(f"found {name} of shape {shape} at bytes {start} to {end}")
    return shape, DTYPES[said]


def _exactly(stream: RawIOBase, size: int) -> bytes:
    data = bytearray(size)
    _fill(stream, memoryview(data))
    return bytes(data)


def _fill(stream: RawIOBase, room: memoryview) -> None:
    while room:
        if not (num_read := stream.readinto(room)):
            raise ValueError(f"found its end, expected {len(room):,} bytes more")
        room = room[num_read:]
