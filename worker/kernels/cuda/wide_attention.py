"""Triton attention of heads that take two neighbouring heads of a cache, as in Gemma 4's layers without a window.

As in `tree_attention`, a prefix is read in splits, and then the tail with the tree. Both halves of a wide head are
stored, and in 8 bits scaled, by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable
from swiftbatch.worker.kernels.cuda.kv_kernels import load_codes, load_rows, load_scales
from swiftbatch.worker.kernels.cuda.tree_attention import (
    MERGE_STAGES,
    SCALE_TO_LOG2,
    TAIL_TILE_ROWS,
    KeptLayer,
    Scratch,
    blocks_of,
    merge_split,
    resident_programs,
    split_at,
    splits_of_groups,
    store_split,
)
from swiftbatch.worker.kernels.cuda.triton_primitives import dot, rounded
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, HEAD_BLOCKS, NUM_ROWS, WIDE_STRIPES

STRIPES = tl.constexpr(WIDE_STRIPES)


@triton.jit
def score_stripe(query, rows, seen, columns, factor, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Return the share of scores that comes from one half of the heads; the other half is added to it."""
    keys = load_codes(rows, seen, columns, WIDTH, MASKED, query.dtype)
    factors = load_scales(rows, seen, WIDTH, MASKED) * factor
    return dot(query, tl.trans(keys), tl.zeros([query.shape[0], keys.shape[0]], tl.float32)) * factors[None, :]


@triton.jit
def weigh_stripe(probabilities, rows, seen, columns, acc, WIDTH: tl.constexpr, MASKED: tl.constexpr, dtype):
    """Add values of one half of the heads, each times its probability."""
    values = load_codes(rows, seen, columns, WIDTH, MASKED, dtype)
    shares = probabilities * load_scales(rows, seen, WIDTH, MASKED)[None, :]
    return dot(rounded(shares, values.dtype).to(values.dtype), values, acc)


@triton.jit(do_not_specialize=["num_groups"])
def wide_prefix_split(
    query_ptr, key_ptr, value_ptr, pages_ptr, output_ptr, lse_ptr, groups_ptr,
    num_groups, scale_log2, stride_slot, stride_head, stride_entry, stride_pages,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, WIDTH: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Each program takes every n-th split, tile of rows and KV head, and does what `prefix_split` does."""
    groups = tl.arange(0, NUM_ROWS)
    num_rows = tl.load(groups_ptr + groups * 4 + 2, mask=groups < num_groups, other=0)
    tiles_of_group = tl.cdiv(num_rows * HEADS_PER_KV, TILE_ROWS)
    items_of_group = splits_of_groups(groups_ptr, num_groups, NUM_ROWS, LEAST_BLOCKS, 0, BLOCK) * tiles_of_group
    ends = tl.cumsum(items_of_group, 0)
    own, num_programs = tl.program_id(0), tl.num_programs(0)
    for turn in tl.range(0, tl.cdiv(tl.sum(items_of_group, 0) * NUM_KV_HEADS - own, num_programs), disable_licm=True):
        item = own + turn * num_programs
        group, place = split_at(item // NUM_KV_HEADS, items_of_group, ends)
        num_tiles = tl.cdiv(tl.load(groups_ptr + group * 4 + 2) * HEADS_PER_KV, TILE_ROWS)
        attend_wide_split(
            query_ptr, key_ptr, value_ptr, pages_ptr, output_ptr, lse_ptr, groups_ptr + group * 4,
            place // num_tiles, place % num_tiles, item % NUM_KV_HEADS,
            scale_log2, stride_slot, stride_head, stride_entry, stride_pages,
            NUM_ROWS, NUM_KV_HEADS, HEADS_PER_KV, WIDTH, LEAST_BLOCKS, TILE_ROWS, BLOCK, KEYS, PAGE,
        )  # fmt: skip


@triton.jit
def attend_wide_split(
    query_ptr, key_ptr, value_ptr, pages_ptr, output_ptr, lse_ptr, group_ptr, split, tile, kv_head,
    scale_log2, stride_slot, stride_head, stride_entry, stride_pages,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, WIDTH: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of a group's rows to one split of their prefix, `KEYS` entries at a time."""
    slot = tl.load(group_ptr).to(tl.int64)
    num_rows = tl.load(group_ptr + 2)
    _, end, split_blocks = blocks_of(tl.load(group_ptr + 3), LEAST_BLOCKS, 0, BLOCK)
    start = split * split_blocks
    end = tl.minimum(start + split_blocks, end)
    index = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_real = index // HEADS_PER_KV < num_rows
    num_heads: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV
    row_head = (tl.load(group_ptr + 1) + index // HEADS_PER_KV) * num_heads
    row_head += kv_head * HEADS_PER_KV + index % HEADS_PER_KV
    columns = tl.arange(0, WIDTH)
    query_ptr += row_head[:, None] * (STRIPES * WIDTH) + columns[None, :]
    query_first = load_rows(query_ptr, is_real, columns, WIDTH, True)
    query_second = load_rows(query_ptr + WIDTH, is_real, columns, WIDTH, True)
    cache = slot * stride_slot + kv_head.to(tl.int64) * STRIPES * stride_head
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc_first = tl.zeros([TILE_ROWS, WIDTH], tl.float32)
    acc_second = tl.zeros([TILE_ROWS, WIDTH], tl.float32)
    for part in range(start * (BLOCK // KEYS), end * (BLOCK // KEYS)):
        kept = part * KEYS + tl.arange(0, KEYS)
        if PAGE:
            page = tl.load(pages_ptr + slot * stride_pages + part * KEYS // PAGE)
            kept = page * PAGE + kept % PAGE
        rows, seen = cache + kept.to(tl.int64)[:, None] * stride_entry, kept >= 0
        scores = score_stripe(query_first, key_ptr + rows, seen, columns, scale_log2, WIDTH, False)
        scores += score_stripe(query_second, key_ptr + stride_head + rows, seen, columns, scale_log2, WIDTH, False)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        probabilities = tl.exp2(scores - new_highest[:, None])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(probabilities, 1)
        acc_first = weigh_stripe(
            probabilities, value_ptr + rows, seen, columns, acc_first * decay[:, None], WIDTH, False,
            query_first.dtype,
        )  # fmt: skip
        acc_second = weigh_stripe(
            probabilities, value_ptr + stride_head + rows, seen, columns, acc_second * decay[:, None], WIDTH, False,
            query_first.dtype,
        )  # fmt: skip
        highest = new_highest
    row_head += split * (NUM_ROWS * num_heads)
    store_split(
        output_ptr, lse_ptr, row_head, is_real, highest, total, acc_first, acc_second, STRIPES * WIDTH, WIDTH
    )  # fmt: skip


@triton.jit
def wide_tail_merge(
    query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr, mixed_ptr, rows_ptr, tail_slots_ptr,
    scale_log2, stride_slot, stride_head, stride_entry,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, WIDTH: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head, half of the values): does what `tail_merge` does."""
    row, kv_head, half = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(rows_ptr + row * 5).to(tl.int64)
    boundary = tl.load(rows_ptr + row * 5 + 1)
    tail_length = tl.load(rows_ptr + row * 5 + 2)
    if tail_length == 0:
        return

    num_heads: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV
    index, columns, n = tl.arange(0, TILE_ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    is_real = index < HEADS_PER_KV
    row_head = row * num_heads + kv_head * HEADS_PER_KV + index
    offsets = row_head[:, None] * (STRIPES * WIDTH) + columns[None, :]
    seen = n < tail_length  # masks values too: 0 times the NaN of an unused entry is NaN
    rows = tl.load(tail_slots_ptr + row * BLOCK + n).to(tl.int64)[:, None] * stride_entry
    rows += slot * stride_slot + kv_head.to(tl.int64) * STRIPES * stride_head
    scores = tl.zeros([TILE_ROWS, BLOCK], tl.float32)
    for stripe in range(STRIPES):
        query = load_rows(query_ptr + stripe * WIDTH + offsets, is_real, columns, WIDTH, True)
        scores += score_stripe(query, key_ptr + stripe * stride_head + rows, seen, columns, scale_log2, WIDTH, True)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    highest = tl.max(scores, 1)
    probabilities = tl.exp2(scores - highest[:, None])
    total = tl.sum(probabilities, 1)
    acc = weigh_stripe(
        probabilities, value_ptr + half * stride_head + rows, seen, columns,
        tl.zeros([TILE_ROWS, WIDTH], tl.float32), WIDTH, True, query_ptr.dtype.element_ty,
    )  # fmt: skip

    columns += half * WIDTH
    _, end, split_blocks = blocks_of(boundary, LEAST_BLOCKS, 0, BLOCK)
    for split in tl.range(0, tl.cdiv(end, split_blocks), num_stages=MERGE_STAGES):
        place = split * (NUM_ROWS * num_heads) + row_head
        highest, total, acc = merge_split(
            output_ptr, lse_ptr, place, is_real, highest, total, acc, columns, STRIPES * WIDTH
        )  # fmt: skip
    mixed = rounded(acc / total[:, None], mixed_ptr.dtype.element_ty)
    tl.store(mixed_ptr + half * WIDTH + offsets, mixed, mask=is_real[:, None])


@dataclass(frozen=True)
class WideShape:
    """Sizes for which attention of wide heads is compiled."""

    num_kv_heads: int
    heads_per_kv: int  # 1 to 16
    head_dim: int
    dtype: torch.dtype
    num_rows: int = NUM_ROWS

    def __post_init__(self) -> None:
        """Raise ValueError for more query heads per KV head than `wide_tail_merge` supports."""
        if self.heads_per_kv > TAIL_TILE_ROWS:
            raise ValueError(f"found {self.heads_per_kv} query heads a KV head, expected at most {TAIL_TILE_ROWS}")

    @property
    def value_dim(self) -> int:
        return self.head_dim

    def prefix_constants(self, kept: torch.dtype) -> dict[str, Any]:
        """Return constants, warps and stages of `wide_prefix_split` for caches of a dtype.

        Decoded keys need registers, so there a tile has half as many rows.
        """
        is_bf16 = self.dtype == torch.bfloat16
        tile_rows = 16 if not is_bf16 else 64 if kept == self.dtype else 32
        own = {"TILE_ROWS": tile_rows, "KEYS": 32 if is_bf16 else 16}
        return self._sizes() | own | {"num_warps": 8, "num_stages": 2}

    def tail_constants(self) -> dict[str, Any]:
        """Return constants, warps and stages of `wide_tail_merge`."""
        own = {"TILE_ROWS": TAIL_TILE_ROWS, "num_warps": 4 if self.dtype == torch.bfloat16 else 8, "num_stages": 1}
        return self._sizes() | own

    def _sizes(self) -> dict[str, int]:
        return {
            "NUM_ROWS": self.num_rows,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEADS_PER_KV": self.heads_per_kv,
            "WIDTH": self.head_dim // WIDE_STRIPES,
            "LEAST_BLOCKS": HEAD_BLOCKS,
            "BLOCK": BLOCK,
        }


def attend_wide(
    shape: WideShape,
    query: Tensor,  # [num_rows, num_heads, head_dim]
    kept: KeptLayer,  # whose keys are [num_slots, num_kv_heads * WIDE_STRIPES, capacity, row_width]
    table: CudaRowTable[Tensor],
    scratch: Scratch,
    mixed: Tensor,  # as query
    scale: float,
) -> None:
    """Attend as `tree_attention.attend` does."""
    _, pages, _, stride_pages = kept.prefix_arguments()
    strides, scale_log2 = kept.keys.stride()[:3], scale * SCALE_TO_LOG2
    wide_prefix_split[(resident_programs(query.device, 1),)](  # shared memory allows no second
        query, kept.keys, kept.values, pages, scratch.output, scratch.lse, table.groups,
        len(table.groups), scale_log2, *strides, stride_pages,
        PAGE=kept.prefix_constants()["PAGE"], **shape.prefix_constants(kept.keys.dtype),
    )  # fmt: skip
    wide_tail_merge[(shape.num_rows, shape.num_kv_heads, WIDE_STRIPES)](
        query, kept.keys, kept.values, scratch.output, scratch.lse, mixed, table.rows, table.tail_slots, scale_log2,
        *strides, **shape.tail_constants(),
    )  # fmt: skip
