"""Row tables: what kernels read of a forward's rows."""

from __future__ import annotations

import dataclasses
import random
import re

import numpy as np
import pytest
import torch

from swiftbatch.worker.forward.tile_packing import SequenceRows
from swiftbatch.worker.kernels.cuda.cuda_row_table import TableLayout
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS
from tests.worker.kernels.cuda.arenas import CAPACITY, Placed, random_arena, random_rows
from tests.worker.kernels.kernel_parts import Shape

ARENA = random_arena(Shape(group=4), (5, 100, 448, 700))  # 16 rows a group


def sequences(*sizes: int) -> list[Placed]:
    return random_rows(random.Random(1), ARENA, sizes)


def filled(layout: TableLayout, placed: list[Placed]) -> np.ndarray:
    buffer = np.full(layout.size, -1, dtype=np.int32)
    layout.fill(buffer, placed)
    return buffer


def changed(**numbers: object) -> SequenceRows:
    return dataclasses.replace(sequences(1, 7)[1][0], **numbers)  # type: ignore[arg-type]


def test_rows_stand_in_order_with_their_slots_entries_and_tails() -> None:
    placed = [(rows, slot) for rows, slot in reversed(sequences(3, 20, 1))]
    table = ARENA.layout.table(filled(ARENA.layout, placed))
    row = 0
    for rows, slot in placed:
        for each in range(len(rows)):
            numbers = (slot, rows.boundary, rows.tail_lengths[each], rows.positions[each], rows.first_entry + each)
            assert tuple(table.rows[row]) == numbers
            assert (table.tail_slots[row] == rows.tail_entries[each]).all()
            assert table.token_ids[row] == rows.token_ids[each]
            row += 1
    assert row == 24
    assert not table.rows[row:].any()
    assert not table.token_ids[row:].any()


def test_a_sequence_with_more_rows_than_a_group_takes_several() -> None:
    table = ARENA.layout.table(filled(ARENA.layout, sequences(3, 20, 1)))
    assert table.groups[:4].tolist() == [[0, 0, 3, 0], [1, 3, 16, 64], [1, 19, 4, 64], [2, 23, 1, 448]]
    assert not table.groups[4:].any()


@pytest.mark.parametrize("num_slots", [1, 3, 4, 64])
@pytest.mark.parametrize("heads_per_kv", range(1, 17))
def test_there_are_groups_enough_for_any_64_rows_of_as_many_sequences(num_slots: int, heads_per_kv: int) -> None:
    """A sequence's rows span at most two blocks, because known tokens begin anywhere."""
    per_group = 64 // heads_per_kv
    layout = TableLayout(num_slots, CAPACITY, per_group, CAPACITY, 100)
    ones = min(2 * num_slots, NUM_ROWS) - 1
    worst = 0
    for extra in range(NUM_ROWS - ones):  # some blocks have one row more than fills their groups, one has the rest
        many, rest = divmod(extra, per_group)
        worst = max(worst, min(many, ones) * 2 + (ones - min(many, ones)) + -(-(rest + 1) // per_group))
    assert worst <= layout.num_groups <= NUM_ROWS


def test_parts_of_the_buffer_begin_where_a_gpu_reads_fast() -> None:
    buffer = np.zeros(ARENA.layout.size, dtype=np.int32)
    table = ARENA.layout.table(buffer)
    for part in (table.groups, table.rows, table.tail_slots, table.token_ids):
        assert (part.ctypes.data - buffer.ctypes.data) % 16 == 0
        assert part.base is not None


def test_a_table_of_no_rows_is_all_padding() -> None:
    assert not filled(ARENA.layout, []).any()


REFUSED = {
    "more rows than the table has": [(rows, slot) for rows, slot in sequences(10, 20, 20, 20)],
    "a slot behind the last one": [(changed(), 4)],
    "a slot before the first one": [(changed(), -1)],
    "a boundary within a block": [(changed(boundary=60), 1)],
    "a boundary behind the slot": [(changed(boundary=1088), 1)],
    "an entry behind the slot": [(changed(first_entry=1018), 1)],
    "an entry of a tail behind the slot": [(changed(tail_entries=np.full((7, BLOCK), 1024)), 1)],
    "fewer tails than rows": [(changed(tail_entries=np.zeros((1, BLOCK), dtype=np.int64)), 1)],
    "tails that are no integers": [(changed(tail_entries=np.zeros((7, BLOCK))), 1)],
    "no tail": [(changed(tail_lengths=[0] * 7), 1)],
    "a tail longer than a block": [(changed(tail_lengths=[65] * 7), 1)],
    "a position without angles": [(changed(positions=[1024] * 7), 1)],
    "a token outside the vocabulary": [(changed(token_ids=[100] * 7), 1)],
    "rows that write the same entries": [(changed(), 1), (changed(), 1)],
}


@pytest.mark.parametrize("placed", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_with_its_numbers_and_nothing_is_written(placed: list[Placed]) -> None:
    buffer = np.full(ARENA.layout.size, -1, dtype=np.int32)
    rows, slot = placed[0]
    numbers = f"({len(rows.token_ids)}, {slot}, {rows.boundary}, {rows.first_entry})"
    with pytest.raises(ValueError, match=re.escape(f"first entry) [{numbers}")):
        ARENA.layout.fill(buffer, placed)
    assert (buffer == -1).all()


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="found 7 tokens, 1 positions and 7 tails"):
        filled(ARENA.layout, [(changed(positions=[1]), 1)])


def test_more_groups_than_a_table_has_are_refused() -> None:
    layout = dataclasses.replace(ARENA.layout, num_slots=1)
    parts = [(changed(first_entry=100 + 7 * each), 0) for each in range(6)]
    with pytest.raises(ValueError, match=r"do not fit a buffer .*num_slots=1,"):
        layout.fill(np.zeros(layout.size, dtype=np.int32), parts)


def test_a_group_fills_a_tile() -> None:
    assert AttentionShape(8, 4, 128, torch.bfloat16).rows_per_group == 16
    assert AttentionShape(8, 5, 128, torch.bfloat16).rows_per_group == 12


def test_layers_with_a_window_have_entries_and_tails_in_their_own_pages_and_all_else_alike() -> None:
    layout = dataclasses.replace(ARENA.layout, page=BLOCK, has_window_pages=True, num_slots=3)
    placed = sequences(3, 20, 1)
    whole, windowed = (
        [[first + number for number in range(16)] for first in firsts] for firsts in ((0, 20, 40), (9, 50, 70))
    )
    windowed[2][:3] = [-1] * 3  # of others by now
    buffer = np.full(layout.size, -1, dtype=np.int32)
    layout.fill(buffer, placed, whole, windowed)
    table, windows = layout.table(buffer), layout.window_table(buffer)
    assert (windows.tail_slots.ctypes.data - buffer.ctypes.data) % 16 == 0
    assert (windows.rows[:, :4] == table.rows[:, :4]).all()
    moved = np.repeat([9, 30, 30], [3, 20, 1]) * BLOCK
    assert (windows.rows[:24, 4] == table.rows[:24, 4] + moved).all()
    is_tail = np.arange(BLOCK) < table.rows[:24, 2, None]
    assert ((windows.tail_slots[:24] - table.tail_slots[:24])[is_tail] == np.repeat(moved, table.rows[:24, 2])).all()
    assert not windows.rows[24:].any()


def pages_of(numbers: random.Random, page: int, num_lost: int) -> list[list[int]]:
    """The first `num_lost` of the shuffled pages belong to others."""
    places = numbers.sample(range(500), 3 * CAPACITY // page)
    own = [places[slot::3] for slot in range(3)]
    return [[-1] * num_lost + each[num_lost:] for each in own]


def random_layout(numbers: random.Random) -> tuple[TableLayout, tuple[list[list[int]], ...]]:
    page, has_windows = numbers.choice([(None, False), (BLOCK, False), (2 * BLOCK, True)])
    layout = dataclasses.replace(
        ARENA.layout, page=page, has_window_pages=has_windows, num_rows=numbers.choice([64, 128])
    )
    return layout, tuple(pages_of(numbers, page, lost) for lost in (0, 1)[: 1 + has_windows]) if page else ()


def expected_table(layout: TableLayout, placed: list[Placed], pages: tuple[list[list[int]], ...]) -> np.ndarray:
    """Fill a table row by row, and entries and tails again for each pool."""
    buffer = np.zeros(layout.size, dtype=np.int32)
    table, first_row, group = layout.table(buffer), 0, 0
    tables = [table, layout.window_table(buffer)] if layout.has_window_pages else [table]
    for rows, slot in placed:
        table.packed[first_row : first_row + len(rows)] = group * layout.rows_per_group + np.arange(len(rows))
        for start in range(0, len(rows), layout.rows_per_group):
            size = min(layout.rows_per_group, len(rows) - start)
            table.groups[group] = slot, first_row + start, size, rows.boundary
            table.prefixes[:, group] = slot, rows.boundary
            group += 1
        for each in range(len(rows)):
            row = first_row + each
            table.token_ids[row] = rows.token_ids[each]
            for number, own in enumerate(tables):
                numbers = pages[number][slot] if pages else None
                entry = place(rows.first_entry + each, layout.page, numbers)
                own.rows[row] = slot, rows.boundary, rows.tail_lengths[each], rows.positions[each], entry
                own.tail_slots[row] = [place(tail, layout.page, numbers) for tail in rows.tail_entries[each]]
        first_row += len(rows)
    return buffer


def place(entry: int, page: int | None, pages: list[int] | None) -> int:
    return entry if page is None or pages is None else pages[entry // page] * page + entry % page


@pytest.mark.parametrize("seed", range(12))
def test_a_table_is_that_of_its_rows_one_by_one(seed: int) -> None:
    """Also for tree nodes in a page after their block's."""
    numbers = random.Random(seed)
    arena = random_arena(Shape(group=4), [numbers.randrange(BLOCK, 700) for _ in range(3)])
    layout, pages = random_layout(numbers)
    placed = random_rows(numbers, arena, [numbers.randrange(1, 22) for _ in range(3)])
    numbers.shuffle(placed)
    found = np.full(layout.size, -1, dtype=np.int32)
    layout.fill(found, placed, *([each[slot] for _, slot in placed] for each in pages))
    is_written = np.ones(layout.size, dtype=bool)
    if layout.has_window_pages:
        is_written[layout._end_of_table : layout._start_of_windows] = False
    assert (found == expected_table(layout, placed, pages))[is_written].all()


def test_a_sequence_without_a_page_for_its_last_row_is_refused() -> None:
    layout = dataclasses.replace(ARENA.layout, page=BLOCK)
    [_, placed] = sequences(1, 20)
    buffer = np.full(layout.size, -1, dtype=np.int32)
    with pytest.raises(ValueError, match=r"\[\(20, 1, 64, 100\)\]"):
        layout.fill(buffer, [placed], [[7]])
    assert (buffer == -1).all()
