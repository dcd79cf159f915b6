"""Means of consecutive keys or values, chunk by chunk, in all layers at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.cuda_row_table import PageTable
from swiftbatch.worker.kernels.cuda.kv_buffers import in_pool, load_kept
from swiftbatch.worker.kernels.cuda.rounding import rounded
from swiftbatch.worker.kernels.kv_codes import cuda_row_width

NUM_WARPS = 4


@triton.jit(do_not_specialize=["first"])  # one kernel for all of them
def average_chunk(
    source_ptr, pages_ptr, out_ptr, first, chunk_size, num_heads,
    stride_source_layer, stride_source_head, stride_source_row, stride_layer, stride_head, stride_row,
    CHUNK_WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program (layer and head, chunk): summed in float32, rounded once."""
    layer, head = (tl.program_id(0) // num_heads).to(tl.int64), (tl.program_id(0) % num_heads).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    inside, columns = tl.arange(0, CHUNK_WIDTH), tl.arange(0, WIDTH)
    entries = first + chunk * chunk_size + inside
    rows = in_pool(entries, pages_ptr, inside < chunk_size, PAGE) * stride_source_row
    source_ptr += layer * stride_source_layer + head * stride_source_head
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    numbers = load_kept(source_ptr + rows[:, None], inside < chunk_size, columns, HEAD_DIM, True, dtype).to(tl.float32)
    mean = rounded(tl.sum(numbers, 0) / chunk_size, dtype)
    out_ptr += layer * stride_layer + head * stride_head + chunk * stride_row
    tl.store(out_ptr + columns, mean, mask=columns < HEAD_DIM)


def average_chunks(
    source: torch.Tensor, first: int, chunk_size: int, out: torch.Tensor, pages: PageTable | None = None
) -> None:
    """Means of `chunk_size` rows each, from row `first` of `source [num_layers, num_kv_heads, capacity, row_width]` on.

    They go to `out [num_layers, num_kv_heads, num_chunks, head_dim]`, in one launch. Both may be parts of larger
    buffers. With `pages` the rows are those of one slot, whose pages lie in `source`. Raises ValueError for shapes that
    do not fit, and rows that do not exist.
    """
    num_layers, num_heads, capacity, width = source.shape
    capacity = capacity if pages is None else pages.capacity
    num_chunks, head_dim = out.shape[2:]
    expected = (num_layers, num_heads, num_chunks, head_dim)
    fits = tuple(out.shape) == expected and width == cuda_row_width(source.dtype, out.dtype, head_dim)
    if not fits or out.stride(-1) != 1 or source.stride(-1) != 1:
        raise ValueError(
            f"out: found {out.dtype} {list(out.shape)}, expected {list(expected)} of what rows of {source.dtype} "
            f"{list(source.shape)} stand for"
        )
    end = first + num_chunks * chunk_size
    if not 0 <= first <= end <= capacity:
        raise ValueError(f"found rows {first} to {end}, expected them within 0 to {capacity}")
    average_chunk[(num_layers * num_heads, num_chunks)](
        source,
        None if pages is None else pages.numbers,
        out,
        first,
        chunk_size,
        num_heads,
        *source.stride()[:3],
        *out.stride()[:3],
        CHUNK_WIDTH=triton.next_power_of_2(chunk_size),
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        PAGE=0 if pages is None else pages.page,
        num_warps=NUM_WARPS,
    )
