"""Row tables of a forward on a GPU, filled in Python or C."""

from __future__ import annotations

import ctypes
import functools
import math
from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_int64
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS
from swiftbatch.worker.kernels.native_library import chosen_library
from swiftbatch.worker.kernels.row_tables import address_of

if TYPE_CHECKING:
    from torch import Tensor

    from swiftbatch.worker.kernels.row_tables import Rows


class CTableLayout(ctypes.Structure):
    """`table_layout` of source/row_table.h."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("num_slots", "capacity", "rows_per_group", "num_positions", "vocab", "boundary_step", "page"),
            *("num_rows", "num_groups", "start_of_windows"),
        )
    )


class CGivenPages(ctypes.Structure):
    """`given_pages` of source/row_table.h."""

    _fields_ = (("numbers", ctypes.POINTER(c_int64)), ("count", c_int64))


def is_filled_in_c(
    layout: CTableLayout,
    buffer: NDArray[np.int32],
    sequences: Sequence[tuple[Rows, int]],
    pages: Sequence[Sequence[int]],
    window_pages: Sequence[Sequence[int]],
) -> bool:
    """Fill a buffer as `TableLayout.fill` does; return False if that would raise or kernels are missing."""
    library = chosen_library()
    if library is None or not sequences or not buffer.flags.c_contiguous:
        return False
    numbers, by_row = _numbers_of(sequences)
    tails, num_rows = np.concatenate([rows.tail_entries for rows, _ in sequences]), sum(numbers[::4])
    if tails.shape != (num_rows, BLOCK) or tails.dtype != np.int64 or len(by_row) != 3 * num_rows:
        return False
    given = array("q", [*numbers, *by_row])
    address = given.buffer_info()[0]
    places = [address + 8 * (len(numbers) + num_rows * part) for part in range(3)]
    own, windowed = (_pages_of(each, numbers, layout.page) for each in (pages, window_pages))
    filled = library.table_fill(
        *(ctypes.addressof(layout), address, len(sequences), *places, address_of(tails)),
        *(ctypes.addressof(own), ctypes.addressof(windowed), address_of(buffer)),
    )
    return bool(filled)


def _numbers_of(sequences: Sequence[tuple[Rows, int]]) -> tuple[list[int], list[int]]:
    """Return size, slot, boundary and first entry per sequence; then tokens, positions and tail lengths."""
    numbers, token_ids, positions, lengths = list[int](), list[int](), list[int](), list[int]()
    for rows, slot in sequences:
        numbers += (len(rows.token_ids), slot, rows.boundary, rows.first_entry)
        token_ids += rows.token_ids
        positions += rows.positions
        lengths += rows.tail_lengths
    are_whole = len(token_ids) == len(positions) == len(lengths)
    return numbers, [*token_ids, *positions, *lengths] if are_whole else []


def _pages_of(pages: Sequence[Sequence[int]], numbers: list[int], page: int) -> CGivenPages:
    """Return each sequence's pages from its boundary to its last row; return no pages if any sequence lacks some."""
    if not page or 4 * len(pages) != len(numbers):
        return CGivenPages(None, 0)
    known = list[int]()
    for own, size, boundary, first_entry in zip(pages, numbers[::4], numbers[2::4], numbers[3::4], strict=True):
        first, last = boundary // page, (first_entry + size - 1) // page
        known += own[first : last + 1]
    return CGivenPages((c_int64 * len(known))(*known), len(known))


# Row tables, the kernels' input of a forward's rows, as parts of one static int32 buffer.


Ints = TypeVar("Ints", "Tensor", NDArray[np.int32])


def in_parts(buffer: Ints, shapes: Iterable[tuple[int, ...]]) -> list[Any]:
    """Return consecutive views of a buffer `[size]` in these shapes."""
    parts, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        parts.append(buffer[start:end].reshape(shape))
        start = end
    return parts


@dataclass(frozen=True)
class CudaRowTable(Generic[Ints]):
    """Parts of one buffer, on the device or the host."""

    groups: Ints  # [num_groups, 4]: slot, first row, number of rows (0: padding), boundary
    rows: Ints  # [num_rows, 5]: slot, boundary, length of the tail (0: padding), row of the angle table, entry to write
    tail_slots: Ints  # [num_rows, BLOCK]: entries of the keys from the boundary on, in position order
    token_ids: Ints  # [num_rows]
    prefixes: Ints  # [2, num_groups]: the groups' slots and boundaries again, contiguous, as flash-attn expects
    packed: Ints  # [num_rows]: places of the rows in a buffer with `rows_per_group` places per group


@dataclass(frozen=True)
class PageTable:
    """Pages of a pool that hold slots' entries, in any order."""

    numbers: Tensor  # [num_slots, most_pages] int32, on the device; of one slot [most_pages]
    page: int  # entries per page, a multiple of BLOCK

    @property
    def capacity(self) -> int:
        return self.numbers.shape[-1] * self.page

    def of(self, slot: int) -> PageTable:
        return PageTable(self.numbers[slot], self.page)


@dataclass(frozen=True)
class TableLayout:
    """Layout of a table in its buffer, and the limits of its values."""

    num_slots: int
    capacity: int
    rows_per_group: int
    num_positions: int  # number of rows in the table of angles
    vocab: int
    boundary_step: int = BLOCK  # boundaries are multiples of this; it is 1 for a partial cache
    page: int | None = None  # entries per page; None if each slot's entries are contiguous
    num_rows: int = NUM_ROWS  # a fixed shape keeps numerics, graph and cost the same
    has_window_pages: bool = False  # a second pool's entries and tails follow the table

    @property
    def num_groups(self) -> int:
        """Return the most groups of `num_slots` sequences, each in up to two blocks."""
        most = (self.num_rows + 2 * self.num_slots * (self.rows_per_group - 1)) // self.rows_per_group
        return min(self.num_rows, most)

    @property
    def size(self) -> int:
        if self.has_window_pages:
            return self._start_of_windows + self.num_rows * (5 + BLOCK)
        return self._end_of_table

    def table(self, buffer: Ints) -> CudaRowTable[Ints]:
        return CudaRowTable(*in_parts(buffer, self._shapes()))

    def window_table(self, buffer: Ints) -> CudaRowTable[Ints]:
        """Return the table for layers with a window, with entries in their own pool."""
        start = self._start_of_windows
        middle = start + self.num_rows * 5
        rows, tails = buffer[start:middle].reshape(self.num_rows, 5), buffer[middle:].reshape(self.num_rows, BLOCK)
        return replace(self.table(buffer), rows=rows, tail_slots=tails)

    def fill(
        self,
        buffer: NDArray[np.int32],
        sequences: Sequence[tuple[Rows, int]],
        pages: Sequence[Sequence[int]] = (),
        window_pages: Sequence[Sequence[int]] = (),
    ) -> None:
        """Write the rows of sequences, each with its slot, in order. The caller copies biases separately.

        Raises ValueError, and changes nothing, if the arena or the table lacks room.
        """
        if buffer.shape == (self.size,) and is_filled_in_c(self._in_c, buffer, sequences, pages, window_pages):
            return
        given = _Given.of(sequences)
        self._check(given)
        places = given.entries, given.tails
        if self.page is not None and len(given.owner):
            places = given.in_pages(pages, self.page)
        buffer[:] = 0
        table, num_rows = self.table(buffer), len(given.owner)
        table.rows[:num_rows, 0] = given.slots[given.owner]
        table.rows[:num_rows, 1] = given.boundaries[given.owner]
        table.rows[:num_rows, 2] = given.lengths
        table.rows[:num_rows, 3] = given.positions
        table.rows[:num_rows, 4], table.tail_slots[:num_rows] = places
        table.token_ids[:num_rows] = given.token_ids
        if self.has_window_pages and self.page is not None and num_rows:
            windows = self.window_table(buffer)
            windows.rows[:] = table.rows
            windows.rows[:num_rows, 4], windows.tail_slots[:num_rows] = given.in_pages(window_pages, self.page)
        self._fill_groups(table, given)

    @functools.cached_property
    def _in_c(self) -> CTableLayout:
        windows = self._start_of_windows if self.has_window_pages else 0
        numbers = (self.num_slots, self.capacity, self.rows_per_group, self.num_positions, self.vocab)
        sizes = (self.boundary_step, self.page or 0, self.num_rows, self.num_groups, windows)
        return CTableLayout(*numbers, *sizes)

    def _fill_groups(self, table: CudaRowTable[NDArray[np.int32]], given: _Given) -> None:
        most, counts = self.rows_per_group, self._num_groups_of(given)
        firsts = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(counts)), counts)
        first_rows = given.starts[owner] + (np.arange(len(owner)) - firsts[owner]) * most
        num_rows = np.minimum(most, given.starts[owner] + given.sizes[owner] - first_rows)
        slots, boundaries = given.slots[owner], given.boundaries[owner]
        for column, numbers in enumerate((slots, first_rows, num_rows, boundaries)):
            table.groups[: len(owner), column] = numbers
        table.prefixes[:, : len(owner)] = slots, boundaries
        # full groups are contiguous, so a row's place is its index in the sequence plus the places of earlier groups
        table.packed[: len(given.owner)] = firsts[given.owner] * most + given.numbers

    def _num_groups_of(self, given: _Given) -> NDArray[np.int64]:
        return -(-given.sizes // self.rows_per_group)

    @property
    def _end_of_table(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes())

    @property
    def _start_of_windows(self) -> int:
        return -(-self._end_of_table // 4) * 4  # aligned like the table's parts, since a GPU reads 16 bytes at a time

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        groups, rows = self.num_groups, self.num_rows
        return (groups, 4), (rows, 5), (rows, BLOCK), (rows,), (2, groups), (rows,)

    def _check(self, given: _Given) -> None:
        num_rows = len(given.owner)
        if num_rows > self.num_rows:
            raise ValueError(f"found {num_rows} rows, expected at most {self.num_rows}")
        num_groups = int(self._num_groups_of(given).sum())
        if num_groups > self.num_groups:
            raise ValueError(f"found {num_groups} groups of rows, expected at most {self.num_groups}")
        found = given.boundaries
        wrong = (found % self.boundary_step != 0) | (found.view(np.uint64) > self.capacity)
        if wrong.any():
            raise ValueError(
                f"found a boundary at {found[wrong][0]}, expected a multiple of {self.boundary_step} up to "
                f"{self.capacity}"
            )
        _check_range("slot", given.slots, self.num_slots)
        _check_range("entry", given.entries, self.capacity)
        _check_range("entry of a tail", given.tails, self.capacity)
        _check_range("length of a tail", given.lengths, BLOCK + 1, lowest=1)
        _check_range("position", given.positions, self.num_positions)
        _check_range("token", given.token_ids, self.vocab)
        if len(set((given.slots[given.owner] * self.capacity + given.entries).tolist())) < num_rows:
            raise ValueError("found rows that write the same entries")


@dataclass(frozen=True)
class _Given:
    """Rows of several sequences as arrays. Arrays are faster, and every step waits for its table."""

    sizes: NDArray[np.int64]  # [num_sequences]
    slots: NDArray[np.int64]  # [num_sequences]
    boundaries: NDArray[np.int64]  # [num_sequences]
    starts: NDArray[np.int64]  # [num_sequences] first row of each
    owner: NDArray[np.int64]  # [num_rows] index of the sequence
    numbers: NDArray[np.int64]  # [num_rows] index of the row in its sequence
    entries: NDArray[np.int64]  # [num_rows] to write
    tails: NDArray[np.int64]  # [num_rows, BLOCK]
    lengths: NDArray[np.int64]  # [num_rows]
    positions: NDArray[np.int64]  # [num_rows]
    token_ids: NDArray[np.int64]  # [num_rows]

    @classmethod
    def of(cls, sequences: Sequence[tuple[Rows, int]]) -> _Given:
        """Join the rows of sequences. Raises ValueError for tails of another size."""
        numbers, tails = list[tuple[int, int, int, int]](), [np.empty((0, BLOCK), dtype=np.int64)]
        for rows, slot in sequences:
            size, tail = len(rows.token_ids), rows.tail_entries
            if tail.shape != (size, BLOCK):
                raise ValueError(f"found tails {list(tail.shape)}, expected {[size, BLOCK]}")
            numbers.append((size, slot, rows.boundary, rows.first_entry))
            tails.append(tail)
        sizes, slots, boundaries, first_entries = np.array(numbers, dtype=np.int64).reshape(-1, 4).T
        starts = np.cumsum(sizes) - sizes
        owner = np.repeat(np.arange(len(sizes)), sizes)
        within = np.arange(len(owner)) - starts[owner]
        return cls(
            *(sizes, slots, boundaries, starts, owner, within),
            first_entries[owner] + within,
            np.concatenate(tails),
            _joined(rows.tail_lengths for rows, _ in sequences),
            _joined(rows.positions for rows, _ in sequences),
            _joined(rows.token_ids for rows, _ in sequences),
        )

    def in_pages(self, pages: Sequence[Sequence[int]], page: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the places of `entries` and `tails` in a pool. Raises ValueError if a sequence lacks a page."""
        known, ordinals, offsets = list[int](), list[int](), list[int]()
        lasts = self.entries[self.starts + self.sizes - 1] // page
        for own, first, last in zip(pages, (self.boundaries // page).tolist(), lasts.tolist(), strict=True):
            offsets.append(len(known) - first)
            known += own[first : last + 1]
            ordinals += range(first, last + 1)
            if len(known) != len(ordinals):
                raise ValueError(f"found {len(own)} pages, expected entries of page {last} to lie in one")
        # maps a page's entries to their places
        shifts = (np.array(known, dtype=np.int64) - np.array(ordinals, dtype=np.int64)) * page
        behind = np.array(offsets)[self.owner]
        entries, tails = self.entries // page + behind, self.tails // page + behind[:, None]
        return self.entries + shifts[entries], self.tails + shifts[tails]


def _joined(lists: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    return np.array(list(chain.from_iterable(lists)), dtype=np.int64)


def _check_range(name: str, numbers: NDArray[Any], end: int, lowest: int = 0) -> None:
    counted = numbers - lowest if lowest else numbers
    if numbers.size and counted.view(np.uint64).max() >= end - lowest:  # as unsigned, negative numbers are the largest
        wrong = numbers.min() if numbers.min() < lowest else numbers.max()
        raise ValueError(f"found {name} {wrong}, expected {lowest} to {end - 1}")
