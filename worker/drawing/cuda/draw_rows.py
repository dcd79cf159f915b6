"""The rows of a draw on a GPU: whose they are, where they stand, and their paths through a draft tree.

Then the tokens that come into a penalty window and those that leave it, in the form that the kernels take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.drawing.adjustments import masked_behind
from swiftbatch.worker.drawing.cuda.buffers import SlotBuffers
from swiftbatch.worker.drawing.cuda.row_words import (
    NUM_DRAFTED,
    NUM_MASKED,
    NUM_WORDS,
    PADDING,
    ROW,
    fill_row,
    parameter_words,
)
from swiftbatch.worker.drawing.draft_tree import ROOT, DraftTree
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS


@dataclass(frozen=True)
class DrawRow:
    """One row of logits: the token behind a path that begins at a sequence's committed tokens."""

    sequence: Sequence  # the committed tokens, without the path
    slot: int  # of the counts of its penalty window
    path: list[int]  # tokens behind the committed ones, the row's own last
    allowed: np.ndarray | None = None  # [num_mask_words] uint32, the tokens that may come; None: any may

    @property
    def position(self) -> int:
        """The position of the token to be drawn."""
        return len(self.sequence) + len(self.path)

    @property
    def masked(self) -> tuple[int, ...]:
        """Tokens that can't come there."""
        return masked_behind(self.sequence, self.path)


def rows_of(
    committed: Sequence, slot: int, drafted: list[int], tree: DraftTree, masks: np.ndarray | None
) -> Iterator[DrawRow]:
    """The rows of a tree behind `drafted` tokens, root first; their `masks [1 + num_nodes, num_mask_words] uint32`."""
    allowed = [None] * (1 + len(tree)) if masks is None else list(masks)
    paths = {ROOT: drafted}
    yield DrawRow(committed, slot, drafted, allowed[0])
    for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        paths[node] = [*paths[parent], token_id]
        yield DrawRow(committed, slot, paths[node], allowed[node + 1])


def mask_rows(slots: SlotBuffers, rows: Many[DrawRow | None]) -> None:
    """Copy each row's masks to the device, where a row has any; queued behind the copies before."""
    restricted = [(index, row.allowed) for index, row in enumerate(rows) if row is not None and row.allowed is not None]
    if restricted:
        words = np.zeros((len(rows), slots.allowed.shape[1]), dtype=np.uint32)
        for index, mask in restricted:
            words[index] = mask
        slots.allowed[: len(rows)] = torch.from_numpy(words.view(np.int32)).to(slots.allowed.device)
    masked = [(index, row.masked) for index, row in enumerate(rows) if row is not None and row.masked]
    if not masked:
        return
    lists = np.full((len(rows), NUM_MASKED), PADDING, dtype=np.int32)
    for index, token_ids in masked:
        lists[index, : len(token_ids)] = token_ids
    slots.masked[: len(rows)] = torch.from_numpy(lists).to(slots.masked.device)


@dataclass(frozen=True)
class DrawLayout:
    """The layout of a draw's inputs in one buffer of int32."""

    num_slots: int
    num_rows: int = NUM_ROWS

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes())

    def parts(self, buffer: Any) -> list[Any]:
        """Rows, ancestors, leaving, arriving and gone tokens: views of a tensor or an array `[size] int32`."""
        parts, start = [], 0
        for shape in self._shapes():
            end = start + math.prod(shape)
            parts.append(buffer[start:end].reshape(shape))
            start = end
        return parts

    def fill(self, buffer: NDArray[np.int32], rows: Many[DrawRow | None], news: dict[int, tuple[Any, Any]]) -> None:
        """Fill a buffer with at most `num_rows` rows; None is a row that nothing is asked of.

        `news` has for slots the tokens that came into and left their windows since.
        """
        words, ancestors, leaving, arriving, gone = self.parts(buffer)
        table = words.reshape(-1).view(ROW)
        table[:] = np.zeros((), dtype=ROW)
        table["slot"] = PADDING
        arriving[:] = gone[:] = PADDING
        windows = fill_rows(table, ancestors, rows)
        for slot, sequence in windows.items():
            leaving[slot] = leaving_tokens(sequence.token_ids, sequence.sampling.penalty_window)
        for slot, (came, went) in news.items():
            arriving[slot, : len(came)], gone[slot, : len(went)] = came, went

    def _shapes(self) -> tuple[tuple[int, int], ...]:
        by_slot = (self.num_slots, NUM_DRAFTED)
        return (self.num_rows, NUM_WORDS), (self.num_rows, NUM_DRAFTED), by_slot, by_slot, by_slot


def fill_rows(table: NDArray[Any], ancestors: NDArray[np.int32], rows: Many[DrawRow | None]) -> dict[int, Sequence]:
    """Fill rows of `table [num_rows] ROW` and their paths `[num_rows, NUM_DRAFTED]`; return the sequences by slots."""
    windows = dict[int, Sequence]()
    known: Sequence | None = None
    words: tuple[float, ...] = ()  # a tree's rows have the same sequence: its parameters are looked at once
    for index, row in enumerate(rows):
        if row is None:
            continue
        sequence, path = row.sequence, row.path
        if sequence is not known:
            known, words = sequence, parameter_words(sequence.sampling)
            windows[row.slot] = sequence
        place = (row.slot, row.position, len(path))
        fill_row(table, index, sequence, *place, len(row.masked), row.allowed is not None, words)
        if path:
            ancestors[index, : len(path)] = path
    return windows


def leaving_tokens(token_ids: NDArray[np.int64], window: int) -> NDArray[np.int32]:
    """The committed tokens that leave the window with each further token, `[NUM_DRAFTED]`; -1 where none does."""
    leaving = np.full(NUM_DRAFTED, PADDING, dtype=np.int32)
    first = len(token_ids) - window  # leaves with the next token
    tokens = token_ids[max(first, 0) : max(first + NUM_DRAFTED, 0)]
    start = max(-first, 0)
    leaving[start : start + len(tokens)] = tokens[: NUM_DRAFTED - start]
    return leaving


def committed_tokens(
    token_ids: NDArray[np.int64], num_new: int, window: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The last `num_new` tokens, and those that have left the window as they came; no more of these than of those."""
    length = len(token_ids)
    return token_ids[length - num_new :], token_ids[max(length - num_new - window, 0) : max(length - window, 0)]
