"""The cache of a model that has recurrent layers beside those that attend (Qwen3-Next, Qwen3.5).

A recurrent layer has one state per sequence in place of keys and values per position. Each position changes it by a
step. The cache keeps the state behind the committed positions, and the steps since a boundary some way back. A row of
a draft tree starts at the state and takes the steps of its own path. So its bits follow from its path alone, and
nothing has to be undone where a draft fails.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swiftbatch.worker.caches.full import CacheShape, FullKVCache, RecurrentShape
from swiftbatch.worker.caches.room import MAX_TREE_NODES
from swiftbatch.worker.kernels.sizes import BLOCK

NUM_STEPS = 2 * BLOCK + MAX_TREE_NODES + 1  # kept behind the boundary: of two blocks, of a root, of a tree


class RecurrentLayer:
    """One layer's state, and its steps by their positions behind the boundary.

    `state [num_heads, key_dim, value_dim] float32` is behind the committed positions, `base` at the boundary.
    A step turns a state into `decay * state + key (x) update`.
    """

    def __init__(self, shape: RecurrentShape, dtype: torch.dtype, device: torch.device) -> None:
        self._group = shape.num_heads // shape.num_key_heads
        self._num_before = shape.conv_width - 1  # inputs in front of the boundary
        state = (shape.num_heads, shape.key_dim, shape.value_dim)
        self.state, self.base = (torch.zeros(state, device=device) for _ in range(2))
        self.inputs = torch.zeros(self._num_before + NUM_STEPS, shape.num_channels, dtype=dtype, device=device)
        self.keys = torch.zeros(NUM_STEPS, shape.num_key_heads, shape.key_dim, device=device)
        self.updates = torch.zeros(NUM_STEPS, shape.num_heads, shape.value_dim, device=device)
        self.decays = torch.zeros(NUM_STEPS, shape.num_heads, device=device)

    def convolved(self, steps: Tensor) -> Tensor:
        """The inputs that the convolution of some steps reads: `steps [num_rows, conv_width]`, from -3 on."""
        return self.inputs[steps + self._num_before]

    def write_inputs(self, first: int, inputs: Tensor) -> None:
        """Keep the inputs of consecutive steps, `[num_rows, num_channels]`."""
        start = first + self._num_before
        self.inputs[start : start + len(inputs)] = inputs

    def write(self, step: int, key: Tensor, update: Tensor, decay: Tensor) -> None:
        """Keep a step: `[num_key_heads, key_dim]`, `[num_heads, value_dim]`, `[num_heads]`, all float32."""
        self.keys[step], self.updates[step], self.decays[step] = key, update, decay

    def heads_of(self, keys: Tensor) -> Tensor:
        """Keys of the value heads, `[num_heads, key_dim]`."""
        return keys.repeat_interleave(self._group, dim=0)

    def folded(self, state: Tensor, steps: list[int]) -> Tensor:
        """A state behind some more steps."""
        for step in steps:
            state = state * self.decays[step][:, None, None]
            state = state + self.heads_of(self.keys[step])[:, :, None] * self.updates[step][:, None]
        return state

    def keep_path(self, root: int, path: list[int]) -> None:
        """Move the steps of the nodes `path` next to their root's."""
        source, target = [root + 1 + node for node in path], list(range(root + 1, root + 1 + len(path)))
        for rows in (self.inputs[self._num_before :], self.keys, self.updates, self.decays):
            rows[target] = rows[source]

    def move_base(self, num_steps: int) -> None:
        """Set the boundary so many steps on."""
        self.base = self.folded(self.base, list(range(num_steps)))
        for rows in (self.inputs, self.keys, self.updates, self.decays):
            rows[: len(rows) - num_steps] = rows[num_steps:].clone()

    def clear(self) -> None:
        """Set the state in front of all positions."""
        for tensor in (self.state, self.base, self.inputs):
            tensor.zero_()


class RecurrentCache(FullKVCache):
    """Keys and values of the layers that attend, and the states of the others.

    The boundary stays at least one block behind the end, so that the last block can be rolled back.
    """

    is_by_position = False

    def __init__(
        self, shape: CacheShape, recurrent: RecurrentShape, max_length: int, buffer: Tensor | None = None
    ) -> None:
        super().__init__(shape, max_length, buffer)
        self.boundary = 0
        self.recurrent = [RecurrentLayer(recurrent, shape.dtype, shape.device) for _ in range(recurrent.num_layers)]

    def commit(self, path: list[int]) -> None:
        root = self.length - self.boundary
        super().commit(path)
        for layer in self.recurrent:
            layer.keep_path(root, path)
        self._take_steps(root)

    def advance(self, num_positions: int) -> None:
        start = self.length - self.boundary
        super().advance(num_positions)
        if start + num_positions <= NUM_STEPS:
            self._take_steps(start)
        else:  # positions that nobody has written: a length to measure forwards at
            self.boundary = self.length // BLOCK * BLOCK

    def roll_back(self, length: int) -> None:
        """Forget all positions from `length` on; all positions where it lies in front of the boundary."""
        if length == self.length:
            return
        super().roll_back(length)
        if length < self.boundary or not length:
            self.length = self.boundary = 0
        for layer in self.recurrent:
            if not self.length:
                layer.clear()
            layer.state = layer.folded(layer.base, list(range(self.length - self.boundary)))

    def clear(self) -> None:
        super().clear()
        for layer in self.recurrent:
            layer.clear()

    def prefix(self, length: int) -> FullKVCache:
        raise NotImplementedError("a state has no view at an earlier length")

    def _take_steps(self, start: int) -> None:
        """Bring the states to the end of what is committed, and the boundary near it."""
        steps = list(range(start, self.length - self.boundary))
        for layer in self.recurrent:
            layer.state = layer.folded(layer.state, steps)
        if self.length - self.boundary >= 2 * BLOCK:
            for layer in self.recurrent:
                layer.move_base(BLOCK)
            self.boundary += BLOCK


def new_cache_of(shape: CacheShape, max_length: int, buffer: Tensor | None = None) -> FullKVCache:
    """An empty cache on the device for a model of this shape; with a `buffer` for its keys and values."""
    if shape.recurrent is None:
        return FullKVCache(shape, max_length, buffer)
    return RecurrentCache(shape, shape.recurrent, max_length, buffer)
