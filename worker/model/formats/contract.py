"""The contract of a format of quantized weights; stored tensors say which matrices are packed. Without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from swiftbatch.worker.model.config_values import shown
from swiftbatch.worker.model.gguf.header import BITS, PackedKind

if TYPE_CHECKING:
    import torch

    from swiftbatch.worker.kernels.quantized_weights import Weight

# scales of inputs, outputs, keys and values: they change no weight, and nothing but weights is quantized here
UNUSED = re.compile(r"\.(?:input|output|q|k|v)_(?:scale|zero_point|global_scale)$")
ITEM_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "BF16": 16, "F16": 16, "I16": 16}  # all others: 8
WHOLE = "weight"  # the part that has the matrix's own name


class FormatError(ValueError):
    """Quantized weights that are not understood; the text says why, in one line."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's head describes it."""

    dtype: str
    shape: tuple[int, ...]
    form: PackedKind | None = None  # set if it is a matrix in parts that stays packed

    @property
    def num_numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return int(self.num_numbers * (ITEM_BITS | BITS).get(self.dtype, 8)) // 8


class Scheme(Protocol):
    """The packing of one matrix."""

    @property
    def numbers(self) -> str:
        """Return a word for the type of its stored numbers."""

    def shape(self, heads: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        """Return the matrix's shape. Raises FormatError for parts that do not fit."""

    def form(self, heads: Mapping[str, StoredTensor]) -> PackedKind | None:
        """Return the form that the matrix stays packed in, if the heads allow one."""

    def weight(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        """Return the matrix in the run's dtype. Raises FormatError for damaged parts."""


@dataclass(frozen=True)
class Format:
    """The format of a checkpoint."""

    name: str
    words: str  # shown to users
    suffixes: Mapping[str, str]  # suffix of a stored name -> its part
    scheme_of: Callable[[str, Mapping[str, StoredTensor]], Scheme | None]  # None: its tensors are no parts of a matrix
    ending: str = ""  # suffix of the whole matrix's name

    def place(self, stored: str) -> tuple[str, str]:
        """Return a stored tensor's matrix, and its part of that."""
        for suffix, part in sorted(self.suffixes.items(), key=lambda pair: -len(pair[0])):
            if stored.endswith(suffix):
                return stored.removesuffix(suffix) + self.ending, part
        return stored, WHOLE


def part(heads: Mapping[str, StoredTensor], name: str, *dtypes: str) -> StoredTensor:
    """Raise FormatError for a missing part or another dtype."""
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


SMALLEST_GROUP = 16  # other groups are cut into this size; below it, scales would outweigh codes
EXACT_SCALES = ("BF16", "F16")  # short enough for exact products with every code


def group_that_divides(depth: int, group: int) -> int | None:
    """Return a group size of packed matrices that keeps stored scales; None without."""
    size = depth if group >= depth else math.gcd(depth, group)
    return size if size % 2 == 0 and (size in (group, depth) or size >= SMALLEST_GROUP) else None


def form_of(code: str, bits: int, depth: int, group: int | None, has_offsets: bool = False) -> PackedKind | None:
    """Return the form of codes in groups of a stored size; None where they are dequantized."""
    size = group_that_divides(depth, group or depth)
    return None if size is None else PackedKind(code, bits, size, has_offsets)


def form_of_integers(bits: int, depth: int, group: int | None, scales: str, is_centred: bool) -> PackedKind | None:
    """Return the form of integers with zeros, where products are exact whatever their numbers."""
    if bits == 8 and is_centred:
        return form_of("int8", 8, depth, group)
    if scales not in EXACT_SCALES:
        return None
    code, width = ("uint4", 4) if bits <= 4 else ("uint8", 8)
    return form_of(code, width, depth, group, has_offsets=True)


NOTHING: tuple[Any, ...] = (None, False, {}, [], "")


def refuse_unknown(said: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise FormatError for keys that may change weights."""
    if strange := sorted(key for key, value in said.items() if key not in known and value not in NOTHING):
        raise FormatError(f"{where} has {shown(strange[0])} = {_short(said[strange[0]])}, which is not understood here")


def one_of(said: Mapping[str, Any], key: str, allowed: Collection[Any], where: str) -> Any:
    """Raise FormatError for a value that is not allowed."""
    value = said.get(key)
    if not any(value == each and type(value) is type(each) for each in allowed):
        expected = ", ".join(repr(each) for each in allowed if each is not None)
        raise FormatError(f"{where} has {key} = {_short(value)}; expected {expected}")
    return value


def positive(said: Mapping[str, Any], key: str, where: str) -> int:
    value = said.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**31:
        raise FormatError(f"{where} has {key} = {_short(value)}; expected a positive integer")
    return value


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{where} is {_short(value)}; expected an object")
    return value


def _short(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:60]}..."
