"""The contract of a format of quantized weights; stored tensors tell which matrices are packed. Without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

from swiftbatch.worker.model.config_values import shown
from swiftbatch.worker.model.gguf.header import BITS, PackedKind

# scales of inputs, outputs, keys and values are ignored, because only weights are quantized here
UNUSED = re.compile(r"\.(?:input|output|q|k|v)_(?:scale|zero_point|global_scale)$")
ITEM_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "BF16": 16, "F16": 16, "I16": 16}  # all others: 8
WHERE = "its quantization_config"
WHOLE = "weight"  # the part whose name is that of the whole matrix


class FormatError(ValueError):
    """Quantized weights are not supported. The text says why, in one line."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    dtype: str
    shape: tuple[int, ...]
    form: PackedKind | None = None  # the form in which a quantized matrix stays packed; None if it is dequantized

    @property
    def num_numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return int(self.num_numbers * (ITEM_BITS | BITS).get(self.dtype, 8)) // 8


class Scheme(Protocol):
    """The packing of one matrix."""

    def head(self, heads: Mapping[str, StoredTensor]) -> StoredTensor:
        """Return the whole matrix, described by its parts. Raises FormatError for parts that do not fit."""


@dataclass(frozen=True)
class Format:
    """The format of a checkpoint's quantized weights."""

    name: str
    words: str  # shown to users
    suffixes: Mapping[str, str]  # suffix of a stored name -> its part
    scheme_of: Callable[[str, Mapping[str, StoredTensor]], Scheme | None]  # None: its tensors are no parts of a matrix
    ending: str = ""  # suffix of the whole matrix's name
    own_endings: Mapping[str, str] = field(default_factory=dict)  # the same, by suffix, where it is another

    def place(self, stored: str) -> tuple[str, str]:
        """Return the name of the matrix that a stored tensor belongs to, and which part of it the tensor is."""
        for suffix, part in sorted(self.suffixes.items(), key=lambda pair: -len(pair[0])):
            if stored.endswith(suffix):
                return stored.removesuffix(suffix) + self.own_endings.get(suffix, self.ending), part
        return stored, WHOLE


def part(heads: Mapping[str, StoredTensor], name: str, *dtypes: str) -> StoredTensor:
    """Return the header entry of a part. Raises FormatError if the part is missing or has another dtype."""
    if name not in heads:
        raise FormatError(f"its part {name!r} is missing; copy all files again")
    if heads[name].dtype not in dtypes:
        raise FormatError(f"its part {name!r} is {heads[name].dtype}; expected {' or '.join(dtypes)}")
    return heads[name]


def only(heads: Mapping[str, StoredTensor], *names: str) -> None:
    if strange := sorted(set(heads) - set(names)):
        raise FormatError(f"its part {strange[0]!r} is none of this format")


def fits(name: str, found: tuple[int, ...], *expected: tuple[int, ...]) -> None:
    if found not in expected:
        wanted = " or ".join(str(list(each)) for each in expected)
        raise FormatError(f"its part {name!r} has the shape {list(found)}; expected {wanted}")


def matrix_shape(head: StoredTensor) -> tuple[int, int]:
    if len(head.shape) != 2 or 0 in head.shape:
        raise FormatError(f"it is stored in the shape {list(head.shape)}; expected a matrix")
    return head.shape[0], head.shape[1]


def scale_shapes(rows: int, depth: int, group: int | None) -> list[tuple[int, ...]]:
    """Return the shapes that scales of a matrix may have; without groups, they are of rows or of the whole matrix."""
    if group is None:
        return [(), (1,), (1, 1), (rows,), (rows, 1)]
    return [(rows, -(-depth // group))]


SMALLEST_GROUP = 16  # smaller groups would need more bytes for scales than for codes
EXACT_SCALES = ("BF16", "F16")  # their mantissas are short enough for exact products with every code


def group_that_divides(depth: int, group: int) -> int | None:
    """Return a group size that divides the depth and keeps stored scales, or None if there is none."""
    size = depth if group >= depth else math.gcd(depth, group)
    return size if size % 2 == 0 and (size in (group, depth) or size >= SMALLEST_GROUP) else None


def form_of(code: str, bits: int, depth: int, group: int | None, has_offsets: bool = False) -> PackedKind | None:
    """Return the packed form of codes whose groups have the given size, or None if they must be dequantized."""
    size = group_that_divides(depth, group or depth)
    return None if size is None else PackedKind(code, bits, size, has_offsets)


def form_of_integers(bits: int, depth: int, group: int | None, scales: str, is_centred: bool) -> PackedKind | None:
    """Return the packed form of integers with zero points, or None unless products are exact for all values."""
    if bits == 8 and is_centred:
        return form_of("int8", 8, depth, group)
    if scales not in EXACT_SCALES:
        return None
    code, width = ("uint4", 4) if bits <= 4 else ("uint8", 8)
    return form_of(code, width, depth, group, has_offsets=not is_centred)


NOTHING: tuple[Any, ...] = (None, False, {}, [], "")


def refuse_unknown(said: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise FormatError if `said` has an unknown key with a value, because it may change weights."""
    if strange := sorted(key for key, value in said.items() if key not in known and value not in NOTHING):
        raise FormatError(f"{where} has {shown(strange[0])} = {_short(said[strange[0]])}, which is not understood here")


def one_of(said: Mapping[str, Any], key: str, allowed: Collection[Any], where: str) -> Any:
    """Return the value of a key. Raises FormatError if this value is not allowed."""
    value = said.get(key)
    if not any(value == each and type(value) is type(each) for each in allowed):
        expected = ", ".join(repr(each) for each in allowed if each is not None)
        raise FormatError(f"{where} has {key} = {_short(value)}; expected {expected}")
    return value


def positive(said: Mapping[str, Any], key: str, where: str) -> int:
    value = said.get(key)
    if not _is_size(value):
        raise FormatError(f"{where} has {key} = {_short(value)}; expected a positive integer")
    return value


def two_sizes(said: Mapping[str, Any], key: str, where: str) -> tuple[int, int]:
    value = said.get(key)
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_size, value)):
        raise FormatError(f"{where} has {key} = {value!r:.80}; expected two positive integers")
    return value[0], value[1]


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{where} is {_short(value)}; expected an object")
    return value


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= 2**31


def _short(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:60]}..."
