"""The features in front of the draft model's rows, in one buffer for each sequence: rows name them by their places."""

from __future__ import annotations

import torch

from swiftbatch.worker.caches.full import MAX_TREE_NODES
from swiftbatch.worker.papers.griffin.window import NUM_ENTRIES

NOTHING = 0  # zeros: in front of the text's first token stands no feature
RING = 1  # the target's features at the newest positions, one behind the other and round
REGRESSED = RING + NUM_ENTRIES  # regressed features in their place: a draft tree's root, then its nodes
NUM_PLACES = REGRESSED + 1 + MAX_TREE_NODES


class Features:
    """The target's final hidden states at consecutive positions of one sequence, and those regressed for its tree."""

    def __init__(self, buffer: torch.Tensor) -> None:
        """`buffer [NUM_PLACES, hidden]`; of what lies in it, nothing is read before it was written."""
        self._buffer = buffer
        self._buffer[NOTHING] = 0
        self._first = self._end = 0  # positions that are known

    def put(self, position: int, hidden: torch.Tensor) -> None:
        """Keep `hidden [num_rows, hidden]` of `position` and those behind it; what is not next to it is forgotten."""
        if position != self._end:
            self._first = position
        self._end = position + len(hidden)
        self._first = max(self._first, self._end - NUM_ENTRIES)
        kept = hidden[-NUM_ENTRIES:]
        start = (self._end - len(kept)) % NUM_ENTRIES
        num_left = min(len(kept), NUM_ENTRIES - start)  # up to the ring's end
        self._buffer[RING + start : RING + start + num_left] = kept[:num_left]
        if num_left < len(kept):
            self._buffer[RING : RING + len(kept) - num_left] = kept[num_left:]

    def holds(self, start: int, end: int) -> bool:
        """Tell whether all of the target's features at positions `[start, end)` are there."""
        return self._first <= start and end <= self._end

    def places(self, start: int, end: int) -> list[int]:
        """Return the places of the target's features at positions `[start, end)`."""
        return [RING + position % NUM_ENTRIES for position in range(start, end)]

    def keep(self, first: int, regressed: torch.Tensor) -> None:
        """Keep what was regressed at rows of a tree `[num_rows, hidden]` from row `first` on; the root is row 0."""
        self._buffer[REGRESSED + first : REGRESSED + first + len(regressed)] = regressed

    def rows(self, places: list[int]) -> torch.Tensor:
        """Return the features at these places, `[num_places, hidden]`."""
        return self._buffer[torch.tensor(places, device=self._buffer.device)]


def regressed_place(row: int) -> int:
    """Return the place of the feature regressed at a row of a tree; the root is row 0."""
    return REGRESSED + row
