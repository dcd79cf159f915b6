"""Attention over caches that hold latent vectors, in two launches a layer as `tree_attention.py` has it.

A position's entry is one row: the latent vector, which is the value of all heads, and behind it the turned part of the
keys. So a row that was read serves as key and as value. Scores are sums over parts of the vector, then over the turned
part, always in this order. Heads of a row fill tiles as rows do: none of them meets another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_row_table import BLOCK, CudaRowTable, PageTable
from swiftbatch.worker.kernels.cuda.kv_buffers import load_rows
from swiftbatch.worker.kernels.cuda.prefix_attention import LOG2_E as LOG2_OF_E
from swiftbatch.worker.kernels.cuda.prefix_attention import split_blocks
from swiftbatch.worker.kernels.cuda.rounding import dot, rounded
from swiftbatch.worker.kernels.cuda.tail_attention import merge_split
from swiftbatch.worker.kernels.cuda.tree_attention import LOG2_E, TAIL_TILE_ROWS, Scratch
from swiftbatch.worker.kernels.kernel_sizes import BLOCK_DEPTH, LANES, NUM_ROWS, LatentSizes, least_blocks

LEAST_DEPTH = LANES  # of a product of tensor cores


@dataclass(frozen=True)
class LatentShape:
    """The sizes that a run's kernels of latent attention are compiled for."""

    num_heads: int
    latent: LatentSizes
    num_splits: int  # that a prefix is cut into
    dtype: torch.dtype
    num_rows: int = NUM_ROWS  # of a forward

    @property
    def tile_rows(self) -> int:
        """Heads of rows in a program. Float32 is no matter for tensor cores."""
        return 64 if self.dtype == torch.bfloat16 else 16

    @property
    def rows_per_group(self) -> int:
        """Rows of a sequence whose heads fill one tile; of one row they may fill several."""
        return max(1, self.tile_rows // self.num_heads)

    @property
    def num_tiles(self) -> int:
        """Tiles of a group."""
        return -(-self.num_heads // self.tile_rows)

    def prefix_constants(self) -> dict[str, Any]:
        """Return the constants of `latent_prefix_split`, with its warps and stages."""
        return {
            **self._sizes(),
            "TILE_ROWS": self.tile_rows,
            "NUM_TILES": self.num_tiles,
            "KEYS": 32 if self.dtype == torch.bfloat16 else 16,
            "HALF": max(LEAST_DEPTH, triton.next_power_of_2(self.latent.rank) // 2),
            "num_warps": 8,
            "num_stages": 2,
        }

    def tail_constants(self) -> dict[str, Any]:
        """Return the constants of `latent_tail_merge`, with its warps and stages."""
        return {
            **self._sizes(),
            "TILE_ROWS": TAIL_TILE_ROWS,
            "DEPTH": self.tail_depth,
            "num_warps": 4 if self.dtype == torch.bfloat16 else 8,
            "num_stages": 2,
        }

    @property
    def tail_depth(self) -> int:
        """Numbers of a latent vector that a program of `latent_tail_merge` mixes."""
        return min(
            BLOCK_DEPTH if self.dtype == torch.bfloat16 else BLOCK_DEPTH // 4, 1 << (self.latent.rank - 1).bit_length()
        )

    def _sizes(self) -> dict[str, int]:
        return {
            "NUM_ROWS": self.num_rows,
            "NUM_HEADS": self.num_heads,
            "RANK": self.latent.rank,
            "TURNED": self.latent.turned_dim,
            "SPUN": triton.next_power_of_2(self.latent.turned_dim),
            "NUM_SPLITS": self.num_splits,
            "LEAST_BLOCKS": least_blocks(self.num_rows),
            "BLOCK": BLOCK,
        }


@triton.jit
def latent_block(
    query_first, query_second, query_turned, entry_ptr, bias, scale_log2, highest, total, acc_first, acc_second,
    RANK: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, SPUN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One step of online softmax over the entries that begin at `entry_ptr [keys, 1]`."""
    first, spun = tl.arange(0, HALF), tl.arange(0, SPUN)
    seen = bias > float("-inf")  # nothing is said of what lies in the other entries
    rows_first = load_rows(entry_ptr + first[None, :], seen, first, RANK, HAS_BIAS or HALF > RANK)
    rows_second = load_rows(entry_ptr + HALF + first[None, :], seen, HALF + first, RANK, HAS_BIAS or 2 * HALF > RANK)
    rows_turned = load_rows(entry_ptr + RANK + spun[None, :], seen, spun, TURNED, HAS_BIAS or SPUN > TURNED)
    scores = dot(query_first, tl.trans(rows_first), tl.zeros([query_first.shape[0], bias.shape[0]], tl.float32))
    scores = dot(query_second, tl.trans(rows_second), scores)
    scores = dot(query_turned, tl.trans(rows_turned), scores) * scale_log2
    if HAS_BIAS:
        scores += (bias * LOG2_OF_E)[None, :]
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    probabilities = tl.exp2(scores - new_highest[:, None])
    decay = tl.exp2(highest - new_highest)
    total = total * decay + tl.sum(probabilities, 1)
    probabilities = rounded(probabilities, rows_first.dtype).to(rows_first.dtype)
    acc_first = dot(probabilities, rows_first, acc_first * decay[:, None])
    acc_second = dot(probabilities, rows_second, acc_second * decay[:, None])
    return new_highest, total, acc_first, acc_second


@triton.jit
def latent_prefix_split(
    query_ptr, kept_ptr, bias_ptr, pages_ptr, output_ptr, lse_ptr, groups_ptr,
    scale_log2, stride_slot, stride_entry, stride_bias, stride_pages,
    NUM_ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, RANK: tl.constexpr, TURNED: tl.constexpr,
    NUM_SPLITS: tl.constexpr, LEAST_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr,
    NUM_TILES: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, SPUN: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Program (group and tile of its heads, split): as `prefix_split`, `KEYS` entries at a time."""
    group_ptr = groups_ptr + tl.program_id(0) // NUM_TILES * 4
    split = tl.program_id(1)
    slot = tl.load(group_ptr).to(tl.int64)
    num_rows = tl.load(group_ptr + 2)
    boundary = tl.load(group_ptr + 3)
    num_blocks = tl.cdiv(boundary, BLOCK)
    blocks_per_split = split_blocks(num_blocks, NUM_SPLITS, LEAST_BLOCKS)
    start = split * blocks_per_split
    end = tl.minimum(start + blocks_per_split, num_blocks)
    if (start >= end) | (num_rows == 0):
        return

    place = tl.program_id(0) % NUM_TILES * TILE_ROWS + tl.arange(0, TILE_ROWS)  # of a head among those of the rows
    is_real = place < num_rows * NUM_HEADS
    row_head = tl.load(group_ptr + 1) * NUM_HEADS + place
    first, spun = tl.arange(0, HALF), tl.arange(0, SPUN)
    query_ptr += row_head[:, None] * (RANK + TURNED)
    query_first = load_rows(query_ptr + first[None, :], is_real, first, RANK, True)
    query_second = load_rows(query_ptr + HALF + first[None, :], is_real, HALF + first, RANK, True)
    query_turned = load_rows(query_ptr + RANK + spun[None, :], is_real, spun, TURNED, True)
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc_first = tl.zeros([TILE_ROWS, HALF], tl.float32)
    acc_second = tl.zeros([TILE_ROWS, HALF], tl.float32)
    for part in range(start * (BLOCK // KEYS), end * (BLOCK // KEYS)):
        entries = part * KEYS + tl.arange(0, KEYS)
        kept = entries
        if PAGE:
            page = tl.load(pages_ptr + slot * stride_pages + part * KEYS // PAGE)
            kept = page * PAGE + entries % PAGE
        entry_ptr = kept_ptr + slot * stride_slot + kept.to(tl.int64)[:, None] * stride_entry
        bias = tl.zeros([KEYS], tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + slot * stride_bias + entries, mask=entries < boundary, other=float("-inf"))
        highest, total, acc_first, acc_second = latent_block(
            query_first, query_second, query_turned, entry_ptr, bias, scale_log2, highest, total,
            acc_first, acc_second, RANK, TURNED, HALF, SPUN, HAS_BIAS,
        )  # fmt: skip

    row_head += split * (NUM_ROWS * NUM_HEADS)
    output_ptr += row_head[:, None] * RANK + first[None, :]
    tl.store(output_ptr, acc_first / total[:, None], mask=is_real[:, None] & (first < RANK)[None, :])
    tl.store(output_ptr + HALF, acc_second / total[:, None], mask=is_real[:, None] & (HALF + first < RANK)[None, :])
    tl.store(lse_ptr + row_head, highest + tl.log2(total), mask=is_real)


@triton.jit
def latent_tail_merge(
    query_ptr, kept_ptr, output_ptr, lse_ptr, mixed_ptr, rows_ptr, tail_slots_ptr,
    scale_log2, stride_slot, stride_entry,
    NUM_ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, RANK: tl.constexpr, TURNED: tl.constexpr,
    NUM_SPLITS: tl.constexpr, LEAST_BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, SPUN: tl.constexpr,
):  # fmt: skip
    """Program (row, heads, part of their values): the row's tail, and behind it the splits of its prefix in order."""
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row * 5).to(tl.int64)
    num_blocks = tl.cdiv(tl.load(rows_ptr + row * 5 + 1), BLOCK)
    tail_length = tl.load(rows_ptr + row * 5 + 2)
    if tail_length == 0:
        return

    head = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_real = head < NUM_HEADS
    row_head = row * NUM_HEADS + head
    n, depth, spun = tl.arange(0, BLOCK), tl.arange(0, DEPTH), tl.arange(0, SPUN)
    seen = n < tail_length
    entries = tl.load(tail_slots_ptr + row * BLOCK + n).to(tl.int64)
    entry_ptr = kept_ptr + slot * stride_slot + entries[:, None] * stride_entry
    query_ptr += row_head[:, None] * (RANK + TURNED)
    scores = tl.zeros([TILE_ROWS, BLOCK], tl.float32)
    for start in range(0, RANK, DEPTH):
        query = load_rows(query_ptr + start + depth[None, :], is_real, start + depth, RANK, True)
        keys = load_rows(entry_ptr + start + depth[None, :], seen, start + depth, RANK, True)
        scores = dot(query, tl.trans(keys), scores)
    query = load_rows(query_ptr + RANK + spun[None, :], is_real, spun, TURNED, True)
    keys = load_rows(entry_ptr + RANK + spun[None, :], seen, spun, TURNED, True)
    scores = dot(query, tl.trans(keys), scores) * scale_log2
    scores = tl.where(seen[None, :], scores, float("-inf"))
    highest = tl.max(scores, 1)
    probabilities = tl.exp2(scores - highest[:, None])
    total = tl.sum(probabilities, 1)
    columns = tl.program_id(2) * DEPTH + depth
    values = load_rows(entry_ptr + columns[None, :], seen, columns, RANK, True)
    probabilities = rounded(probabilities, values.dtype).to(values.dtype)
    acc = dot(probabilities, values, tl.zeros([TILE_ROWS, DEPTH], tl.float32))

    blocks_per_split = split_blocks(num_blocks, NUM_SPLITS, LEAST_BLOCKS)
    for split in range(0, tl.cdiv(num_blocks, tl.maximum(blocks_per_split, 1))):
        place = split * (NUM_ROWS * NUM_HEADS) + row_head
        highest, total, acc = merge_split(output_ptr, lse_ptr, place, is_real, highest, total, acc, columns, RANK)
    is_place = is_real[:, None] & (columns < RANK)[None, :]
    mixed_ptr += row_head[:, None] * RANK + columns[None, :]
    tl.store(mixed_ptr, rounded(acc / total[:, None], mixed_ptr.dtype.element_ty), mask=is_place)


def attend_to_latents(
    shape: LatentShape,
    query: Tensor,  # [num_rows, num_heads, entry_dim]
    kept: Tensor,  # [num_slots, 1, capacity, entry_dim], one layer of the arena
    bias: Tensor | None,  # [num_slots, capacity] float32, as `attend` takes it
    table: CudaRowTable[Tensor],
    scratch: Scratch,
    mixed: Tensor,  # [num_rows, num_heads, rank]
    scale: float,
    pages: PageTable | None = None,
) -> None:
    """Mix each row's heads from what it may see. Padding rows stay as they are. Nothing is allocated."""
    scale_log2, strides = scale * LOG2_E, (kept.stride(0), kept.stride(2))
    latent_prefix_split[(len(table.groups) * shape.num_tiles, shape.num_splits)](
        query, kept, bias, None if pages is None else pages.numbers, scratch.output, scratch.lse, table.groups,
        scale_log2, *strides, 0 if bias is None else bias.stride(0), 0 if pages is None else pages.numbers.stride(0),
        HAS_BIAS=bias is not None, PAGE=0 if pages is None else pages.page, **shape.prefix_constants(),
    )  # fmt: skip
    constants = shape.tail_constants()
    num_parts = triton.cdiv(shape.latent.rank, shape.tail_depth)
    latent_tail_merge[(shape.num_rows, triton.cdiv(shape.num_heads, TAIL_TILE_ROWS), num_parts)](
        query, kept, scratch.output, scratch.lse, mixed, table.rows, table.tail_slots, scale_log2, *strides, **constants
    )
