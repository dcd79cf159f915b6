"""The numbers of GPTQ's and AWQ's matrices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swiftbatch.worker.kernels.packed import Weight
from swiftbatch.worker.model.formats.values.integers import Integers, from_words, group_index
from swiftbatch.worker.model.formats.values.packing import numbers

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where the columns of a word stand in AWQ's words


def gptq_weight(
    parts: Mapping[str, Tensor], bits: int, group: int | None, zero_is_less: int, dtype: torch.dtype
) -> Weight:
    """Raises FormatError for scales that are no numbers, and groups that are none."""
    scales = numbers(parts["scales"]).T.contiguous()
    num_columns, num_groups = scales.shape
    depth = parts["qweight"].shape[0] * 32 // bits
    codes = from_words(parts["qweight"].T, bits, depth)
    zeros = from_words(parts["qzeros"], bits, num_columns).T.to(torch.int16) + zero_is_less
    size = group or depth
    group_of = group_index(parts["g_idx"], num_groups, size) if "g_idx" in parts else None
    return Integers(codes, zeros, scales, bits, size, group_of).weight(dtype)


def awq_weight(parts: Mapping[str, Tensor], group: int | None, dtype: torch.dtype) -> Weight:
    """Raises FormatError for scales that are no numbers."""
    scales = numbers(parts["scales"]).T.contiguous()
    codes, zeros = (_in_order(parts[name], len(scales)) for name in ("qweight", "qzeros"))
    return Integers(codes, zeros.to(torch.int16), scales, 4, group or codes.shape[1]).weight(dtype)


def _in_order(words: Tensor, num_columns: int) -> Tensor:
    codes = from_words(words, 4, num_columns)
    ordered: Tensor = codes.unflatten(1, (-1, 8))[..., ORDER].flatten(1)
    return ordered.T.contiguous()
