"""What recurrent layers of all forms share: how rows go through states and convolutions along their paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from swiftbatch.worker.caches.recurrent_layer import RecurrentLayer
from swiftbatch.worker.kernels.sizes import TILE_ROWS
from swiftbatch.worker.model.recurrent_sizes import RecurrentShape


@dataclass(frozen=True)
class Projected:
    """What a layer computes of each row by itself."""

    inputs: Tensor  # [num_rows, num_channels] of the convolution
    gates: Tensor  # [num_rows, ...] of the output
    factors: tuple[Tensor, ...] = ()  # each [num_rows, num_heads] float32

    def part(self, rows: slice) -> Projected:
        """Those of some rows."""
        return Projected(self.inputs[rows], self.gates[rows], tuple(each[rows] for each in self.factors))


class Mixer(Protocol):
    """A recurrent layer of `transformers`, taken apart."""

    def shape(self, num_layers: int) -> RecurrentShape:
        """Sizes of a model with so many of these."""

    def project(self, hidden: Tensor) -> Projected:
        """The part in front of the state, `[num_rows, hidden]`."""

    def mix(self, walk: StateWalk, projected: Projected) -> Tensor:
        """What rows of one sequence find along their paths, `[num_rows, ...]`."""

    def output(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """The part behind the state, `[num_rows, hidden]`."""


class StateWalk:
    """Goes through the rows of a sequence in order; the states of those that others may follow are at hand."""

    def __init__(self, layer: RecurrentLayer, paths: list[list[int]], root: int, first: int) -> None:
        """`root` is the step behind the committed ones, `first` that of the first row."""
        self._layer, self._paths, self._root, self._first = layer, paths, root, first
        self._states: list[Tensor] = []

    def step(self, query: Tensor, key: Tensor, decay: Tensor, update_of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Take the next row's step, keep it, and read what its query finds: `[num_heads, value_dim]` float32.

        `update_of` gives the update from the decayed state and the keys of its heads, `[num_heads, key_dim, 1]`.
        """
        path = self._paths[len(self._states)]
        keys = self._layer.heads_of(key)[:, :, None]
        state = self._before(path) * decay[:, None, None]
        update = update_of(state, keys)
        state = state + keys * update[:, None]
        self._layer.write(path[-1], key, update, decay)
        self._states.append(state)
        found: Tensor = (state * self._layer.heads_of(query)[:, :, None]).sum(dim=1)
        return found

    def convolved(
        self, convolution: Any, dtype: torch.dtype, activation: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """A convolution over the last inputs of each path: `[num_rows, num_channels]`."""
        weight = convolution.weight[:, 0].float()
        width = weight.shape[1]
        before = list(range(-(width - 1), 0))
        steps = torch.tensor([(before + path)[-width:] for path in self._paths], device=weight.device)

        def convolve(window: Tensor) -> tuple[Tensor]:
            total = window[:, 0] * weight[:, 0]
            for place in range(1, width):
                total = total + window[:, place] * weight[:, place]
            if convolution.bias is not None:
                total = total + convolution.bias.float()
            rounded = total.to(dtype)
            return (rounded if activation is None else activation(rounded),)

        return in_whole_tiles(convolve, self._layer.convolved(steps).float())[0]

    def _before(self, path: list[int]) -> Tensor:
        """The state that a row starts from: its parent's."""
        open_steps = [step for step in path[:-1] if step >= self._root]
        if not open_steps:
            return self._layer.state
        if open_steps[-1] >= self._first:
            return self._states[open_steps[-1] - self._first]
        return self._layer.folded(self._layer.state, open_steps)  # an earlier forward had the parent


def in_whole_tiles(function: Any, *rows: Tensor) -> tuple[Tensor, ...]:
    """Elementwise functions of `[num_rows, ...]` over `TILE_ROWS` rows: see `attention._on_whole_tiles`."""
    num_rows = len(rows[0])
    padded = [pad(each, (0, 0) * (each.ndim - 1) + (0, TILE_ROWS - num_rows)).contiguous() for each in rows]
    return tuple(each[:num_rows] for each in function(*padded))
