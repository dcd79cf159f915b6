"""The header of a GGUF file: metadata, and offsets and types of tensors. Without torch."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


@dataclass(frozen=True)
class PackedKind:
    """A packed form: a code, its bits, the size of groups that share a scale, and whether offsets are stored.

    Offsets of centred codes follow from the scales.
    """

    code: str
    bits: int
    group: int
    has_offsets: bool


@dataclass(frozen=True)
class TensorType:
    """A tensor type of ggml: rows consist of blocks of `block` numbers in `num_bytes` bytes."""

    name: str
    block: int  # numbers
    num_bytes: int  # bytes per block
    packed: PackedKind | None = None  # the form in which `gguf_weights` returns its matrices


_INT4, _CENTRED = PackedKind("uint4", 4, 32, True), PackedKind("uint4", 4, 32, False)
_IQ4 = PackedKind("iq4_nl", 4, 32, False)
_INT8, _UINT8 = PackedKind("int8", 8, 32, False), PackedKind("uint8", 8, 32, True)
READABLE = {  # type numbers in files
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18, _CENTRED),
    3: TensorType("Q4_1", 32, 20, _INT4),
    6: TensorType("Q5_0", 32, 22, _INT8),
    7: TensorType("Q5_1", 32, 24, _UINT8),
    8: TensorType("Q8_0", 32, 34, _INT8),
    10: TensorType("Q2_K", 256, 84, PackedKind("uint4", 4, 16, True)),
    11: TensorType("Q3_K", 256, 110, PackedKind("int8", 8, 16, False)),
    12: TensorType("Q4_K", 256, 144, _INT4),
    13: TensorType("Q5_K", 256, 176, _UINT8),
    14: TensorType("Q6_K", 256, 210, PackedKind("int8", 8, 16, False)),
    20: TensorType("IQ4_NL", 32, 18, _IQ4),
    23: TensorType("IQ4_XS", 256, 136, _IQ4),
    30: TensorType("BF16", 1, 2),
}
BITS = {each.name: each.num_bytes * 8 / each.block for each in READABLE.values()}  # bits per number
MAGIC = b"GGUF"
VERSIONS = (2, 3)
LONGEST_HEAD = 100_000_000  # bytes; those of the largest vocabularies have about 20 million
STEP = 1 << 22  # bytes per read
MOST_THINGS = 100_000  # most tensors, and most keys of metadata
LONGEST_KEY = 65_535  # bytes; the format's own limit
MOST_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MOST_ALIGNMENT = 65_536
STRING, ARRAY = 8, 9
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


class GGUFError(ValueError):
    """A file is not valid GGUF or not supported. The text says why."""


@dataclass(frozen=True)
class TensorHead:
    """A tensor as the header describes it. `shape` has torch's order of dimensions."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # bytes from the start of the data

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block * self.type.num_bytes


@dataclass(frozen=True)
class GGUFHead:
    """The metadata and tensors that a file describes."""

    metadata: Mapping[str, Any]
    tensors: tuple[TensorHead, ...]  # sorted by offset
    num_bytes: int
    sha256: str  # hash of the header's bytes


def read_head(file: Path) -> GGUFHead:
    """Read a file's header. Raises GGUFError."""
    try:
        with file.open("rb") as stream:
            return _read(_Cursor(stream, os.fstat(stream.fileno()).st_size))
    except OSError as error:
        raise GGUFError(f"it cannot be read: {error}") from None


class _Cursor:
    """Reads a file's bytes in order."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self.size = stream, size
        self._end = min(size, LONGEST_HEAD)
        self._data = b""  # all bytes read so far
        self.place = 0

    @property
    def rest(self) -> int:
        return self._end - self.place

    def take(self, size: int) -> bytes:
        """Raise GGUFError where the file ends before."""
        start = self.place
        self.place += size
        if self.place > len(self._data):
            self._read_on(size)
        return self._data[start : self.place]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self, longest: int = LONGEST_HEAD) -> str:
        size = self.number(8)
        if size > longest:
            raise GGUFError(f"its head has a text of {size:,} bytes at {self.place:,}")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise GGUFError(f"its head has a text at {self.place:,} that is not UTF-8") from None

    def count(self, least: int, most: int = LONGEST_HEAD) -> int:
        """Read a count of items. Raises GGUFError unless this many items of `least` bytes fit."""
        number = self.number(8)
        if number * least > self.rest or number > most:
            raise GGUFError(f"its head counts {number:,} things at {self.place:,}, and {self.rest:,} bytes follow")
        return number

    def sha256(self) -> str:
        return hashlib.sha256(self._data[: self.place]).hexdigest()

    def _read_on(self, size: int) -> None:
        """Raise GGUFError where the file ends before."""
        if self.place > self._end:
            if self.size > LONGEST_HEAD:
                raise GGUFError(f"its head is longer than {LONGEST_HEAD:,} bytes")
            raise GGUFError(f"its head says that {size:,} bytes follow at {self.place - size:,}, where it ends")
        self._data += self._stream.read(max(self.place - len(self._data), min(STEP, self._end - len(self._data))))
        if self.place > len(self._data):
            raise GGUFError(f"it ends at {len(self._data):,} bytes, while it is read")


def _read(cursor: _Cursor) -> GGUFHead:
    if (magic := cursor.take(4)) != MAGIC:
        raise GGUFError(f"it begins with {magic!r}, expected {MAGIC!r}")
    version = cursor.number(4)
    if version not in VERSIONS:
        big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        said = "its numbers are big-endian" if big else f"its version is {version}"
        raise GGUFError(f"{said}; expected version 2 or 3, little-endian")
    num_tensors, num_entries = cursor.count(33, MOST_THINGS), cursor.count(13, MOST_THINGS)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.text(LONGEST_KEY)
        if key in metadata:
            raise GGUFError(f"its head says {key} twice")
        metadata[key] = _value(cursor, cursor.number(4), key)
    tensors = sorted((_tensor(cursor) for _ in range(num_tensors)), key=lambda tensor: tensor.offset)
    padding = -cursor.place % _alignment(metadata)
    if num_tensors:
        cursor.take(padding)
    _refuse_misplaced(tensors, _alignment(metadata), cursor.size - cursor.place)
    return GGUFHead(metadata, tuple(tensors), cursor.place, cursor.sha256())


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind in NUMBERS:
        return _numbers(cursor, kind, 1)[0].item()
    if kind == STRING:
        return cursor.text()
    if kind != ARRAY:
        raise GGUFError(f"its head has {key} of type {kind}, which there is not")
    kind = cursor.number(4)
    if kind == STRING:
        return [cursor.text() for _ in range(cursor.count(8))]
    if kind not in NUMBERS:
        raise GGUFError(f"its head has {key} as a list of type {kind}; expected numbers or texts")
    return _numbers(cursor, kind, cursor.count(np.dtype(NUMBERS[kind]).itemsize))


def _numbers(cursor: _Cursor, kind: int, number: int) -> np.ndarray:
    dtype = np.dtype(NUMBERS[kind])
    return np.frombuffer(cursor.take(number * dtype.itemsize), dtype=dtype)


def _tensor(cursor: _Cursor) -> TensorHead:
    name = cursor.text(LONGEST_KEY)
    num_dimensions = cursor.number(4)
    if not 1 <= num_dimensions <= MOST_DIMENSIONS:
        raise GGUFError(f"its tensor {name} has {num_dimensions:,} dimensions, expected 1 to {MOST_DIMENSIONS}")
    shape = tuple(reversed([cursor.number(8) for _ in range(num_dimensions)]))
    kind = _type_of(cursor.number(4), name)
    if min(shape) < 1 or shape[-1] % kind.block:
        raise GGUFError(f"its tensor {name} of {kind.name} has the shape {list(shape)}")
    return TensorHead(name, shape, kind, cursor.number(8))


def _type_of(number: int, tensor: str) -> TensorType:
    if number in READABLE:
        return READABLE[number]
    from gguf import GGMLQuantizationType  # imported here because only this error names the others

    name = next((each.name for each in GGMLQuantizationType if each == number), f"type {number}")
    known = ", ".join(each.name for each in READABLE.values())
    raise GGUFError(f"its tensor {tensor} is stored as {name}; expected one of {known}")


def _alignment(metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= MOST_ALIGNMENT:
        raise GGUFError(f"its general.alignment is {alignment!r:.80}, expected 1 to {MOST_ALIGNMENT:,}")
    return alignment


def _refuse_misplaced(tensors: list[TensorHead], alignment: int, num_bytes: int) -> None:
    """Raise GGUFError for tensors that share a name or bytes, or extend beyond the end of the file."""
    names = Counter(tensor.name for tensor in tensors)
    if twice := sorted(name for name, number in names.items() if number > 1):
        raise GGUFError(f"it holds the tensor {twice[0]} twice")
    end = 0
    for tensor in tensors:
        if tensor.offset < end or tensor.offset % alignment:
            raise GGUFError(f"its tensor {tensor.name} begins at {tensor.offset:,}, expected {end:,} or behind it")
        end = tensor.offset + tensor.num_bytes
        if end > num_bytes:
            raise GGUFError(f"its tensor {tensor.name} ends at byte {end:,} of its data, which has {num_bytes:,}")
