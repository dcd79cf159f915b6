"""The table of rows for layers with states: like a row table, in a buffer of int32 behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import numpy as np
from numpy.typing import NDArray

from swiftbatch.worker.kernels.cuda.cuda_row_table import BLOCK, Ints, in_parts

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.row_tables import Rows


@dataclass(frozen=True)
class StateTable(Generic[Ints]):
    """Parts of one buffer; entries are those of the sequence, wherever its keys lie."""

    sequences: Ints  # [num_slots, 4]: slot, first row, number of rows (0: none), boundary of the newest state
    rows: Ints  # [num_rows, 5]: slot, boundary, length of the path (0: padding), entry and number of the first row
    paths: Ints  # [num_rows, BLOCK]: entries from the boundary on, in position order, the row's own last


@dataclass(frozen=True)
class StateRows:
    """Consecutive rows of one sequence, the slot of its states, and the boundary of the newest of these."""

    rows: Rows
    slot: int
    boundary: int


@dataclass(frozen=True)
class StateLayout:
    """The layout of such a table in its buffer."""

    num_slots: int
    ring: int  # positions whose steps a slot has room for
    num_before: int  # inputs in front of a boundary that rows behind it read
    num_rows: int

    @property
    def size(self) -> int:
        """Numbers in the buffer."""
        return sum(math.prod(shape) for shape in self._shapes())

    def table(self, buffer: Ints) -> StateTable[Ints]:
        """A buffer `[size] int32` by its parts."""
        return StateTable(*in_parts(buffer, self._shapes()))

    def fill(self, buffer: NDArray[np.int32], groups: Sequence[StateRows]) -> None:
        """Write the rows of some groups, in the order of the row table; those of one sequence follow each other.

        Raises ValueError for rows whose steps have no room, or whose state is forgotten; the buffer stays as it was.
        """
        for group in groups:
            self._check(group)
        sequences = list(_by_sequence(groups))
        table = self.table(buffer)
        buffer[:] = 0
        row = 0
        for number, (first_row, parts) in enumerate(sequences):
            first = parts[0]
            num_rows = sum(len(part.rows) for part in parts)
            table.sequences[number] = first.slot, first_row, num_rows, first.boundary
            for part in parts:
                own = slice(row, row + len(part.rows))
                table.rows[own, :2] = part.slot, part.rows.boundary
                table.rows[own, 2] = part.rows.tail_lengths
                table.rows[own, 3:] = first.rows.first_entry, first_row
                table.paths[own] = part.rows.tail_entries
                row = own.stop

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.num_slots, 4), (self.num_rows, 5), (self.num_rows, BLOCK)

    def _check(self, group: StateRows) -> None:
        rows, end = group.rows, group.rows.first_entry + len(group.rows)
        if rows.boundary < group.boundary:
            raise ValueError(f"found rows behind {rows.boundary}, expected them behind the state at {group.boundary}")
        oldest = group.boundary - BLOCK - self.num_before  # which a roll-back by a block may ask for
        if end - oldest > self.ring:
            raise ValueError(f"found rows up to {end}, expected them up to {oldest + self.ring}")
        if not 0 <= group.slot < self.num_slots:
            raise ValueError(f"found slot {group.slot}, expected 0 to {self.num_slots - 1}")


def _by_sequence(groups: Sequence[StateRows]) -> Iterator[tuple[int, list[StateRows]]]:
    """Yield each sequence's groups, with the number of its first row. Raises ValueError where others lie between."""
    parts: dict[int, list[StateRows]] = {}
    for group in groups:
        if group.slot in parts and group.slot != next(reversed(parts)):
            raise ValueError(f"found rows of slot {group.slot} behind those of others")
        parts.setdefault(group.slot, []).append(group)
    row = 0
    for own in parts.values():
        yield row, own
        row += sum(len(part.rows) for part in own)
