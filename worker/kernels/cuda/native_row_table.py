"""Row tables filled in C (source/row_table.h): a forward waits for its table, and numpy takes several times as long."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_int64
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from swiftbatch.worker.kernels.addresses import address_of
from swiftbatch.worker.kernels.instruction_sets import chosen_library
from swiftbatch.worker.kernels.kernel_sizes import BLOCK

if TYPE_CHECKING:
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


class NativeFill:
    """Fills tables of one layout."""

    def __init__(self, layout: CTableLayout, size: int) -> None:
        """`size`: numbers of a table's buffer."""
        self._layout, self._size = layout, size
        self._address = ctypes.addressof(layout)

    def fill(
        self,
        buffer: NDArray[np.int32],
        sequences: Sequence[tuple[Rows, int]],
        pages: Sequence[Sequence[int]],
        window_pages: Sequence[Sequence[int]],
    ) -> bool:
        """Fill a buffer as `TableLayout.fill` does, with its arguments.

        False, with nothing written, where no kernels were compiled, and for what `TableLayout.fill` refuses.
        """
        library, page = chosen_library(), self._layout.page
        if library is None or not sequences or buffer.shape != (self._size,) or not buffer.flags.c_contiguous:
            return False
        numbers, by_row = _numbers_of(sequences)
        tails, num_rows = np.concatenate([rows.tail_entries for rows, _ in sequences]), sum(numbers[::4])
        if tails.shape != (num_rows, BLOCK) or tails.dtype != np.int64 or len(by_row) != 3 * num_rows:
            return False
        given = array("q", [*numbers, *by_row])
        address = given.buffer_info()[0]
        places = [address + 8 * (len(numbers) + num_rows * part) for part in range(3)]
        own, windowed = (_pages_of(each, numbers, page) for each in (pages, window_pages))
        filled = library.table_fill(
            *(self._address, address, len(sequences), *places, address_of(tails)),
            *(ctypes.addressof(own), ctypes.addressof(windowed), address_of(buffer)),
        )
        return bool(filled)


def _numbers_of(sequences: Sequence[tuple[Rows, int]]) -> tuple[list[int], list[int]]:
    """Size, slot, boundary and first entry of each sequence; then tokens, positions and lengths of tails of all rows.

    Fewer of these where a sequence has not all of them.
    """
    numbers, token_ids, positions, lengths = list[int](), list[int](), list[int](), list[int]()
    for rows, slot in sequences:
        numbers += (len(rows.token_ids), slot, rows.boundary, rows.first_entry)
        token_ids += rows.token_ids
        positions += rows.positions
        lengths += rows.tail_lengths
    are_whole = len(token_ids) == len(positions) == len(lengths)
    return numbers, [*token_ids, *positions, *lengths] if are_whole else []


def _pages_of(pages: Sequence[Sequence[int]], numbers: list[int], page: int) -> CGivenPages:
    """The pages of each sequence from that of its boundary to that of its last row; none where not all have some."""
    if not page or 4 * len(pages) != len(numbers):
        return CGivenPages(None, 0)
    known = list[int]()
    for own, size, boundary, first_entry in zip(pages, numbers[::4], numbers[2::4], numbers[3::4], strict=True):
        first, last = boundary // page, (first_entry + size - 1) // page
        known += own[first : last + 1]
    return CGivenPages((c_int64 * len(known))(*known), len(known))
