"""Packed matrices from codes and scales, or the numbers that they stand for where they do not pack exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftbatch.worker.kernels.packed_weights import CODE_BITS, TABLES, Code, PackedMatrix, Weight
from swiftbatch.worker.model.formats.contract import FormatError, group_that_divides

CHUNK = 1 << 24  # numbers that are held in float32 at a time
SPARE_BITS = {4: 0xF, 8: 0xFF}  # of a scale, that must be 0 for a product with a code to be exact


def scaled(code: Code, codes: Tensor, scales: Tensor, group: int, dtype: torch.dtype) -> Weight:
    """The matrix `table[code] * scale`: codes as a packed matrix has them, `scales [num_columns, num_groups]`.

    A group's size need not divide the depth: the last group is then shorter.
    """
    depth = codes.shape[1] * 8 // CODE_BITS[code]
    if size := group_that_divides(depth, group):
        return PackedMatrix(code, codes.contiguous(), by_group(scales, depth, group, size), dtype)
    return dense(code, codes, scales[:, torch.arange(depth) // group], dtype)


def by_group(values: Tensor, depth: int, group: int, size: int) -> Tensor:
    """Values of groups, each as often as a group holds ones of this size."""
    return values[:, torch.arange(0, depth, size) // group].contiguous()


def dense(code: Code, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of codes with a scale each, a stretch of rows at a time."""
    whole = torch.empty(scales.shape, dtype=dtype)
    step = max(1, CHUNK // scales.shape[1])
    for start in range(0, len(scales), step):
        rows = slice(start, start + step)
        found = codes[rows] if CODE_BITS[code] == 8 else halves(codes[rows])
        whole[rows] = (TABLES[code][found.int()] * scales[rows]).to(dtype)
    return whole


def halves(codes: Tensor) -> Tensor:
    """The two codes of 4 bits in each byte, the first of them in the low half."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def paired(codes: Tensor) -> Tensor:
    """Two codes of 4 bits in each byte."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def numbers(scales: Tensor) -> Tensor:
    """Scales in float32. Raises FormatError for one that is infinite or no number."""
    found = scales.float()
    if not bool(found.isfinite().all()):
        raise FormatError("its scales are not finite: the file is damaged")
    return found
