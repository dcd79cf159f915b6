"""Rows of a draft model's forward, their visible text, and the ranking of their candidates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.forward.tile_packing import SequenceRows
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES
from swiftbatch.worker.sampling.sampler import TokenSampler
from swiftbatch.worker.sampling.sequence import Sequence

NUM_SINKS = BLOCK
WINDOW = 4 * BLOCK  # newest tokens always seen; grows to twice as many before it is cut back
NUM_ENTRIES = NUM_SINKS + 2 * WINDOW


def window_start(num_committed: int) -> int:
    """Return the position of the first visible token after the sinks."""
    return max(NUM_SINKS, (num_committed // WINDOW - 1) * WINDOW)


def entry_of(position: int, start: int) -> int:
    """Return the entry of a visible token if the window begins at position `start`."""
    return position if position < NUM_SINKS else position - start + NUM_SINKS


def position_of(entry: int, start: int) -> int:
    return entry if entry < NUM_SINKS else entry - NUM_SINKS + start


NOTHING = 0  # zeros: no feature precedes the text's first token
REGRESSED = 1  # regressed features of a draft tree's root, then of its nodes
RING = REGRESSED + 1 + MAX_TREE_NODES  # the target's features at the newest positions, in a ring
NUM_PLACES = RING + NUM_ENTRIES
Candidates = list[tuple[float, int]]
"""What may follow a row: (log-confidence, token), best first."""


class Features:
    """The target's final hidden states of one sequence, and the regressed ones of its tree."""

    def __init__(self, buffer: torch.Tensor) -> None:
        """`buffer [num_places, hidden]` need not be initialised; its length limits the kept target features."""
        self._buffer = buffer
        self._buffer[NOTHING] = 0
        self._num_kept = len(buffer) - RING  # room for so many positions
        self.first = self.end = 0  # known positions

    def put(self, position: int, hidden: torch.Tensor) -> None:
        """Keep `hidden [num_rows, hidden]` from `position` on; forget kept features if there is a gap before them."""
        if position != self.end:
            self.first = position
        self.end = position + len(hidden)
        self.first = max(self.first, self.end - self._num_kept)
        kept = hidden[-self._num_kept :]
        start = (self.end - len(kept)) % self._num_kept
        num_left = min(len(kept), self._num_kept - start)  # up to the ring's end
        self._buffer[RING + start : RING + start + num_left] = kept[:num_left]
        if num_left < len(kept):
            self._buffer[RING : RING + len(kept) - num_left] = kept[num_left:]

    def holds(self, start: int, end: int) -> bool:
        return self.first <= start and end <= self.end

    def places(self, start: int, end: int) -> list[int]:
        return [RING + position % self._num_kept for position in range(start, end)]

    def keep(self, first: int, regressed: torch.Tensor) -> None:
        """Keep regressed features of a tree's rows `[num_rows, hidden]` from row `first` on; the root is row 0."""
        self._buffer[REGRESSED + first : REGRESSED + first + len(regressed)] = regressed

    def rows(self, places: list[int]) -> torch.Tensor:
        """Return the features at these places, `[num_places, hidden]`."""
        return self._buffer[torch.tensor(places, device=self._buffer.device)]


def regressed_place(row: int) -> int:
    return REGRESSED + row


@dataclass(frozen=True)
class Room:
    sequence: Sequence
    cache: FullKVCache  # rows of the window without the newest token's, which every draft runs anew
    features: Features


@dataclass(frozen=True)
class DraftRows:
    """Consecutive rows of one sequence; the last rows may belong to a draft tree and need candidates."""

    room: Room
    rows: SequenceRows
    places: list[int]  # [num_rows] places of the features in front of them
    paths: list[list[int]]  # tokens below the tree's root down to each tree row
    first: int = 0  # index of the first such row in its tree; the root is 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_known(self) -> int:
        return len(self) - len(self.paths)

    def part(self, start: int, end: int) -> DraftRows:
        first, stop = (max(0, row - self.num_known) for row in (start, end))
        rows, places = self.rows.part(start, end), self.places[start:end]
        return DraftRows(self.room, rows, places, self.paths[first:stop], self.first + first)


def features_of(parts: list[DraftRows]) -> torch.Tensor:
    return torch.cat([part.room.features.rows(part.places) for part in parts])


def wanted_rows(parts: list[DraftRows]) -> list[int]:
    """Return the indices of the tree rows among all rows of some parts."""
    wanted: list[int] = []
    start = 0
    for part in parts:
        wanted += range(start + part.num_known, start + len(part))
        start += len(part)
    return wanted


def of_each(parts: list[DraftRows], found: list[Candidates]) -> list[list[Candidates]]:
    remaining = iter(found)
    return [list(itertools.islice(remaining, len(part.paths))) for part in parts]


def tables(parts: list[DraftRows], num_rows: int) -> Iterator[list[DraftRows]]:
    """Yield all rows in order, at most `num_rows` at a time."""
    table: list[DraftRows] = []
    num_free = num_rows
    for part in parts:
        start = 0
        while start < len(part):
            end = min(len(part), start + num_free)
            table.append(part.part(start, end))
            num_free -= end - start
            start = end
            if num_free == 0:
                yield table
                table, num_free = [], num_rows
    if table:
        yield table


# The ranking in torch of candidates behind a draft's rows, with the penalty and noise that the target will have.


SPREAD = 0.4  # error of the draft model's logits; with it scores are about as likely as they say


@dataclass(frozen=True)
class TorchRoom(Room):
    sampler: TokenSampler  # covers a first part of the sequence

    @classmethod
    def of(
        cls, sequence: Sequence, cache: FullKVCache, features_like: torch.Tensor, num_places: int = NUM_PLACES
    ) -> TorchRoom:
        buffer = features_like.new_zeros(num_places, len(features_like))
        sampler = TokenSampler(sequence, sequence.vocab_size, buffer.device)
        return cls(sequence, cache, Features(buffer), sampler)

    def rank(self, logits: torch.Tensor, paths: list[list[int]], width: int) -> list[Candidates]:
        """Return the best `width` tokens behind each path, by guessed logits `[num_rows, vocab] float32`."""
        if not paths:
            return []
        for token_id in self.sequence.token_ids[self.sampler.position :].tolist():
            self.sampler.push(token_id)
        ranker = CandidateRanker(self.sequence, spread=SPREAD)
        return ranker.rank_logits(self.sampler.penalised(logits), [1 + len(path) for path in paths], width)


def keep_and_rank(
    parts: list[DraftRows], regressed: torch.Tensor, logits: torch.Tensor, width: int
) -> list[list[Candidates]]:
    """Keep tree rows' `regressed [num_wanted, hidden]` and rank by `logits [num_wanted, vocab]`."""
    found: list[Candidates] = []
    start = 0
    for part in parts:
        own = slice(start, start + len(part.paths))
        part.room.features.keep(part.first, regressed[own])
        found += cast(TorchRoom, part.room).rank(logits[own], part.paths, width)
        start = own.stop
    return of_each(parts, found)
