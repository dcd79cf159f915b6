"""The numbers of 4-bit floats (e2m1), two in a byte, with a scale for each group: NVFP4 and MXFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftbatch.worker.kernels.packed import PackedExperts, Weight
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.formats.values.packing import numbers, scaled

BIAS = 127  # of exponents of 8 bits (e8m0)


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
