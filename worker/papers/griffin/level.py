"""The input of a draft model's forward: rows of sequences, what stands in front of them, where they lead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from swiftbatch.worker.caches.full import FullKVCache
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.papers.griffin.features import Features
from swiftbatch.worker.target.tiles import SequenceRows

Candidates = list[tuple[float, int]]
"""What may follow a row: (log-confidence, token), best first."""


@dataclass(frozen=True)
class Room:
    """The cache and features that the draft model keeps of one sequence."""

    sequence: Sequence
    cache: FullKVCache  # rows of the window but the newest token's, which every draft runs anew
    features: Features


@dataclass(frozen=True)
class DraftRows:
    """Consecutive rows of one sequence; the last ones belong to a draft's tree: what may follow them is wanted."""

    room: Room
    rows: SequenceRows
    places: list[int]  # [num_rows] of the features in front of them
    paths: list[list[int]]  # tokens from the tree's root, which is not among them, down to each of the tree's rows
    first: int = 0  # of these rows in their tree, whose root is row 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_known(self) -> int:
        """Rows of the text, in front of the tree's."""
        return len(self) - len(self.paths)

    def part(self, start: int, end: int) -> DraftRows:
        """Rows `start` to `end`."""
        first, stop = (max(0, row - self.num_known) for row in (start, end))
        rows, places = self.rows.part(start, end), self.places[start:end]
        return DraftRows(self.room, rows, places, self.paths[first:stop], self.first + first)


def wanted_rows(parts: list[DraftRows]) -> list[int]:
    """Numbers of the trees' rows among all rows of some parts."""
    wanted: list[int] = []
    start = 0
    for part in parts:
        wanted += range(start + part.num_known, start + len(part))
        start += len(part)
    return wanted


def of_each(parts: list[DraftRows], found: list[Candidates]) -> list[list[Candidates]]:
    """Candidates of all wanted rows, by the parts that wanted them."""
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
