"""The numbers of compressed-tensors' integers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swiftbatch.worker.kernels.packed import Weight
from swiftbatch.worker.model.formats.contract import WHOLE, FormatError
from swiftbatch.worker.model.formats.values.integers import Integers, from_words, group_index
from swiftbatch.worker.model.formats.values.packing import numbers


def byte_weight(parts: Mapping[str, Tensor], group: int | None, dtype: torch.dtype) -> Weight:
    """Raises FormatError for scales that are no numbers."""
    codes = parts[WHOLE].view(torch.uint8) ^ 128
    rows, depth = codes.shape
    scales = _by_row(numbers(parts["scale"]), rows)
    zeros = torch.full_like(scales, 128, dtype=torch.int16)
    if "zero_point" in parts:
        zeros = _by_row(parts["zero_point"], rows).to(torch.int16) + 128
    return Integers(codes, zeros, scales, 8, group or depth).weight(dtype)


def packed_weight(parts: Mapping[str, Tensor], bits: int, group: int | None, dtype: torch.dtype) -> Weight:
    """Raises FormatError for scales that are no numbers, groups that are none, and a `shape` that is another."""
    rows, words = parts["packed"].shape
    said_rows, depth = parts["shape"].tolist()
    if said_rows != rows or not words - 1 < depth * bits / 32 <= words:
        raise FormatError(f"its part 'shape' says {[said_rows, depth]}, its part 'packed' is {[rows, words]} words")
    scales = _by_row(numbers(parts["scale"]), rows)
    if group is not None and scales.shape[1] != -(-depth // group):
        raise FormatError(f"its part 'shape' says {[said_rows, depth]}, its part 'scale' is {list(scales.shape)}")
    codes = from_words(parts["packed"], bits, depth)
    size = group or depth
    index = parts.get("g_idx")  # -1 in all places: not in use
    is_used = index is not None and bool((index != -1).any())
    group_of = group_index(index, scales.shape[1], size) if index is not None and is_used else None
    return Integers(codes, _zeros(parts, bits, scales), scales, bits, size, group_of).weight(dtype)


def _zeros(parts: Mapping[str, Tensor], bits: int, scales: Tensor) -> Tensor:
    """Zeros as the codes are: all numbers above 0."""
    middle = 1 << (bits - 1)
    stored = parts.get("zero_point")
    if stored is None:
        return torch.full_like(scales, middle, dtype=torch.int16)
    if stored.dtype == torch.int8:
        return _by_row(stored, len(scales)).to(torch.int16) + middle
    return from_words(stored.T, bits, len(scales)).T.to(torch.int16)


def _by_row(values: Tensor, rows: int) -> Tensor:
    """A column or more for each row, where there is one value for all as well."""
    if values.dim() == 2 and values.shape[0] == rows:
        return values
    return values.reshape(-1, 1).expand(rows, 1).contiguous()
