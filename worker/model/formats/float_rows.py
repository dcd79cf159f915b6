"""Matrices of 8-bit floats (e4m3) and 4-bit floats (e2m1), with their scales. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftbatch.worker.model.formats.contract import (
    WHOLE,
    FormatError,
    StoredTensor,
    fits,
    form_of,
    matrix_shape,
    only,
    part,
)
from swiftbatch.worker.model.gguf.header import PackedKind

if TYPE_CHECKING:
    import torch

    from swiftbatch.worker.kernels.quantized_weights import Weight

E4M3 = "F8_E4M3"
SCALES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class FloatScheme:
    """`weight` of e4m3, with scales of blocks, of rows, or of the whole matrix.

    Experts in one tensor have a leading dimension.
    """

    scale: str
    block: tuple[int, int] | None = None
    numbers: str = E4M3

    def shape(self, heads: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        only(heads, WHOLE, self.scale)
        shape, scales = part(heads, WHOLE, E4M3).shape, part(heads, self.scale, *SCALES).shape
        if len(shape) not in (2, 3) or 0 in shape:
            raise FormatError(f"it is stored in the shape {list(shape)}; expected a matrix")
        fits(self.scale, scales, *self._grids(shape))
        return shape

    def form(self, heads: Mapping[str, StoredTensor]) -> PackedKind | None:
        shape = heads[WHOLE].shape
        return form_of("e4m3", 8, shape[1], self.block and self.block[1]) if len(shape) == 2 else None

    def weight(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        from swiftbatch.worker.model.formats.dequantization import grid_weight

        return grid_weight(parts[WHOLE], parts[self.scale], self.block, dtype)

    def _grids(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        *front, rows, columns = shape
        if self.block is not None:
            return [(*front, -(-rows // self.block[0]), -(-columns // self.block[1]))]
        if front:
            return [(*front,), (*front, 1, 1), (*front, rows, 1)]
        return [(), (1,), (1, 1), (rows,), (rows, 1)]


BYTES = "U8"
NVFP4_GROUP, MXFP4_GROUP = 16, 32


@dataclass(frozen=True)
class NVFP4Scheme:
    """Two e2m1 codes per byte, an e4m3 scale per 16 codes, and the common scale `whole`."""

    codes: str
    whole: str
    is_divided: bool
    numbers: str = "NVFP4"

    def shape(self, heads: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        only(heads, self.codes, "scale", self.whole)
        rows, depth = _shape(part(heads, self.codes, BYTES), NVFP4_GROUP)
        fits("scale", part(heads, "scale", E4M3).shape, (rows, depth // NVFP4_GROUP))
        fits(self.whole, part(heads, self.whole, "F32").shape, (), (1,), (1, 1))
        return rows, depth

    def form(self, heads: Mapping[str, StoredTensor]) -> PackedKind | None:
        return form_of("e2m1", 4, self.shape(heads)[1], NVFP4_GROUP)

    def weight(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        from swiftbatch.worker.model.formats.dequantization import nvfp4_weight

        return nvfp4_weight(parts[self.codes], parts["scale"], parts[self.whole], self.is_divided, dtype)


@dataclass(frozen=True)
class MXFP4Scheme:
    """Two e2m1 codes per byte, and an exponent per 32 codes."""

    numbers: str = "MXFP4"

    def shape(self, heads: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        only(heads, "packed", "scale")
        rows, depth = _shape(part(heads, "packed", BYTES), MXFP4_GROUP)
        fits("scale", part(heads, "scale", BYTES).shape, (rows, depth // MXFP4_GROUP))
        return rows, depth

    def form(self, heads: Mapping[str, StoredTensor]) -> PackedKind | None:
        return form_of("e2m1", 4, self.shape(heads)[1], MXFP4_GROUP)

    def weight(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        from swiftbatch.worker.model.formats.dequantization import mxfp4_weight

        return mxfp4_weight(parts["packed"], parts["scale"], dtype)


def _shape(codes: StoredTensor, group: int) -> tuple[int, int]:
    rows, width = matrix_shape(codes)
    if width * 2 % group:
        raise FormatError(f"it has {width * 2} columns; expected a multiple of {group}")
    return rows, width * 2
