"""Accepted rows on their way next to their root: told through pinned memory, moved in one launch, without a wait."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from swiftbatch.worker.caches.arena import Place
from swiftbatch.worker.caches.full import MAX_TREE_NODES
from swiftbatch.worker.kernels.cuda.moving.move_rows import PADDING, move_rows, moves_of
from swiftbatch.worker.kernels.cuda.upload import Upload


class RowMover:
    """Moves rows of an arena's buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        """`buffer [num_layers, 2, num_slots, num_kv_heads, capacity, head_dim]`."""
        self._buffer = buffer
        self._moves = torch.tensor([PADDING] * MAX_TREE_NODES, dtype=torch.int32, device=buffer.device)
        self._upload = Upload(self._moves.view(-1))

    def __call__(self, slot: int, root: int, path: Many[int], place: Place | None = None) -> None:
        """Bring the nodes `path` of a tree whose root is entry `root` of a slot behind it, in all layers.

        With `place` entries lie in the one slot of a pool, where it says.
        """
        moves = moves_of(slot, root, path)
        if not moves:
            return
        table = self._upload.buffer().reshape(self._moves.shape)
        table[:] = PADDING
        table[: len(moves)] = moves
        if place is not None:
            table[: len(moves), 0], table[: len(moves), 1:] = 0, place(table[: len(moves), 1:])
        self._upload.send()
        move_rows(self._buffer, self._moves)
