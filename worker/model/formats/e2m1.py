"""Matrices of 4-bit floats (e2m1): NVFP4, and MXFP4 as compressed-tensors stores it. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftbatch.worker.model.formats.contract import FormatError, StoredTensor, fits, matrix_shape, only, part
from swiftbatch.worker.model.formats.e4m3 import E4M3
from swiftbatch.worker.model.formats.packed_forms import form_of
from swiftbatch.worker.model.gguf.tensor_types import PackedKind

if TYPE_CHECKING:
    import torch

    from swiftbatch.worker.kernels.packed import Weight

BYTES = "U8"
NVFP4_GROUP, MXFP4_GROUP = 16, 32


@dataclass(frozen=True)
class NVFP4Scheme:
    """Two codes in a byte, a scale of e4m3 for 16 of them, and one for all: `whole`, which divides in some programs."""

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
        from swiftbatch.worker.model.formats.values.minifloats import nvfp4_weight

        return nvfp4_weight(parts[self.codes], parts["scale"], parts[self.whole], self.is_divided, dtype)


@dataclass(frozen=True)
class MXFP4Scheme:
    """Two codes in a byte, and an exponent for 32 of them."""

    numbers: str = "MXFP4"

    def shape(self, heads: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        only(heads, "packed", "scale")
        rows, depth = _shape(part(heads, "packed", BYTES), MXFP4_GROUP)
        fits("scale", part(heads, "scale", BYTES).shape, (rows, depth // MXFP4_GROUP))
        return rows, depth

    def form(self, heads: Mapping[str, StoredTensor]) -> PackedKind | None:
        return form_of("e2m1", 4, self.shape(heads)[1], MXFP4_GROUP)

    def weight(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        from swiftbatch.worker.model.formats.values.minifloats import mxfp4_weight

        return mxfp4_weight(parts["packed"], parts["scale"], dtype)


def _shape(codes: StoredTensor, group: int) -> tuple[int, int]:
    rows, width = matrix_shape(codes)
    if width * 2 % group:
        raise FormatError(f"it has {width * 2} columns; expected a multiple of {group}")
    return rows, width * 2
