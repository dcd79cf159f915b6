"""The numbers of 8-bit and 4-bit floats.

Scales of 8-bit floats (e4m3) lie in a grid over the matrix. 4-bit floats (e2m1) lie two in a byte, with a scale for
each group: NVFP4 and MXFP4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swiftbatch.worker.kernels.packed_weights import PackedExperts, Weight, plain
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.formats.values.packing import numbers, scaled

NAN = 0x7F  # both of e4m3's codes that are no numbers, but for their sign

BIAS = 127  # of exponents of 8 bits (e8m0)


def grid_weight(stored: Tensor, scales: Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> Weight:
    """A matrix, or the experts of one tensor. Raises FormatError for codes or scales that are no numbers."""
    codes, scales = stored.view(torch.uint8), numbers(scales)
    if bool(((codes & NAN) == NAN).any()):
        raise FormatError("its codes are not all numbers: the file is damaged")
    if codes.dim() == 2:
        return _matrix(codes, scales, block, dtype)
    whole = torch.empty(stored.shape, dtype=dtype)
    for expert, each in enumerate(codes):
        whole[expert] = plain(_matrix(each, scales[expert], block, dtype))
    return whole


def _matrix(codes: Tensor, scales: Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> Weight:
    rows, depth = codes.shape
    if block is None:
        return scaled("e4m3", codes, scales.reshape(-1, 1).expand(rows, 1).contiguous(), depth, dtype)
    return scaled("e4m3", codes, scales[torch.arange(rows) // block[0]], block[1], dtype)


def nvfp4_weight(codes: Tensor, scales: Tensor, whole: Tensor, is_divided: bool, dtype: torch.dtype) -> Weight:
    """A scale of e4m3 for each group, and one for all that multiplies those, or that they are divided by.

    Raises FormatError for scales that are no numbers.
    """
    groups, one = numbers(scales), numbers(whole).reshape(())
    together = numbers(groups / one if is_divided else groups * one)
    return scaled("e2m1", codes, together, codes.shape[1] * 2 // scales.shape[1], dtype)


def mxfp4_weight(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Weight:
    """An exponent for each group. Raises FormatError for one that stands for no number."""
    return scaled("e2m1", codes, powers(exponents), codes.shape[1] * 2 // exponents.shape[1], dtype)


def expert_weight(blocks: Tensor, exponents: Tensor, dtype: torch.dtype) -> Weight:
    """`blocks [num_experts, rows, num_groups, 16]`: all experts' numbers, their rows as columns.

    Raises FormatError as `mxfp4_weight` does.
    """
    codes, scales = blocks.flatten(2).flatten(0, 1), powers(exponents).flatten(0, 1)
    return PackedExperts("e2m1", codes, scales, dtype, num_experts=len(blocks), is_turned=True)


def powers(exponents: Tensor) -> Tensor:
    """Raises FormatError for the exponent that stands for no number."""
    if bool((exponents == 255).any()):
        raise FormatError("its scales are not all numbers: the file is damaged")
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - BIAS)
