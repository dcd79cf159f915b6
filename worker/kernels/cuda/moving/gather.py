"""Rows copied out of keys and values of all layers at once: chosen ones of each head, or consecutive ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.moving.moved_arena import bits_of

NUM_ROWS = 32  # of one program
NUM_WARPS = 4


@triton.jit(do_not_specialize=["first", "count"])  # one kernel for all of them
def copy_rows(
    source_ptr, entries_ptr, out_ptr, first, count, num_parts, num_heads,
    stride_source_layer, stride_source_part, stride_source_head, stride_source_row,
    stride_layer, stride_part, stride_head, stride_row,
    NUM_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, IS_CHOSEN: tl.constexpr,
):  # fmt: skip
    """Some rows of one layer, part and head: those at `entries [num_layers, num_heads, count]`, or from `first` on."""
    place, head = tl.program_id(0) // num_heads, (tl.program_id(0) % num_heads).to(tl.int64)
    layer, part = (place // num_parts).to(tl.int64), (place % num_parts).to(tl.int64)
    rows = tl.program_id(1) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    if IS_CHOSEN:
        entries = tl.load(entries_ptr + (layer * num_heads + head) * count + rows, mask=rows < count, other=-1)
    else:
        entries = first + rows
    columns = tl.arange(0, WIDTH)
    inside = ((rows < count) & (entries >= 0))[:, None] & (columns < HEAD_DIM)[None, :]
    source_ptr += layer * stride_source_layer + part * stride_source_part + head * stride_source_head
    out_ptr += layer * stride_layer + part * stride_part + head * stride_head
    source = entries.to(tl.int64) * stride_source_row
    target = rows.to(tl.int64) * stride_row
    numbers = tl.load(source_ptr + source[:, None] + columns[None, :], mask=inside)
    tl.store(out_ptr + target[:, None] + columns[None, :], numbers, mask=inside)


def gather_entries(source: torch.Tensor, entries: torch.Tensor, out: torch.Tensor) -> None:
    """Copy chosen rows of `source [num_layers, num_parts, num_kv_heads, capacity, head_dim]` to `out`, in one launch.

    `entries [num_layers, num_kv_heads, count] int32`: each head's own, the same in all parts (keys and values), not
    looked at here; at -1 `out [num_layers, num_parts, num_kv_heads, count, head_dim]` stays as it is. Both may be parts
    of larger buffers. Raises ValueError for shapes that do not fit.
    """
    expected = (out.shape[0], out.shape[2], out.shape[-2])
    if tuple(entries.shape) != expected or entries.dtype != torch.int32 or not entries.is_contiguous():
        raise ValueError(f"entries: found {entries.dtype} {list(entries.shape)}, expected torch.int32 {list(expected)}")
    _launch(source, entries, 0, out)


def gather_range(source: torch.Tensor, first: int, out: torch.Tensor) -> None:
    """Copy consecutive rows from `first` on, as `gather_entries` does.

    Raises ValueError also for rows that do not exist.
    """
    if not 0 <= first <= source.shape[-2] - out.shape[-2]:
        end = first + out.shape[-2]
        raise ValueError(f"found rows {first} to {end}, expected them within 0 to {source.shape[-2]}")
    _launch(source, None, first, out)


def _launch(source: torch.Tensor, entries: torch.Tensor | None, first: int, out: torch.Tensor) -> None:
    num_layers, num_parts, num_heads, _, head_dim = source.shape
    count = out.shape[-2]
    expected = (num_layers, num_parts, num_heads, count, head_dim)
    if tuple(out.shape) != expected or out.dtype != source.dtype or out.stride(-1) != 1 or source.stride(-1) != 1:
        raise ValueError(
            f"out: found {out.dtype} {list(out.shape)}, expected {source.dtype} {list(expected)}, each row's numbers "
            "side by side"
        )
    if count == 0:
        return
    copy_rows[(num_layers * num_parts * num_heads, triton.cdiv(count, NUM_ROWS))](
        bits_of(source),
        entries,
        bits_of(out),
        first,
        count,
        num_parts,
        num_heads,
        *source.stride()[:4],
        *out.stride()[:4],
        NUM_ROWS=NUM_ROWS,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        IS_CHOSEN=entries is not None,
        num_warps=NUM_WARPS,
    )
