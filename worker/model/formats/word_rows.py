"""GPTQ's and AWQ's matrices: integers of 2 to 8 bits in 32-bit words, rows for columns. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftbatch.worker.model.formats.contract import (
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

SUFFIXES = {".qweight": "qweight", ".qzeros": "qzeros", ".scales": "scales", ".g_idx": "g_idx"}
SCALES = ("F16", "BF16", "F32")
WORD = 32  # bits


@dataclass(frozen=True)
class GPTQScheme:
    """`qweight [depth * bits / 32, num_columns]`, zeros packed along the columns and stored less `zero_is_less`."""

    bits: int
    group: int | None  # None: all of the depth
    zero_is_less: int
    is_shuffled: bool  # columns may stand in the order of their activations

    @property
    def numbers(self) -> str:
        return f"int{self.bits}"

    def shape(self, heads: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        only(heads, "qweight", "qzeros", "scales", "g_idx")
        words, num_columns = matrix_shape(part(heads, "qweight", "I32"))
        depth = _whole(words * WORD, self.bits)
        num_groups = -(-depth // (self.group or depth))
        fits("scales", part(heads, "scales", *SCALES).shape, (num_groups, num_columns))
        fits("qzeros", part(heads, "qzeros", "I32").shape, (num_groups, -(-num_columns * self.bits // WORD)))
        if "g_idx" in heads:
            fits("g_idx", part(heads, "g_idx", "I32").shape, (depth,))
        return num_columns, depth

    def form(self, heads: Mapping[str, StoredTensor]) -> PackedKind | None:
        if "g_idx" in heads and self.is_shuffled:
            return None
        scales = heads["scales"].dtype
        return form_of_integers(self.bits, self.shape(heads)[1], self.group, scales, is_centred=False)

    def weight(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        from swiftbatch.worker.model.formats.values.integers import gptq_weight

        return gptq_weight(parts, self.bits, self.group, self.zero_is_less, dtype)


@dataclass(frozen=True)
class AWQScheme:
    """`qweight [depth, num_columns / 8]`: 4 bits, the columns of a word in an order of their own."""

    group: int | None
    numbers: str = "int4"

    def shape(self, heads: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        only(heads, "qweight", "qzeros", "scales")
        depth, words = matrix_shape(part(heads, "qweight", "I32"))
        num_groups = -(-depth // (self.group or depth))
        fits("scales", part(heads, "scales", *SCALES).shape, (num_groups, words * 8))
        fits("qzeros", part(heads, "qzeros", "I32").shape, (num_groups, words))
        return words * 8, depth

    def form(self, heads: Mapping[str, StoredTensor]) -> PackedKind | None:
        return form_of_integers(4, self.shape(heads)[1], self.group, heads["scales"].dtype, is_centred=False)

    def weight(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weight:
        from swiftbatch.worker.model.formats.values.integers import awq_weight

        return awq_weight(parts, self.group, dtype)


def _whole(num_bits: int, bits: int) -> int:
    if num_bits % bits:
        raise FormatError(f"its part 'qweight' holds no whole number of codes of {bits} bits")
    return num_bits // bits
