"""Row tables of a forward on a GPU, filled in C."""

from __future__ import annotations

import ctypes
import functools
import math
from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_int64
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS
from swiftbatch.worker.kernels.native_library import KernelError, chosen_library, why_none
from swiftbatch.worker.kernels.row_tables import address_of

if TYPE_CHECKING:
    from torch import Tensor

    from swiftbatch.worker.kernels.row_tables import Rows


NO_TAILS = np.empty((0, BLOCK), dtype=np.int64)


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


def compiled_library() -> ctypes.CDLL:
    """Return the kernels in C. Raises KernelError if none were compiled."""
    library = chosen_library()
    if library is None:
        raise KernelError(f"device cuda: a GPU's forwards need the kernels in C, and {why_none()}")
    return library


def _numbers_of(sequences: Sequence[tuple[Rows, int]]) -> tuple[list[int], list[int]]:
    """Return size, slot, boundary and first entry per sequence; then tokens, positions and tail lengths.

    Raises ValueError if a sequence's lists have different lengths.
    """
    numbers, token_ids, positions, lengths = list[int](), list[int](), list[int](), list[int]()
    for rows, slot in sequences:
        numbers += (len(rows.token_ids), slot, rows.boundary, rows.first_entry)
        token_ids += rows.token_ids
        positions += rows.positions
        lengths += rows.tail_lengths
    if not len(token_ids) == len(positions) == len(lengths):
        raise ValueError(f"found {len(token_ids)} tokens, {len(positions)} positions and {len(lengths)} tails")
    return numbers, [*token_ids, *positions, *lengths]


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
    prefixes: Ints  # [2, num_groups]: the groups' slots and boundaries again, contiguous, for flash-attn
    packed: Ints  # [num_rows]: places of the rows in a buffer with `rows_per_group` places per group


@dataclass(frozen=True)
class PageTable:
    """Pages of a pool that hold slots' entries, in any order."""

    numbers: Tensor  # [num_slots, most_pages] int32, on the device; of one slot [most_pages]
    page: int  # entries per page, a multiple of BLOCK; 1 in lists of chosen entries

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

        Raises ValueError, and changes nothing, if the arena or the table lacks room, and KernelError.
        """
        library = compiled_library()
        numbers, by_row = _numbers_of(sequences)
        num_rows = len(by_row) // 3
        tails = np.concatenate([NO_TAILS, *(rows.tail_entries for rows, _ in sequences)])
        given = array("q", [*numbers, *by_row])
        address = given.buffer_info()[0]
        places = [address + 8 * (len(numbers) + num_rows * part) for part in range(3)]
        own, windowed = (_pages_of(each, numbers, self.page or 0) for each in (pages, window_pages))
        is_buffer = buffer.shape == (self.size,) and buffer.flags.c_contiguous
        are_tails = tails.shape == (num_rows, BLOCK) and tails.dtype == np.int64
        if not (is_buffer and are_tails) or not library.table_fill(
            *(ctypes.addressof(self._in_c), address, len(sequences), *places, address_of(tails)),
            *(ctypes.addressof(own), ctypes.addressof(windowed), address_of(buffer)),
        ):
            rows = [tuple(numbers[start : start + 4]) for start in range(0, len(numbers), 4)]
            raise ValueError(
                f"found rows (number, slot, boundary, first entry) {rows} with tails {list(tails.shape)}, which do not "
                f"fit a buffer {list(buffer.shape)} of {self}"
            )

    @functools.cached_property
    def _in_c(self) -> CTableLayout:
        windows = self._start_of_windows if self.has_window_pages else 0
        numbers = (self.num_slots, self.capacity, self.rows_per_group, self.num_positions, self.vocab)
        sizes = (self.boundary_step, self.page or 0, self.num_rows, self.num_groups, windows)
        return CTableLayout(*numbers, *sizes)

    @property
    def _end_of_table(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes())

    @property
    def _start_of_windows(self) -> int:
        return -(-self._end_of_table // 4) * 4  # aligned like the table's parts, since a GPU reads 16 bytes at a time

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        groups, rows = self.num_groups, self.num_rows
        return (groups, 4), (rows, 5), (rows, BLOCK), (rows,), (2, groups), (rows,)
