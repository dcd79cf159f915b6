"""One sequence as an MTP layer knows it: the rows that it has run, and hidden states whose rows are to come.

Entries of its cache are those of the first tokens, and behind them of the newest ones. Where they are full, entries are
moved, and keep the angles of their positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.papers.griffin.draft_input import RING, Candidates, DraftRows, Room, regressed_place
from swiftbatch.worker.target.tiles import known_rows

NUM_SINKS = BLOCK  # first rows that stay
WINDOW = 16 * BLOCK  # newest rows that are always seen; before entries are moved, up to twice as many
NUM_ENTRIES = NUM_SINKS + 2 * WINDOW
NUM_PLACES = RING + NUM_SINKS + WINDOW  # of features: hidden states that wait, and what is behind the rows of a draft
MOST_AT_ONCE = 4 * BLOCK  # rows of a sequence in one call
NUM_SPLITS = 8  # that a GPU attends to these entries in: more would take more memory than they save time


@dataclass
class Track:
    """The room of a sequence, and how far the layer has come in it."""

    room: Room
    position: int = 0  # of the first hidden state whose row is to come
    num_known: int = 0  # entries of the text; drafts stand behind them
    root: Candidates | None = None  # what may follow the newest token; None where that is not known

    @property
    def num_waiting(self) -> int:
        """Hidden states whose rows are to come."""
        return self.room.features.end - self.position

    def take(self, position: int, hidden: torch.Tensor) -> None:
        """Let hidden states `[num_rows, hidden]` from a position on wait; behind a gap those in front are left out.

        So are the oldest, where more wait than there are places for.
        """
        self.root = None
        features = self.room.features
        if position != features.end:
            self.position = position
        features.put(position, hidden)
        self.position = max(self.position, features.first)

    def next_rows(self, most: int) -> list[DraftRows]:
        """Take the next waiting rows, whose entries then count as known. The newest token's row gives candidates."""
        room, first = self.room, self.position
        room.cache.roll_back(self.num_known)
        self._make_room()
        end = first + min(self.num_waiting, most)
        room.cache.first_angle = first - self.num_known
        groups = known_rows(room.cache, room.sequence.token_ids[first + 1 : end + 1].tolist())
        self.num_known += end - first
        self.position = end
        parts = []
        for rows in groups:
            places = room.features.places(first, first + len(rows))
            first += len(rows)
            parts.append(DraftRows(room, rows, places, [[]] if first == len(room.sequence) - 1 else []))
        return parts

    def draft_anew(self) -> Candidates:
        """Begin a draft behind the newest token; returns what may follow that, nothing where it is not known."""
        if self.root is None:
            return []
        self.room.cache.roll_back(self.num_known)
        return self.root

    def draft_row(self, path: list[int]) -> DraftRows:
        """The row of a draft's last token behind those in front of it."""
        [rows] = known_rows(self.room.cache, path[-1:])
        return DraftRows(self.room, rows, [regressed_place(len(path) - 1)], [path], len(path))

    def _make_room(self) -> None:
        """Keep the first rows and the newest ones where the cache may get too small for more."""
        if self.num_known + MOST_AT_ONCE <= NUM_ENTRIES:
            return
        cache = self.room.cache
        for rows in cache.layer(0)[: cache.shape.num_parts]:
            rows[:, NUM_SINKS : NUM_SINKS + WINDOW] = rows[:, self.num_known - WINDOW : self.num_known].clone()
        self.num_known = NUM_SINKS + WINDOW
        cache.roll_back(self.num_known)
