"""Rows of one slot copied out of the arena, in all layers at once: chosen ones, or consecutive ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.cuda.moving.arena import bits_of, expect_arena

NUM_ROWS = 32  # of one program
NUM_WARPS = 4


@triton.jit(do_not_specialize=["slot", "first", "count"])  # one kernel for all of them
def copy_rows(
    arena_ptr, entries_ptr, out_ptr, slot, first, count, num_slots, num_heads, capacity,
    stride_layer, stride_half, stride_head, stride_row,
    NUM_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CHOSEN: tl.constexpr,
):  # fmt: skip
    """Some rows of one layer, half and head: those at `entries [num_layers, num_heads, count]`, or from `first` on."""
    part, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    layer, half = part // 2, part % 2
    rows = tl.program_id(1) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    if IS_CHOSEN:
        entries = tl.load(entries_ptr + (layer * num_heads + head) * count + rows, mask=rows < count, other=-1)
    else:
        entries = first + rows
    columns = tl.arange(0, WIDTH)
    inside = ((rows < count) & (entries >= 0))[:, None] & (columns < HEAD_DIM)[None, :]
    place = (part.to(tl.int64) * num_slots + slot) * num_heads + head
    source = (place * capacity + entries.to(tl.int64)) * HEAD_DIM
    target = (
        layer.to(tl.int64) * stride_layer + half * stride_half + head * stride_head + rows.to(tl.int64) * stride_row
    )
    numbers = tl.load(arena_ptr + source[:, None] + columns[None, :], mask=inside)
    tl.store(out_ptr + target[:, None] + columns[None, :], numbers, mask=inside)


def gather_entries(arena: torch.Tensor, slot: int, entries: torch.Tensor, out: torch.Tensor) -> None:
    """Copy chosen rows of a slot to `out [num_layers, 2, num_kv_heads, count, head_dim]`, in one launch.

    `entries [num_layers, num_kv_heads, count] int32`: each head's own, not looked at here; at -1 `out` stays as it is.
    `out` may be part of a larger buffer. Raises ValueError for shapes that do not fit.
    """
    expect_arena(arena)
    num_layers, _, _, num_heads, _, _ = arena.shape
    expected = (num_layers, num_heads, out.shape[-2])
    if tuple(entries.shape) != expected or entries.dtype != torch.int32 or not entries.is_contiguous():
        raise ValueError(f"entries: found {entries.dtype} {list(entries.shape)}, expected torch.int32 {list(expected)}")
    _launch(arena, slot, entries, 0, out)


def gather_range(arena: torch.Tensor, slot: int, first: int, out: torch.Tensor) -> None:
    """Copy consecutive rows of a slot from `first` on to `out [num_layers, 2, num_kv_heads, count, head_dim]`.

    `out` may be part of a larger buffer. Raises ValueError for shapes that do not fit, and rows that do not exist.
    """
    expect_arena(arena)
    if not 0 <= first <= arena.shape[4] - out.shape[-2]:
        raise ValueError(f"found rows {first} to {first + out.shape[-2]}, expected them within 0 to {arena.shape[4]}")
    _launch(arena, slot, None, first, out)


def _launch(arena: torch.Tensor, slot: int, entries: torch.Tensor | None, first: int, out: torch.Tensor) -> None:
    num_layers, _, num_slots, num_heads, capacity, head_dim = arena.shape
    count = out.shape[-2]
    if not 0 <= slot < num_slots:
        raise ValueError(f"found slot {slot}, expected one of {num_slots}")
    if (
        tuple(out.shape) != (num_layers, 2, num_heads, count, head_dim)
        or out.dtype != arena.dtype
        or out.stride(-1) != 1
    ):
        raise ValueError(
            f"out: found {out.dtype} {list(out.shape)}, expected {arena.dtype} "
            f"{[num_layers, 2, num_heads, count, head_dim]}, each row's numbers side by side"
        )
    copy_rows[(num_layers * 2 * num_heads, triton.cdiv(count, NUM_ROWS))](
        bits_of(arena),
        entries,
        bits_of(out),
        slot,
        first,
        count,
        num_slots,
        num_heads,
        capacity,
        *out.stride()[:4],
        NUM_ROWS=NUM_ROWS,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        IS_CHOSEN=entries is not None,
        num_warps=NUM_WARPS,
    )
