"""The positions that the rows of a layer see: all up to their own, a sliding window, or those of their own chunk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

NUM_SAMPLES = 16  # positions at which a span is held against the model's own mask

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`transformers`' own: (batch index, head index, query positions, key positions) to whether one sees the other."""


class UnsupportedError(ValueError):
    """An attention that can't be given; the text says what it is that a model does, from `its` on."""


@dataclass(frozen=True)
class Span:
    """A row at a position sees the positions from `first(position)` to its own."""

    kind: Literal["full", "window", "chunk"] = "full"
    size: int = 0  # positions in the window (the row's own included) or in a chunk

    def first(self, position: int) -> int:
        """The first position that a row sees."""
        if self.kind == "window":
            return max(0, position - self.size + 1)
        return position // self.size * self.size if self.kind == "chunk" else 0


FULL = Span()


def span_of(mask_function: MaskFunction, num_positions: int, device: torch.device) -> Span:
    """The span that a model's mask has at its first positions. Raises UnsupportedError for other masks."""
    cut = bisect_left(range(num_positions), True, key=lambda position: _first(mask_function, position, device) > 0)
    if cut == num_positions:
        span = FULL
    else:
        first = _first(mask_function, cut, device)
        span = Span("chunk", cut) if first == cut > 1 else Span("window", cut)
    step = max(1, num_positions // NUM_SAMPLES)
    for position in sorted({0, 1, cut - 1, cut, cut + 1, *range(0, num_positions, step), num_positions - 1}):
        if 0 <= position < num_positions and _first(mask_function, position, device) != span.first(position):
            raise UnsupportedError("its mask is neither causal, nor a sliding window, nor chunks")
    return span


def _first(mask_function: MaskFunction, position: int, device: torch.device) -> int:
    """The first position that a row sees. Raises UnsupportedError where it sees not all from there to its own."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(position + 2, device=device)
    sees = torch.as_tensor(mask_function(zero, zero, zero + position, keys)).expand(position + 2)
    first = position + 1 - int(sees.count_nonzero())
    if not 0 <= first <= position or not sees[first : position + 1].all():
        raise UnsupportedError("its mask shows a row others than the positions up to its own")
    return first
