"""Accepted rows move next to their root, in all layers at once.

A move's target may be another one's source. A path goes down a tree whose parents stand before their children, so its
nodes increase: the k-th of them, p(k), is at least k. It moves from root + 1 + p(k) to root + 1 + k. Whoever reads the
target of move k, move j with p(j) = k, has j <= p(j) = k: in increasing order every row is read before it is written
over, and none is read that was written before. One program moves all rows of one sequence, layer, half and head, in
that order; programs share no row, so no order among them matters.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.moving.moved_arena import bits_of, expect_arena

NUM_WARPS = 1  # a program holds one row at a time, so that the same warp reads and writes a number
PADDING = (-1, -1, -1)


@triton.jit
def move_slot_rows(
    arena_ptr, moves_ptr, num_moves, num_slots, num_heads, capacity, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Every move of one slot in one layer, half and head, one after the other."""
    part, slot = tl.program_id(0) // num_heads, tl.program_id(1)
    place = (part.to(tl.int64) * num_slots + slot) * num_heads + tl.program_id(0) % num_heads
    rows_ptr = arena_ptr + place * capacity * HEAD_DIM
    columns = tl.arange(0, WIDTH)
    inside = columns < HEAD_DIM
    for i in range(0, num_moves):
        if tl.load(moves_ptr + 3 * i) == slot:
            source, target = tl.load(moves_ptr + 3 * i + 1), tl.load(moves_ptr + 3 * i + 2)
            row = tl.load(rows_ptr + source.to(tl.int64) * HEAD_DIM + columns, mask=inside)
            tl.debug_barrier()
            tl.store(rows_ptr + target.to(tl.int64) * HEAD_DIM + columns, row, mask=inside)
            tl.debug_barrier()


def moves_of(slot: int, root: int, path: Many[int]) -> list[tuple[int, int, int]]:
    """Slot, source and target of the accepted nodes `path` of a tree whose root is entry `root`; none that stay.

    Raises ValueError for a path whose nodes do not increase.
    """
    nodes = list(path)
    if any(node < 0 for node in nodes) or any(nodes[i] >= nodes[i + 1] for i in range(len(nodes) - 1)):
        raise ValueError(f"found a path of nodes {nodes}, expected them to increase")
    return [(slot, root + 1 + node, root + 1 + i) for i, node in enumerate(nodes) if node != i]


def move_rows(arena: torch.Tensor, moves: torch.Tensor) -> None:
    """Move rows of `arena [num_layers, 2, num_slots, num_kv_heads, capacity, head_dim]` in one launch.

    `moves [num_moves, 3] int32`, on the device and not looked at here: slot, source and target of each, those of a
    slot as `moves_of` gives them; -1 as a slot is padding. Raises ValueError for shapes that do not fit.
    """
    expect_arena(arena)
    if moves.dim() != 2 or moves.shape[1] != 3 or moves.dtype != torch.int32 or not moves.is_contiguous():
        raise ValueError(f"moves: found {moves.dtype} {list(moves.shape)}, expected torch.int32 [num_moves, 3]")
    num_layers, _, num_slots, num_heads, capacity, head_dim = arena.shape
    move_slot_rows[(num_layers * 2 * num_heads, num_slots)](
        bits_of(arena),
        moves,
        len(moves),
        num_slots,
        num_heads,
        capacity,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        num_warps=NUM_WARPS,
    )
