"""Matrices of integers as compressed-tensors stores them: a byte each, or packed into 32-bit words. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftbatch.worker.model.formats.contract import (
    WHOLE,
    FormatError,
    StoredTensor,
    fits,
    form_of_integers,
    matrix_shape,
    only,
    part,
)
from swiftbatch.worker.model.gguf.tensor_types import PackedKind

if TYPE_CHECKING:
    import torch

    from swiftbatch.worker.kernels.packed_weights import Weight

SCALES = ("BF16", "F16", "F32")
WORD = 32  # bits


@dataclass(frozen=True)
class ByteScheme:
    """`weight` of int8, a scale for all, for each row, or for each group of columns, and zeros as many."""

    group: int | None
    numbers: str = "int8"

    def shape(self, heads: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        only(heads, WHOLE, "scale", "zero_point")
        rows, depth = matrix_shape(part(heads, WHOLE, "I8"))
        scales = part(heads, "scale", *SCALES).shape
        fits("scale", scales, *scale_shapes(rows, depth, self.group))
        if "zero_point" in heads:
            fits("zero_point", part(heads, "zero_point", "I8").shape, scales)
        return rows, depth

    def form(self, heads: Mapping[str, StoredTensor]) -> PackedKind | None:
        is_centred = "zero_point" not in heads
        return form_of_integers(8, self.shape(heads)[1], self.group, heads["scale"].dtype, is_centred)

    def weight(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        from swiftbatch.worker.model.formats.values.integers import byte_weight

        return byte_weight(parts, self.group, dtype)


@dataclass(frozen=True)
class PackedScheme:
    """`weight_packed` of so many bits a code, rows in whole words; `weight_shape` tells the columns."""

    bits: int
    group: int | None
    is_symmetric: bool

    @property
    def numbers(self) -> str:
        return f"int{self.bits}"

    def shape(self, heads: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        only(heads, "packed", "scale", "zero_point", "shape", "g_idx")
        rows, words = matrix_shape(part(heads, "packed", "I32"))
        scales = part(heads, "scale", *SCALES).shape
        fits("shape", part(heads, "shape", "I64", "I32").shape, (2,))
        depth = self._depth(words, scales)
        fits("scale", scales, *scale_shapes(rows, depth, self.group))
        if "g_idx" in heads:
            fits("g_idx", part(heads, "g_idx", "I32", "I64").shape, (depth,))
        if self.is_symmetric == ("zero_point" in heads):
            raise FormatError(f"it has {'' if self.is_symmetric else 'no '}zero_point, unlike its config says")
        if not self.is_symmetric:
            self._check_zeros(heads, rows, scales)
        return rows, depth

    def form(self, heads: Mapping[str, StoredTensor]) -> PackedKind | None:
        if "g_idx" in heads:
            return None
        scales = heads["scale"].dtype
        return form_of_integers(self.bits, self.shape(heads)[1], self.group, scales, self.is_symmetric)

    def _depth(self, words: int, scales: tuple[int, ...]) -> int:
        """The columns: as many as the words hold, less what the last group leaves of them."""
        most = words * WORD // self.bits
        if self.group is None or len(scales) != 2:
            return most
        return min(most, scales[1] * self.group)

    def _check_zeros(self, heads: Mapping[str, StoredTensor], rows: int, scales: tuple[int, ...]) -> None:
        zeros = part(heads, "zero_point", "I32", "I8")
        packed = (-(-rows * self.bits // WORD), scales[-1] if len(scales) == 2 else 1)
        fits("zero_point", zeros.shape, *([packed] if zeros.dtype == "I32" else [scales]))

    def weight(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        from swiftbatch.worker.model.formats.values.integers import packed_weight

        return packed_weight(parts, self.bits, self.group, dtype)


def scale_shapes(rows: int, depth: int, group: int | None) -> list[tuple[int, ...]]:
    """The shapes that scales of a matrix may have."""
    if group is None:
        return [(), (1,), (1, 1), (rows,), (rows, 1)]
    return [(rows, -(-depth // group))]
