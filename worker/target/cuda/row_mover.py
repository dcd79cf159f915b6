"""Accepted rows on their way next to their root: told through pinned memory, moved in one launch, without a wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Many

import torch

from swiftbatch.worker.caches.arena import Place
from swiftbatch.worker.caches.full import MAX_TREE_NODES
from swiftbatch.worker.kernels.cuda.graph import Capture, capture
from swiftbatch.worker.kernels.cuda.moving.move_rows import PADDING, Move, move_rows, moves_of
from swiftbatch.worker.kernels.cuda.upload import Upload


class RowMover:
    """Moves rows of an arena's buffer. Captured at once: copies of other threads would disturb it later."""

    def __init__(self, buffer: torch.Tensor, capture: Capture = capture) -> None:
        """`buffer [num_layers, 2, num_slots, num_kv_heads, capacity, head_dim]`."""
        moves = self._moves = torch.tensor([PADDING] * MAX_TREE_NODES, dtype=torch.int32, device=buffer.device)
        self._upload = Upload(moves.view(-1))
        self._graph = capture(lambda: move_rows(buffer, moves), buffer.device)
        self._waiting: list[Move] | None = None  # moves that are made together; None: each one at once

    def __call__(self, slot: int, root: int, path: Many[int], place: Place | None = None) -> None:
        """Bring the nodes `path` of a tree whose root is entry `root` of a slot behind it, in all layers.

        With `place` entries lie in the one slot of a pool, where it says.
        """
        moves = moves_of(slot, root, path)
        if place is not None:
            moves = [(0, place(source), place(target)) for _, source, target in moves]
        if self._waiting is None:
            self._move(moves)
        else:
            self._waiting += moves

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within it moves wait; they are made at its end, all at once."""
        self._waiting = moves = list[Move]()
        try:
            yield
        finally:
            self._waiting = None
            self._move(moves)

    def _move(self, moves: list[Move]) -> None:
        """Launch moves, in order, as many at once as the table takes."""
        for start in range(0, len(moves), len(self._moves)):
            part = moves[start : start + len(self._moves)]
            table = self._upload.buffer().reshape(self._moves.shape)
            table[:] = PADDING
            table[: len(part)] = part
            self._upload.send()
            self._graph.replay()
