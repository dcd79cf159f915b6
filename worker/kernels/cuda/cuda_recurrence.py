"""Recurrent states on a GPU: buffers, the table of rows, and kernels along a tree's paths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_row_table import Ints, in_parts
from swiftbatch.worker.kernels.cuda.triton_primitives import dot
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.layer_specs import NUM_STATES, HeadSizes, RecurrentForm, RecurrentSizes, StepLayout

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.row_tables import Rows


@dataclass(frozen=True)
class StateBuffers:
    """States and steps of all layers and slots."""

    layout: StepLayout
    states: Tensor  # [num_layers, num_slots, NUM_STATES, num_heads, key_dim, value_dim] float32
    steps: Tensor  # [num_layers, num_slots, ring, words] float32
    inputs: Tensor  # [num_layers, num_slots, ring, num_channels] in the model's dtype, within the steps

    @classmethod
    def empty(
        cls, sizes: HeadSizes, num_layers: int, num_slots: int, dtype: torch.dtype, num_rows: int, device: torch.device
    ) -> StateBuffers:
        layout = StepLayout.of(sizes, dtype.itemsize, num_rows)
        heads = (sizes.num_heads, sizes.key_dim, sizes.value_dim)
        states = torch.empty(num_layers, num_slots, NUM_STATES, *heads, device=device)
        steps = torch.empty(num_layers, num_slots, layout.ring, layout.words, device=device)
        return cls(layout, states, steps, steps.view(dtype)[..., layout.inputs * 4 // dtype.itemsize :])

    @property
    def num_slots(self) -> int:
        return self.states.shape[1]


def number_of_state(boundary: int) -> int:
    return boundary // BLOCK % NUM_STATES


MOVED_WORDS = 1024
MOVE_WARPS = 4


@triton.jit
def move_step_words(
    steps_ptr, moves_ptr, num_moves, num_slots, RING: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr
):
    """Program (layer, words): all moves in order, each slot's words read before they are overwritten."""
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    steps_ptr += tl.program_id(0).to(tl.int64) * num_slots * (RING * WORDS) + columns
    inside = columns < WORDS
    for i in range(0, num_moves):
        slot = tl.load(moves_ptr + 3 * i).to(tl.int64)
        if slot >= 0:
            source, target = tl.load(moves_ptr + 3 * i + 1), tl.load(moves_ptr + 3 * i + 2)
            words = tl.load(steps_ptr + (slot * RING + source % RING) * WORDS, mask=inside)
            tl.store(steps_ptr + (slot * RING + target % RING) * WORDS, words, mask=inside)


def move_steps(states: StateBuffers, moves: Tensor) -> None:
    """Move steps in one launch; `moves [num_moves, 3] int32` as in `move_rows`."""
    num_layers, num_slots, ring, words = states.steps.shape
    move_step_words[(num_layers, triton.cdiv(words, MOVED_WORDS))](
        states.steps.view(torch.int32), moves, len(moves), num_slots, RING=ring, WORDS=words, WIDTH=MOVED_WORDS,
        num_warps=MOVE_WARPS,
    )  # fmt: skip


# Table of rows for recurrent layers, in an int32 buffer after the row table.


@dataclass(frozen=True)
class StateTable(Generic[Ints]):
    """Parts of one buffer. Entries are positions in the sequence, even if the cache is in pages."""

    sequences: Ints  # [num_slots, 4]: slot, first row, number of rows (0: none), boundary of the latest state
    rows: Ints  # [num_rows, 5]: slot, boundary, length of the path (0: padding), entry and index of the first row
    paths: Ints  # [num_rows, BLOCK]: entries of the row's path from the boundary on, in order; its own is the last


@dataclass(frozen=True)
class StateRows:
    """Consecutive rows of one sequence, its slot, and the boundary of its latest state."""

    rows: Rows
    slot: int
    boundary: int


@dataclass(frozen=True)
class StateLayout:
    """Layout of a table of `StateRows` in its buffer."""

    num_slots: int
    ring: int  # number of positions whose steps fit in a slot
    num_before: int  # number of inputs before a boundary that rows after it read
    num_rows: int

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes())

    def table(self, buffer: Ints) -> StateTable[Ints]:
        return StateTable(*in_parts(buffer, self._shapes()))

    def fill(self, buffer: NDArray[np.int32], groups: Sequence[StateRows]) -> None:
        """Write the rows of groups; those of one sequence must be consecutive.

        Raises ValueError, and changes nothing, if steps do not fit in the ring or a row's boundary is before its
        state's.
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
        oldest = group.boundary - BLOCK - self.num_before  # a rollback by one block needs these entries
        if end - oldest > self.ring:
            raise ValueError(f"found rows up to {end}, expected them up to {oldest + self.ring}")
        if not 0 <= group.slot < self.num_slots:
            raise ValueError(f"found slot {group.slot}, expected 0 to {self.num_slots - 1}")


def _by_sequence(groups: Sequence[StateRows]) -> Iterator[tuple[int, list[StateRows]]]:
    """Yield each sequence's groups and first row. Raises ValueError if a sequence's groups are not consecutive."""
    parts: dict[int, list[StateRows]] = {}
    for group in groups:
        if group.slot in parts and group.slot != next(reversed(parts)):
            raise ValueError(f"found rows of slot {group.slot} behind those of others")
        parts.setdefault(group.slot, []).append(group)
    row = 0
    for own in parts.values():
        yield row, own
        row += sum(len(part.rows) for part in own)


# States of heads on a GPU: a row reads its boundary's state, then the steps of its path in order.


HEADS_PER_PROGRAM = 4  # number of heads whose scores a program computes for one path
STATE_COLUMNS = 32  # number of columns of a head's state that a program computes
FOLDED_AT_ONCE = 16


@triton.jit
def decays_behind(steps_ptr, entries, behind, head, RING: tl.constexpr, WORDS: tl.constexpr, DECAYS: tl.constexpr):
    """Return the decay from each of some steps to the last one."""
    logs = tl.load(steps_ptr + (entries % RING) * WORDS + DECAYS + head, mask=behind, other=0.0)
    return tl.exp(tl.cumsum(logs, 0, reverse=True))


@triton.jit
def decay_of_all(steps_ptr, entries, seen, head, RING: tl.constexpr, WORDS: tl.constexpr, DECAYS: tl.constexpr):
    """Return the product of all decays from the boundary to the row."""
    logs = tl.load(steps_ptr + (entries % RING) * WORDS + DECAYS + head, mask=seen, other=0.0)
    return tl.exp(tl.sum(logs, 0))


@triton.jit
def weigh_path(
    rows_ptr, paths_ptr, steps_ptr, queries_ptr, query_scores_ptr, key_scores_ptr, wholes_ptr,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr,
    RING: tl.constexpr, WORDS: tl.constexpr, DECAYS: tl.constexpr, HAS_SHARES: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, key head, some value heads): weights of the path's updates in the row's sums."""
    row, key_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(rows_ptr + row * 5 + 2)
    if length == 0:
        return
    n, dims = tl.arange(0, BLOCK), tl.arange(0, KEY_WIDTH)
    seen, is_dim = n < length, dims < KEY_DIM
    behind = n < length - 1
    entries = tl.load(paths_ptr + row * BLOCK + n, mask=seen, other=0).to(tl.int64)
    entries_behind = tl.load(paths_ptr + row * BLOCK + n + 1, mask=behind, other=0).to(tl.int64)
    steps_ptr += tl.load(rows_ptr + row * 5).to(tl.int64) * (RING * WORDS)
    keys_ptr = steps_ptr + key_head * KEY_DIM + dims
    keys = tl.load(
        keys_ptr[None, :] + (entries % RING)[:, None] * WORDS, mask=seen[:, None] & is_dim[None, :], other=0.0
    )
    query = tl.load(queries_ptr + (row * NUM_KEY_HEADS + key_head) * KEY_DIM + dims, mask=is_dim, other=0.0)
    query_scores = tl.sum(keys * query[None, :], 1)
    key_scores = query_scores
    if HAS_SHARES:
        own = tl.load(paths_ptr + row * BLOCK + length - 1).to(tl.int64)
        key = tl.load(keys_ptr + (own % RING) * WORDS, mask=is_dim, other=0.0)
        key_scores = tl.sum(keys * key[None, :], 1)
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    first = tl.program_id(2) * HEADS_PER_PROGRAM
    for number in range(first, tl.minimum(first + HEADS_PER_PROGRAM, group)):
        head = key_head * group + number
        weights = decays_behind(steps_ptr, entries_behind, behind, head, RING, WORDS, DECAYS)
        place = (row * NUM_HEADS + head) * BLOCK + n
        tl.store(query_scores_ptr + place, tl.where(seen, query_scores * weights, 0.0))
        if HAS_SHARES:
            tl.store(key_scores_ptr + place, tl.where(behind, key_scores * weights, 0.0))
        whole = decay_of_all(steps_ptr, entries, seen, head, RING, WORDS, DECAYS)
        tl.store(wholes_ptr + row * NUM_HEADS + head, whole)


@triton.jit
def folded(
    state, steps_ptr, boundary, head, key_head, columns, is_column,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, UPDATES: tl.constexpr,
    RING: tl.constexpr, WORDS: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Return columns of a head's state after the block that starts at a boundary."""
    n, dims = tl.arange(0, BLOCK), tl.arange(0, KEY_WIDTH)
    entries = boundary.to(tl.int64) + n
    state *= decay_of_all(steps_ptr, entries, n >= 0, head, RING, WORDS, DECAYS)
    for first in range(0, BLOCK, SOME):
        some = entries_of(boundary, first, SOME)
        # decays until the end of the block: those within this part, then those of all later parts
        within = decays_behind(steps_ptr, some + 1, tl.arange(0, SOME) < SOME - 1, head, RING, WORDS, DECAYS)
        rest = decay_of_all(steps_ptr, entries, n >= first + SOME, head, RING, WORDS, DECAYS)
        places = (some % RING) * WORDS
        keys_ptr = steps_ptr + key_head * KEY_DIM + dims
        keys = tl.load(keys_ptr[:, None] + places[None, :], mask=(dims < KEY_DIM)[:, None], other=0.0)
        updates_ptr = steps_ptr + UPDATES + head * VALUE_DIM + columns
        updates = tl.load(updates_ptr[None, :] + places[:, None], mask=is_column[None, :], other=0.0)
        state = dot(keys * (within * rest)[None, :], updates, state)
    return state


@triton.jit
def entries_of(boundary, first, SOME: tl.constexpr):
    return boundary.to(tl.int64) + first + tl.arange(0, SOME)


@triton.jit
def walk_rows(
    sequences_ptr, rows_ptr, paths_ptr, states_ptr, steps_ptr, queries_ptr, values_ptr, shares_ptr,
    query_scores_ptr, key_scores_ptr, wholes_ptr, found_ptr,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, NUM_STATES: tl.constexpr, UPDATES: tl.constexpr,
    RING: tl.constexpr, WORDS: tl.constexpr, DECAYS: tl.constexpr, HAS_SHARES: tl.constexpr, BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, columns): its rows in order, after folding a new boundary's state."""
    sequence_ptr = sequences_ptr + tl.program_id(0) * 4
    first_row, num_rows = tl.load(sequence_ptr + 1), tl.load(sequence_ptr + 2)
    if num_rows == 0:
        return
    slot, boundary, head = tl.load(sequence_ptr).to(tl.int64), tl.load(sequence_ptr + 3), tl.program_id(1)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    dims, n = tl.arange(0, KEY_WIDTH), tl.arange(0, BLOCK)
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    is_place = is_dim[:, None] & is_column[None, :]
    states_ptr += (slot * (NUM_STATES * NUM_HEADS) + head) * (KEY_DIM * VALUE_DIM)
    places = dims[:, None] * VALUE_DIM + columns[None, :]
    own_state = (boundary // BLOCK % NUM_STATES).to(tl.int64) * (NUM_HEADS * KEY_DIM * VALUE_DIM)
    state = tl.load(states_ptr + own_state + places, mask=is_place & (boundary > 0), other=0.0)
    steps_ptr += slot * (RING * WORDS)
    for row in range(first_row, first_row + num_rows):
        row_boundary, length = tl.load(rows_ptr + row * 5 + 1), tl.load(rows_ptr + row * 5 + 2)
        while boundary < row_boundary:
            state = folded(
                state, steps_ptr, boundary, head, key_head, columns, is_column, KEY_DIM, VALUE_DIM, KEY_WIDTH,
                UPDATES, RING, WORDS, DECAYS, BLOCK, SOME,
            )  # fmt: skip
            boundary += BLOCK
            own_state = (boundary // BLOCK % NUM_STATES).to(tl.int64) * (NUM_HEADS * KEY_DIM * VALUE_DIM)
            tl.store(states_ptr + own_state + places, state, mask=is_place)
        row_head = row * NUM_HEADS + head
        own = tl.load(paths_ptr + row * BLOCK + length - 1).to(tl.int64)
        before = n < length - 1
        entries = tl.load(paths_ptr + row * BLOCK + n, mask=before, other=0).to(tl.int64)
        updates_ptr = steps_ptr + UPDATES + head * VALUE_DIM + columns
        seen = before[:, None] & is_column[None, :]
        updates = tl.load(updates_ptr[None, :] + (entries % RING)[:, None] * WORDS, mask=seen, other=0.0)
        whole = tl.load(wholes_ptr + row_head)
        value = tl.load(values_ptr + row_head * VALUE_DIM + columns, mask=is_column, other=0.0)
        if HAS_SHARES:
            key = tl.load(steps_ptr + (own % RING) * WORDS + key_head * KEY_DIM + dims, mask=is_dim, other=0.0)
            scores = tl.load(key_scores_ptr + row_head * BLOCK + n)
            known = whole * tl.sum(state * key[:, None], 0) + tl.sum(updates * scores[:, None], 0)
            value = tl.load(shares_ptr + row_head) * (value - known)
        query_ptr = queries_ptr + (row * NUM_KEY_HEADS + key_head) * KEY_DIM + dims
        query = tl.load(query_ptr, mask=is_dim, other=0.0)
        scores = tl.load(query_scores_ptr + row_head * BLOCK + n)
        found = whole * tl.sum(state * query[:, None], 0) + tl.sum(updates * scores[:, None], 0)
        found += value * tl.load(query_scores_ptr + row_head * BLOCK + length - 1)
        tl.store(found_ptr + row_head * VALUE_DIM + columns, found, mask=is_column)
        tl.store(updates_ptr + (own % RING) * WORDS, value, mask=is_column)
        tl.debug_barrier()  # later rows read this update


def weight_constants(sizes: RecurrentSizes, layout: StepLayout) -> dict[str, Any]:
    """Return constants and warps of `weigh_path`."""
    return {
        **_sizes(sizes, layout),
        "HEADS_PER_PROGRAM": HEADS_PER_PROGRAM,
        "num_warps": 4,
    }


def walk_constants(sizes: RecurrentSizes, layout: StepLayout) -> dict[str, Any]:
    """Return constants, warps and stages of `walk_rows`."""
    return {
        **_sizes(sizes, layout),
        "VALUE_DIM": sizes.value_dim,
        "COLUMNS": min(STATE_COLUMNS, triton.next_power_of_2(sizes.value_dim)),
        "NUM_STATES": NUM_STATES,
        "UPDATES": layout.num_keys,
        "SOME": FOLDED_AT_ONCE,
        "num_warps": 4,
        "num_stages": 1,  # each row must be written before the next reads it
    }


def _sizes(sizes: RecurrentSizes, layout: StepLayout) -> dict[str, Any]:
    return {
        "NUM_HEADS": sizes.num_heads,
        "NUM_KEY_HEADS": sizes.num_key_heads,
        "KEY_DIM": sizes.key_dim,
        "KEY_WIDTH": triton.next_power_of_2(sizes.key_dim),
        "RING": layout.ring,
        "WORDS": layout.words,
        "DECAYS": layout.decays,
        "HAS_SHARES": sizes.form == RecurrentForm.DELTA_NET,
        "BLOCK": BLOCK,
    }


def weigh_paths(
    table: StateTable[Tensor], steps: Tensor, queries: Tensor, weights: tuple[Tensor, ...], sizes: RecurrentSizes,
    layout: StepLayout,
) -> None:  # fmt: skip
    """Write the weights of each row's path, `[num_rows, num_heads, BLOCK]`, and the weight of its state."""
    num_tiles = triton.cdiv(sizes.num_heads // sizes.num_key_heads, HEADS_PER_PROGRAM)
    weigh_path[(len(table.rows), sizes.num_key_heads, num_tiles)](
        table.rows, table.paths, steps, queries, *weights, **weight_constants(sizes, layout)
    )


def walk(
    table: StateTable[Tensor],
    states: Tensor,  # [num_slots, NUM_STATES, num_heads, key_dim, value_dim] of one layer
    steps: Tensor,  # [num_slots, ring, words]
    rows: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, ...],
    found: Tensor,  # [num_rows, num_heads, value_dim] float32
    sizes: RecurrentSizes,
    layout: StepLayout,
) -> None:
    constants = walk_constants(sizes, layout)
    grid = (len(table.sequences), sizes.num_heads, triton.cdiv(sizes.value_dim, constants["COLUMNS"]))
    walk_rows[grid](table.sequences, table.rows, table.paths, states, steps, *rows, *weights, found, **constants)
