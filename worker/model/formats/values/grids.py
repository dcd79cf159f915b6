"""The numbers of 8-bit floats (e4m3) whose scales lie in a grid over the matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftbatch.worker.kernels.packed import Weight, plain
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.formats.values.packing import numbers, scaled

NAN = 0x7F  # both of e4m3's codes that are no numbers, but for their sign


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
