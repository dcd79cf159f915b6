"""The contract of a format of quantized weights: where a matrix's parts lie, and what they mean. Without torch.

A format is read from a model's config. The stored tensors say which matrices are packed: what a config lists as left
out is stored as numbers, and is read as such.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from swiftbatch.worker.model.gguf.tensor_types import BITS, PackedKind

if TYPE_CHECKING:
    import torch

    from swiftbatch.worker.kernels.packed import Weight

# scales of inputs, outputs, keys and values: they change no weight, and nothing but weights is quantized here
UNUSED = re.compile(r"\.(?:input|output|q|k|v)_(?:scale|zero_point|global_scale)$")
ITEM_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "BF16": 16, "F16": 16, "I16": 16}  # all others: 8
WHOLE = "weight"  # the part that has the matrix's own name


class FormatError(ValueError):
    """Quantized weights that are not understood; the text says in one line what about them."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the head of its file describes it: `dtype` in the words of safetensors, or of GGUF."""

    dtype: str
    shape: tuple[int, ...]
    form: PackedKind | None = None  # of a matrix in parts that stays packed

    @property
    def num_numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes in its file."""
        return int(self.num_numbers * (ITEM_BITS | BITS).get(self.dtype, 8)) // 8


class Scheme(Protocol):
    """The way in which one matrix is packed."""

    @property
    def numbers(self) -> str:
        """The type in which its numbers are stored, in a word."""

    def shape(self, heads: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        """The shape of the matrix, from the heads of its parts. Raises FormatError for parts that do not fit."""

    def form(self, heads: Mapping[str, StoredTensor]) -> PackedKind | None:
        """The form that the matrix stays packed in; None for one that comes as numbers, or of which these alone tell.

        `heads` are those that `shape` took.
        """

    def weight(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        """The matrix in the run's dtype. Raises FormatError for parts that are damaged."""


@dataclass(frozen=True)
class Format:
    """The format of a checkpoint. `scheme_of` takes a matrix's name and the heads of its parts."""

    name: str
    words: str  # for users
    suffixes: Mapping[str, str]  # how stored names end, and the part that each is
    scheme_of: Callable[[str, Mapping[str, StoredTensor]], Scheme | None]  # None: its tensors are no parts of a matrix
    ending: str = ""  # what a matrix's name has in place of such an end

    def place(self, stored: str) -> tuple[str, str]:
        """The matrix, and the part of it, that a stored tensor is by its name."""
        for suffix, part in sorted(self.suffixes.items(), key=lambda pair: -len(pair[0])):
            if stored.endswith(suffix):
                return stored.removesuffix(suffix) + self.ending, part
        return stored, WHOLE


def part(heads: Mapping[str, StoredTensor], name: str, *dtypes: str) -> StoredTensor:
    """A part that must be there, in one of these dtypes. Raises FormatError."""
    if name not in heads:
        raise FormatError(f"its part {name!r} is missing; copy all files again")
    if heads[name].dtype not in dtypes:
        raise FormatError(f"its part {name!r} is {heads[name].dtype}; expected {' or '.join(dtypes)}")
    return heads[name]


def only(heads: Mapping[str, StoredTensor], *names: str) -> None:
    """Raise FormatError for a part that is none of these."""
    if strange := sorted(set(heads) - set(names)):
        raise FormatError(f"its part {strange[0]!r} is none of this format")


def fits(name: str, found: tuple[int, ...], *expected: tuple[int, ...]) -> None:
    """Raise FormatError for a part of another shape."""
    if found not in expected:
        wanted = " or ".join(str(list(each)) for each in expected)
        raise FormatError(f"its part {name!r} has the shape {list(found)}; expected {wanted}")


def matrix_shape(head: StoredTensor) -> tuple[int, int]:
    """Rows and columns. Raises FormatError for a tensor that is no matrix."""
    if len(head.shape) != 2 or 0 in head.shape:
        raise FormatError(f"it is stored in the shape {list(head.shape)}; expected a matrix")
    return head.shape[0], head.shape[1]
