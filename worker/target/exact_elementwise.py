"""Elementwise functions of torch on a CPU, whose every number has the same bits wherever it lies in a tensor.

Torch computes most numbers of a loop as vectors and its rest one by one, with other bits in exponentials. Every thread
has a rest of its own where a tensor is shared out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from swiftbatch.worker.kernels.kernel_sizes import FEWEST_COLUMNS, TILE_ROWS

VECTORS = 64  # numbers that a loop takes at a time, at most: two vectors of bf16
ON_ONE_THREAD = 16384  # numbers that torch does not share out among threads, in any of these functions

CURVED: frozenset[Callable[..., Any]] = frozenset(  # functions of layers whose numbers were seen to differ
    [
        *(functional.silu, functional.gelu, functional.softplus, functional.mish, functional.elu, functional.selu),
        *(functional.sigmoid, torch.sigmoid, Tensor.sigmoid, torch.exp2),
    ]
)


def has_rests(decoder: torch.nn.Module, least_rows: int) -> bool:
    """Tell whether a loop over rows of some layer, a multiple of `least_rows`, has a rest on this many threads."""
    weights = ((name, each) for name, each in decoder.named_parameters() if each.ndim >= 2 and "embed" not in name)
    widths = {width for name, each in weights for width in each.shape[-2:] if width >= FEWEST_COLUMNS}
    is_shared_out = torch.get_num_threads() > 1 and TILE_ROWS * max(widths, default=0) > ON_ONE_THREAD
    return is_shared_out or any(least_rows * width % VECTORS for width in widths)


class WholeVectors(TorchFunctionMode):
    """Lets functions with exponentials, of whatever code runs under it, take whole vectors on one thread."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in CURVED or not args or kwargs.get("inplace"):
            return func(*args, **kwargs)
        return in_whole_vectors(func, *args, **kwargs)


def in_whole_vectors(function: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute an elementwise function of numbers, `[...]` in and out, in calls that have no rest and one thread."""
    flat = numbers.reshape(-1)
    padded = pad(flat, (0, -len(flat) % VECTORS))
    parts = [function(part, *args, **kwargs) for part in padded.split(ON_ONE_THREAD)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[: len(flat)].view(numbers.shape)
