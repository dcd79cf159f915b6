"""Parts that recurrent layers of all forms share: how rows go through states and convolutions along their paths."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from swiftbatch.worker.caches.recurrent_layer import RecurrentLayer
from swiftbatch.worker.kernels.compute_threads import Team
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.kernels.recurrence import Steps, native_steps
from swiftbatch.worker.model.recurrent_sizes import RecurrentShape


@dataclass(frozen=True)
class Projected:
    """The numbers that a layer computes of each row by itself."""

    inputs: Tensor  # [num_rows, num_channels] of the convolution
    gates: Tensor  # [num_rows, ...] of the output
    factors: tuple[Tensor, ...] = ()  # each [num_rows, num_heads] or [num_rows, num_heads, num_decays] float32

    def part(self, rows: slice) -> Projected:
        """Return the numbers of some rows."""
        return Projected(self.inputs[rows], self.gates[rows], tuple(each[rows] for each in self.factors))


class Mixer(Protocol):
    """A recurrent layer of `transformers`, taken apart."""

    def shape(self, num_layers: int) -> RecurrentShape:
        """Sizes of a model with so many of these."""

    def project(self, hidden: Tensor) -> Projected:
        """The part in front of the state, `[num_rows, hidden]`."""

    def mix(self, walk: StateWalk, projected: Projected) -> Tensor:
        """Compute what rows of one sequence find along their paths, `[num_rows, ...]`."""

    def output(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """The part behind the state, `[num_rows, hidden]`."""


class StateWalk:
    """Goes through the rows of a sequence in order; the states of those that others may follow are at hand."""

    def __init__(
        self, layer: RecurrentLayer, paths: list[list[int]], root: int, first: int, team: Team | None = None
    ) -> None:
        """`root` is the step behind the committed ones, `first` that of the first row; `team` runs the kernels."""
        self._layer, self._paths, self._root, self._first, self._team = layer, paths, root, first, team

    def take(self, steps: Steps) -> Tensor:
        """Take the rows' steps, keep them, and read what queries find: `[num_rows, num_heads, value_dim]` float32."""
        states, parents = self._beginnings()
        run = self._in_torch if self._team is None else functools.partial(native_steps, self._team)
        updates, found = run(steps, states, parents)
        self._layer.write([path[-1] for path in self._paths], steps.keys, updates, steps.decays)
        return found

    def _beginnings(self) -> tuple[list[Tensor], list[int]]:
        """The states that rows go on from, and for each row one of them, `-1 - number`, or an earlier row."""
        states, parents = [self._layer.state], []
        for path in self._paths:
            open_steps = [step for step in path[:-1] if step >= self._root]
            if not open_steps:
                parents.append(-1)
            elif open_steps[-1] >= self._first:
                parents.append(open_steps[-1] - self._first)
            else:  # an earlier forward had the parent
                states.append(self._layer.folded(self._layer.state, open_steps))
                parents.append(-len(states))
        return states, parents

    def _in_torch(self, steps: Steps, states: list[Tensor], parents: list[int]) -> tuple[Tensor, Tensor]:
        own: list[Tensor] = []
        updates, found = [], []
        for row, parent in enumerate(parents):
            before = own[parent] if parent >= 0 else states[-1 - parent]
            state = before * steps.decays[row][:, :, None]
            keys, update = self._layer.heads_of(steps.keys[row])[:, :, None], steps.values[row]
            if steps.betas is not None:  # the delta rule: a share of what the state lacks of a value
                update = (update - (state * keys).sum(dim=1)) * steps.betas[row][:, None]
            own.append(state + keys * update[:, None])
            updates.append(update)
            found.append((own[row] * self._layer.heads_of(steps.queries[row])[:, :, None]).sum(dim=1))
        return torch.stack(updates), torch.stack(found)

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


def in_whole_tiles(function: Any, *rows: Tensor) -> tuple[Tensor, ...]:
    """Elementwise functions of `[num_rows, ...]` over `TILE_ROWS` rows: see `attention._on_whole_tiles`."""
    num_rows = len(rows[0])
    padded = [pad(each, (0, 0) * (each.ndim - 1) + (0, TILE_ROWS - num_rows)).contiguous() for each in rows]
    return tuple(each[:num_rows] for each in function(*padded))
