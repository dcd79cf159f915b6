"""The numbers of integer codes of 2 to 8 bits: `(code - zero) * scale`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftbatch.worker.kernels.packed import Code, PackedMatrix, Weight
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.formats.packed_forms import group_that_divides
from swiftbatch.worker.model.formats.values.packing import (
    CHUNK,
    SPARE_BITS,
    by_group,
    paired,
    scaled,
)


@dataclass(frozen=True)
class Integers:
    """`codes [num_columns, depth] uint8` of so many bits, `zeros` and `scales [num_columns, num_groups]`.

    `group` is the size of groups along the depth. `group_of` tells the group of each place where they do not lie side
    by side.
    """

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    bits: int
    group: int
    group_of: Tensor | None = None

    def weight(self, dtype: torch.dtype) -> Weight:
        """The matrix that they stand for: packed in 4 bits where that is exact, else in 8, else as numbers."""
        if self.group_of is not None:
            return self._dense(self.group_of, dtype)
        if self.bits == 8 and bool((self.zeros == 128).all()):
            return scaled("int8", self.codes ^ 128, self.scales, self.group, dtype)
        depth = self.codes.shape[1]
        code: Code = "uint4" if self.bits <= 4 else "uint8"
        if (size := group_that_divides(depth, self.group)) and self._has_exact_products():
            scales = by_group(self.scales, depth, self.group, size)
            offsets = by_group(self.zeros.float() * -self.scales, depth, self.group, size)
            codes = paired(self.codes) if code == "uint4" else self.codes.contiguous()
            return PackedMatrix(code, codes, scales, dtype, offsets)
        spread = torch.arange(depth) // self.group
        if self.bits <= 4:
            differences = self.codes.to(torch.int8) - self.zeros.to(torch.int8)[:, spread]
            return scaled("int8", differences.view(torch.uint8), self.scales, self.group, dtype)
        return self._dense(spread, dtype)

    def _has_exact_products(self) -> bool:
        spare = SPARE_BITS[4 if self.bits <= 4 else 8]
        return not bool((self.scales.contiguous().view(torch.int32) & spare).any())

    def _dense(self, group_of: Tensor, dtype: torch.dtype) -> Tensor:
        whole = torch.empty(self.codes.shape, dtype=dtype)
        step = max(1, CHUNK // self.codes.shape[1])
        for start in range(0, len(self.codes), step):
            rows = slice(start, start + step)
            differences = self.codes[rows].float() - self.zeros[rows].float()[:, group_of]
            whole[rows] = (differences * self.scales[rows][:, group_of]).to(dtype)
        return whole


def group_index(stored: Tensor, num_groups: int, group: int) -> Tensor | None:
    """The group of each place, None where they lie side by side. Raises FormatError for a group that is none."""
    index = stored.long()
    if bool((index == torch.arange(len(index)) // group).all()):
        return None
    if bool(((index < 0) | (index >= num_groups)).any()):
        raise FormatError(f"its g_idx names groups beyond its {num_groups}")
    return index


def from_words(words: Tensor, bits: int, num_codes: int) -> Tensor:
    """Codes `[num_rows, num_codes] uint8` of rows of 32-bit words, the lowest bits first; codes may span two words."""
    rows, place = words.contiguous().view(torch.uint8), torch.arange(num_codes) * bits
    low, shift = place // 8, place % 8
    high = (low + 1).clamp(max=rows.shape[1] - 1)
    pairs = rows[:, low].int() | rows[:, high].int() << 8
    return ((pairs >> shift) & ((1 << bits) - 1)).to(torch.uint8)
