"""Matrices of 8-bit floats (e4m3) with a scale for all, for each row, or for each block. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftbatch.worker.model.formats.contract import WHOLE, FormatError, StoredTensor, fits, only, part
from swiftbatch.worker.model.formats.packed_forms import form_of
from swiftbatch.worker.model.gguf.tensor_types import PackedKind

if TYPE_CHECKING:
    import torch

    from swiftbatch.worker.kernels.packed import Weight

E4M3 = "F8_E4M3"
SCALES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class FloatScheme:
    """`weight` of e4m3 and a part of scales that multiply; `block` has the rows and columns that share one.

    Without a block there is one scale, or one for each row. Experts that are stored in one tensor have a dimension in
    front.
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
        from swiftbatch.worker.model.formats.values.minifloats import grid_weight

        return grid_weight(parts[WHOLE], parts[self.scale], self.block, dtype)

    def _grids(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        *front, rows, columns = shape
        if self.block is not None:
            return [(*front, -(-rows // self.block[0]), -(-columns // self.block[1]))]
        if front:
            return [(*front,), (*front, 1, 1), (*front, rows, 1)]
        return [(), (1,), (1, 1), (rows,), (rows, 1)]
