"""Row tables: what a forward's kernels read of its rows, as parts of one static buffer of int32; how one is filled.

A graph reads the same buffer at every replay, so a table always has as many rows as the run's forwards; those beyond
the real ones are padding, marked by a tail of length 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from swiftbatch.worker.kernels.sizes import NUM_ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from swiftbatch.worker.kernels.row_tables import Rows

BLOCK = 64  # positions between two boundaries; also the width of a tail

Ints = TypeVar("Ints", "Tensor", NDArray[np.int32])


@dataclass(frozen=True)
class CudaRowTable(Generic[Ints]):
    """Parts of one buffer: a tensor on the device, or the array that is uploaded to it."""

    groups: Ints  # [num_groups, 4]: slot, first row, number of rows (0: padding), boundary
    rows: Ints  # [num_rows, 5]: slot, boundary, length of the tail (0: padding), row of its angles, entry to write
    tail_slots: Ints  # [num_rows, BLOCK]: entries of the keys from the boundary on, in position order
    token_ids: Ints  # [num_rows]
    prefixes: Ints  # [2, num_groups]: slots and boundaries of the groups, once more, since flash-attn takes no strides
    packed: Ints  # [num_rows]: places of the rows where every group has room for `rows_per_group`


@dataclass(frozen=True)
class PageTable:
    """Pages of a pool that the entries of slots lie in: any, in any order."""

    numbers: Tensor  # [num_slots, most_pages] int32, on the device; of one slot [most_pages]
    page: int  # entries of a page, a multiple of BLOCK

    @property
    def capacity(self) -> int:
        """The most entries of a slot."""
        return self.numbers.shape[-1] * self.page

    def of(self, slot: int) -> PageTable:
        """The pages of one slot."""
        return PageTable(self.numbers[slot], self.page)


def in_pages(entries: NDArray[np.int64], pages: Sequence[int], page: int) -> NDArray[np.int64]:
    """Return entries of a pool, from those of a slot that has these pages."""
    numbers = np.asarray(pages, dtype=np.int64)
    return numbers[entries // page] * page + entries % page


@dataclass(frozen=True)
class TableLayout:
    """The layout of a table in its buffer, and the range of its numbers."""

    num_slots: int
    capacity: int  # entries of a slot
    rows_per_group: int
    num_positions: int  # as the table of angles counts them
    vocab: int
    boundary_step: int = BLOCK  # boundaries are multiples of it: behind a partial cache it is 1
    page: int | None = None  # entries of a page, where slots' entries lie in pages of a pool
    num_rows: int = NUM_ROWS  # of every forward: one shape means one numerics, one graph, one cost

    @property
    def num_groups(self) -> int:
        """The most groups that all rows of `num_slots` sequences need, each in two blocks at most."""
        most = (self.num_rows + 2 * self.num_slots * (self.rows_per_group - 1)) // self.rows_per_group
        return min(self.num_rows, most)

    @property
    def size(self) -> int:
        """Numbers in the buffer."""
        return sum(math.prod(shape) for shape in self._shapes())

    def table(self, buffer: Ints) -> CudaRowTable[Ints]:
        """A buffer `[size] int32` by its parts."""
        parts, start = [], 0
        for shape in self._shapes():
            end = start + math.prod(shape)
            parts.append(buffer[start:end].reshape(shape))
            start = end
        return CudaRowTable(*cast("list[Any]", parts))

    def fill(
        self, buffer: NDArray[np.int32], sequences: Sequence[tuple[Rows, int]], pages: Sequence[Sequence[int]] = ()
    ) -> None:
        """Write the rows of some sequences, each with its slot, in order; biases go to the device on their own.

        `pages` are those of each sequence, where entries lie in some; a table on the device tells of prefixes. Raises
        ValueError for what the arena or the table has no room for; the buffer is then left as it was.
        """
        self._check(sequences)
        table = self.table(buffer)
        buffer[:] = 0
        row = group = 0
        for number, (rows, slot) in enumerate(sequences):
            end = row + len(rows)
            entries, tails = np.arange(rows.first_entry, rows.first_entry + len(rows)), rows.tail_entries
            if self.page is not None:
                entries, tails = (in_pages(each, pages[number], self.page) for each in (entries, tails))
            table.rows[row:end, :2] = slot, rows.boundary
            table.rows[row:end, 2:] = np.stack((rows.tail_lengths, rows.positions, entries), axis=1)
            table.tail_slots[row:end] = tails
            table.token_ids[row:end] = rows.token_ids
            for first in range(row, end, self.rows_per_group):
                num_rows = min(self.rows_per_group, end - first)
                table.groups[group] = slot, first, num_rows, rows.boundary
                table.prefixes[:, group] = slot, rows.boundary
                table.packed[first : first + num_rows] = group * self.rows_per_group + np.arange(num_rows)
                group += 1
            row = end

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        groups, rows = self.num_groups, self.num_rows
        return (groups, 4), (rows, 5), (rows, BLOCK), (rows,), (2, groups), (rows,)

    def _check(self, sequences: Sequence[tuple[Rows, int]]) -> None:
        num_rows = sum(len(rows) for rows, _ in sequences)
        if num_rows > self.num_rows:
            raise ValueError(f"found {num_rows} rows, expected at most {self.num_rows}")
        num_groups = sum(-(-len(rows) // self.rows_per_group) for rows, _ in sequences)
        if num_groups > self.num_groups:
            raise ValueError(f"found {num_groups} groups of rows, expected at most {self.num_groups}")
        for rows, slot in sequences:
            _check_range("slot", [slot], self.num_slots)
            self._check_rows(rows)
        written = {(slot, rows.first_entry + each) for rows, slot in sequences for each in range(len(rows))}
        if len(written) < num_rows:
            raise ValueError("found rows that write the same entries")

    def _check_rows(self, rows: Rows) -> None:
        if rows.boundary % self.boundary_step or not 0 <= rows.boundary <= self.capacity:
            raise ValueError(
                f"found a boundary at {rows.boundary}, expected a multiple of {self.boundary_step} up to "
                f"{self.capacity}"
            )
        if rows.tail_entries.shape != (len(rows), BLOCK):
            raise ValueError(f"found tails {list(rows.tail_entries.shape)}, expected {[len(rows), BLOCK]}")
        _check_range("entry", [rows.first_entry, rows.first_entry + len(rows) - 1], self.capacity)
        _check_range("entry of a tail", rows.tail_entries, self.capacity)
        _check_range("length of a tail", rows.tail_lengths, BLOCK + 1, lowest=1)
        _check_range("position", rows.positions, self.num_positions)
        _check_range("token", rows.token_ids, self.vocab)


def _check_range(name: str, numbers: Sequence[int] | NDArray[Any], end: int, lowest: int = 0) -> None:
    found = np.asarray(numbers)
    if found.size and not (lowest <= found.min() and found.max() < end):
        wrong = found.min() if found.min() < lowest else found.max()
        raise ValueError(f"found {name} {wrong}, expected {lowest} to {end - 1}")
