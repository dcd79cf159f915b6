"""Packed weights in the order in which a GPU's threads multiply them.

Four threads share a column's block of 128 numbers. A thread's codes are adjacent 16-bit words, with 4 codes of 4 bits
or 2 of 8 bits. Word (thread t, v, e) has at place p the code of number `v * 8 * places + p * 8 + t * 2 + e`. This is
the operand of a tensor core's instruction, so decoded numbers stay in their thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from swiftbatch.worker.kernels.kernel_sizes import BLOCK_DEPTH, fills_blocks
from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, Code, PackedMatrix

COLUMNS_AT_ONCE = 4096  # are repacked together, because their codes take several times the memory
# Kernels move a code's bits to their places in bfloat16. The scales have the factor that corrects the exponent.
FACTORS: dict[Code, float] = {"e2m1": 2.0**126, "e4m3": 2.0**120}


@dataclass(frozen=True)
class RepackedMatrix(PackedMatrix):
    """Packed matrix for GPU kernels, with the depth padded to whole blocks.

    `codes [num_columns, padded_depth / codes per word] int16`; `scales [padded groups, num_columns]` have the factor of
    `FACTORS`, in bfloat16 if `is_narrow` and a block has several groups, else in float32; `offsets` like them.
    """

    depth: int = 0  # without padding
    zero: int = 0  # subtracted from the codes of `uint4`
    is_narrow: bool = False  # each scale is a bfloat16 number, and there are no offsets

    def __post_init__(self) -> None:
        """Accept all parts, because `repacked` made them."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.depth

    @property
    def padded_depth(self) -> int:
        return self.codes.shape[1] * 16 // CODE_BITS[self.code]

    @property
    def group_size(self) -> int:
        num_groups = len(self.scales)
        return self.depth if num_groups == 1 else self.padded_depth // num_groups

    @property
    def form(self) -> tuple[Code, int, bool, torch.dtype]:
        return self.code, self.group_size, self.offsets is not None or self.zero > 0, self.dtype

    def original(self) -> PackedMatrix:
        """Return the matrix as it was before `repacked`."""
        num_groups, num_bits = self.depth // self.group_size, CODE_BITS[self.code]
        scales = self.scales[:num_groups].t().float().div(FACTORS.get(self.code, 1)).contiguous()
        offsets = None if self.offsets is None else self.offsets[:num_groups].t().contiguous()
        offsets = -self.zero * scales if self.zero else offsets
        codes = codes_of_words(self.codes, num_bits)[:, : self.depth * num_bits // 8]
        return PackedMatrix(self.code, codes, scales, self.dtype, offsets)

    def rows(self, chosen: Tensor | slice) -> PackedMatrix:
        offsets = None if self.offsets is None else self.offsets[:, chosen]
        return replace(self, codes=self.codes[chosen], scales=self.scales[:, chosen], offsets=offsets).original()

    def dequantized(self) -> Tensor:
        return self.original().dequantized()


def words_of_codes(codes: Tensor, num_bits: int) -> Tensor:
    """Return the words `int16` of codes as `PackedMatrix` has them, with the depth padded to whole blocks."""
    places, per_byte = 16 // num_bits, 8 // num_bits
    codes = nn.functional.pad(codes, (0, -codes.shape[1] % (BLOCK_DEPTH // per_byte)))
    if per_byte == 2:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    codes = codes.unflatten(1, (-1, BLOCK_DEPTH // 8 // places, places, 4, 2)).permute(0, 1, 4, 2, 5, 3)
    if per_byte == 2:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes.contiguous().view(torch.int16).flatten(1)


def codes_of_words(words: Tensor, num_bits: int) -> Tensor:
    """Invert `words_of_codes`, except for the padding."""
    places, per_byte = 16 // num_bits, 8 // num_bits
    codes = words.contiguous().view(torch.uint8)
    if per_byte == 2:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    by_thread = codes.unflatten(1, (-1, 4, BLOCK_DEPTH // 8 // places, 2, places))
    codes = by_thread.permute(0, 1, 3, 5, 2, 4).flatten(1)
    joined: Tensor = codes if per_byte == 1 else codes[:, ::2] | codes[:, 1::2] << 4
    return joined


def repacked(matrix: PackedMatrix) -> RepackedMatrix:
    """Return a matrix that `is_multiplied_packed` accepts for the kernels. Bytes minus 128 become `int8`."""
    code, codes, scales, offsets = matrix.code, matrix.codes, matrix.scales, matrix.offsets
    zero, depth = 0, matrix.shape[1]
    if offsets is not None and code == "uint4" and torch.equal(offsets, -8 * scales):
        zero, offsets = 8, None
    elif offsets is not None and code == "uint8" and torch.equal(offsets, -128 * scales):
        code, codes, offsets = "int8", codes ^ 128, None
    words = torch.cat([words_of_codes(part, CODE_BITS[code]) for part in codes.split(COLUMNS_AT_ONCE)])
    scales = _by_groups(scales * FACTORS.get(code, 1), depth)
    is_narrow = matrix.dtype == torch.bfloat16 and offsets is None and torch.equal(scales.bfloat16().float(), scales)
    if is_narrow and matrix.group_size < BLOCK_DEPTH:  # otherwise a thread would copy only two bytes
        scales = scales.bfloat16()
    offsets = None if offsets is None else _by_groups(offsets, depth)
    return RepackedMatrix(code, words, scales, matrix.dtype, offsets, depth, zero, is_narrow)


def _by_groups(numbers: Tensor, depth: int) -> Tensor:
    """Transpose `[columns, groups]`, and pad groups with zeros to whole blocks."""
    num_groups = numbers.shape[1]
    per_block = 1 if num_groups == 1 else max(1, BLOCK_DEPTH * num_groups // depth)
    return nn.functional.pad(numbers.t(), (0, 0, 0, -num_groups % per_block)).contiguous()


def is_multiplied_packed(matrix: PackedMatrix) -> bool:
    """Return whether `triton_linear` supports a matrix: groups fit blocks, no code is NaN, and no scale overflows.

    Float32 is not supported: tensor cores round it.
    """
    fits = matrix.dtype == torch.bfloat16 and fills_blocks(matrix.group_size, matrix.shape[1])
    is_known = matrix.code != "e4m3" or not ((matrix.codes & 127) == 127).any()
    return fits and bool(is_known) and bool((matrix.scales * FACTORS.get(matrix.code, 1)).isfinite().all())
