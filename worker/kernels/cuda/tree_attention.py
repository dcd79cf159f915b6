"""Triton attention of draft trees: the prefix in splits, then the tail with the tree, then the merge of both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable, PageTable
from swiftbatch.worker.kernels.cuda.kv_kernels import load_codes, load_rows, load_scales
from swiftbatch.worker.kernels.cuda.triton_primitives import dot, rounded
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, HEAD_BLOCKS, MOST_SPLITS, NUM_ROWS
from swiftbatch.worker.kernels.layer_specs import SEES_ALL, AttentionView

LOG2_E = tl.constexpr(1.4426950408889634)
SPLITS = tl.constexpr(MOST_SPLITS)


@triton.jit
def softcapped(scores, SOFTCAP_LOG2: tl.constexpr):
    """Return base-2 scores with a soft cap, also in base 2; 0 means no cap."""
    if SOFTCAP_LOG2 > 0.0:
        power = tl.exp2(tl.minimum(scores * (2 * LOG2_E / SOFTCAP_LOG2), 126.0))
        return SOFTCAP_LOG2 - 2 * SOFTCAP_LOG2 / (power + 1)
    return scores


@triton.jit
def blocks_of(boundary, LEAST_BLOCKS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first and the end block that at least one row after `boundary` sees, and the blocks per split.

    All follow from positions alone. A prefix with biases may end within a block.
    """
    first_block = 0
    if WINDOW:
        first_block = tl.maximum(boundary - WINDOW + 1, 0) // BLOCK
    end = tl.cdiv(boundary, BLOCK)
    return first_block, end, tl.maximum(tl.cdiv(end - first_block, SPLITS), LEAST_BLOCKS)


@triton.jit
def splits_of_groups(
    groups_ptr, num_groups, MOST_GROUPS: tl.constexpr, LEAST_BLOCKS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the number of splits of every group's prefix, `[MOST_GROUPS]`; padding has none."""
    groups = tl.arange(0, MOST_GROUPS)
    is_group = groups < num_groups
    num_rows = tl.load(groups_ptr + groups * 4 + 2, mask=is_group, other=0)
    boundaries = tl.load(groups_ptr + groups * 4 + 3, mask=is_group, other=0)
    first_blocks, ends, split_blocks = blocks_of(boundaries, LEAST_BLOCKS, WINDOW, BLOCK)
    return tl.where(num_rows > 0, tl.cdiv(ends - first_blocks, split_blocks), 0)


@triton.jit
def split_at(place, splits_of_group, ends):
    """Return the group and its split at a place among all groups' splits, which end at `ends [most_groups]`."""
    is_before = ends <= place
    return tl.sum(is_before.to(tl.int32), 0), place - tl.sum(tl.where(is_before, splits_of_group, 0), 0)


@triton.jit
def attend_block(
    query, key_ptr, value_ptr, places, bias, unseen, scale_log2, highest, total, acc_first, acc_second,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP_LOG2: tl.constexpr,
):  # fmt: skip
    """Take one step of online softmax over keys and values at `places [keys, 1]`.

    With a window, a row does not see the first `unseen [rows]` keys.
    """
    whole = tl.arange(0, WIDTH)
    first = tl.arange(0, HALF)
    second = HALF + first
    padded: tl.constexpr = VALUE_DIM < 2 * HALF
    seen = bias > float("-inf")  # hidden entries may contain anything, also NaN
    keys = load_codes(key_ptr + places, seen, whole, HEAD_DIM, HAS_BIAS or HEAD_DIM < WIDTH, query.dtype)
    factors = load_scales(key_ptr + places, seen, HEAD_DIM, HAS_BIAS) * scale_log2
    scores = dot(query, tl.trans(keys), tl.zeros([query.shape[0], keys.shape[0]], tl.float32)) * factors[None, :]
    scores = softcapped(scores, SOFTCAP_LOG2)
    if HAS_BIAS:
        scores += (bias * LOG2_E)[None, :]
    if WINDOW:
        scores = tl.where(tl.arange(0, keys.shape[0])[None, :] >= unseen[:, None], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    known = new_highest
    if WINDOW:
        known = tl.where(new_highest > float("-inf"), new_highest, 0.0)  # a row may have seen nothing so far
    probabilities = tl.exp2(scores - known[:, None])
    decay = tl.exp2(highest - known)
    total = total * decay + tl.sum(probabilities, 1)
    values_first = load_codes(value_ptr + places, seen, first, VALUE_DIM, HAS_BIAS, query.dtype)
    values_second = load_codes(value_ptr + places, seen, second, VALUE_DIM, HAS_BIAS or padded, query.dtype)
    probabilities *= load_scales(value_ptr + places, seen, HEAD_DIM, HAS_BIAS)[None, :]
    probabilities = rounded(probabilities, values_first.dtype).to(values_first.dtype)
    acc_first = dot(probabilities, values_first, acc_first * decay[:, None])
    acc_second = dot(probabilities, values_second, acc_second * decay[:, None])
    return new_highest, total, acc_first, acc_second


@triton.jit
def places_of(block, slot, pages_ptr, stride_pages, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """Return the places of a block's entries, looked up in the slot's row of `pages_ptr` if the cache has pages."""
    entries = block * BLOCK + tl.arange(0, BLOCK)
    kept = entries
    if PAGE:
        page = tl.load(pages_ptr + slot * stride_pages + block * BLOCK // PAGE)
        kept = page * PAGE + entries % PAGE
    return entries, kept.to(tl.int64)


@triton.jit
def store_split(
    output_ptr, lse_ptr, row_head, is_real, highest, total, acc_first, acc_second,
    VALUE_DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Store the normalised output and LSE of rows at the indices `row_head` of a split."""
    first = tl.arange(0, HALF)
    output_ptr += row_head[:, None] * VALUE_DIM + first[None, :]
    tl.store(output_ptr, acc_first / total[:, None], mask=is_real[:, None])
    is_place = is_real[:, None] & (HALF + first < VALUE_DIM)[None, :]
    tl.store(output_ptr + HALF, acc_second / total[:, None], mask=is_place)
    tl.store(lse_ptr + row_head, highest + tl.log2(total), mask=is_real)


@triton.jit
def attend_blocks(
    query, key_ptr, value_ptr, bias_ptr, pages_ptr, cache, slot, start, end, boundary, first_seen,
    scale_log2, stride_entry, stride_bias, stride_pages,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP_LOG2: tl.constexpr, TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attend to blocks `start` to `end`; return highest score, total, and both halves of the sum."""
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    # Two accumulators, no wider than high: for sm_80 Triton lays warps along the longer side of a chained dot, and
    # along the keys every block's probabilities would pass through shared memory.
    acc_first = tl.zeros([TILE_ROWS, HALF], tl.float32)
    acc_second = tl.zeros([TILE_ROWS, HALF], tl.float32)
    for block in range(start, end):
        entries, kept = places_of(block, slot, pages_ptr, stride_pages, BLOCK, PAGE)
        places = cache + kept[:, None] * stride_entry
        bias = tl.zeros([BLOCK], tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + slot * stride_bias + entries, mask=entries < boundary, other=float("-inf"))
        highest, total, acc_first, acc_second = attend_block(
            query, key_ptr, value_ptr, places, bias, first_seen - block * BLOCK, scale_log2, highest, total,
            acc_first, acc_second, HEAD_DIM, WIDTH, VALUE_DIM, HALF, HAS_BIAS, WINDOW, SOFTCAP_LOG2,
        )  # fmt: skip
    if WINDOW:
        total = tl.where(total > 0.0, total, 1.0)  # a row that sees nothing here gets LSE -inf and output 0
    return highest, total, acc_first, acc_second


@triton.jit
def rows_of_group(
    first_row, num_rows, kv_head, num_heads: tl.constexpr, HEADS_PER_KV: tl.constexpr, TILE_ROWS: tl.constexpr
):
    """Return the query indices within a group, a mask that is False for padding, and the indices of rows and heads."""
    index = tl.arange(0, TILE_ROWS)
    is_real = index // HEADS_PER_KV < num_rows
    row_head = (first_row + index // HEADS_PER_KV) * num_heads + kv_head * HEADS_PER_KV + index % HEADS_PER_KV
    return index, is_real, row_head


@triton.jit(do_not_specialize=["num_groups"])
def prefix_split(
    query_ptr, key_ptr, value_ptr, bias_ptr, pages_ptr, output_ptr, lse_ptr, groups_ptr, rows_ptr,
    num_groups, scale_log2, stride_slot, stride_head, stride_entry, stride_bias, stride_pages,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP_LOG2: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Each program takes every n-th split and KV head: attends to the split's keys, and stores output and LSE."""
    splits_of_group = splits_of_groups(groups_ptr, num_groups, NUM_ROWS, LEAST_BLOCKS, WINDOW, BLOCK)
    ends = tl.cumsum(splits_of_group, 0)
    own, num_programs = tl.program_id(0), tl.num_programs(0)
    for turn in tl.range(0, tl.cdiv(tl.sum(splits_of_group, 0) * NUM_KV_HEADS - own, num_programs), disable_licm=True):
        item = own + turn * num_programs
        group, split = split_at(item // NUM_KV_HEADS, splits_of_group, ends)
        attend_split(
            query_ptr, key_ptr, value_ptr, bias_ptr, pages_ptr, output_ptr, lse_ptr, groups_ptr + group * 4,
            rows_ptr, split, item % NUM_KV_HEADS,
            scale_log2, stride_slot, stride_head, stride_entry, stride_bias, stride_pages,
            NUM_ROWS, NUM_KV_HEADS, HEADS_PER_KV, HEAD_DIM, LEAST_BLOCKS, HAS_BIAS, TILE_ROWS, BLOCK, WIDTH,
            VALUE_DIM, HALF, WINDOW, SOFTCAP_LOG2, PAGE,
        )  # fmt: skip


@triton.jit
def attend_split(
    query_ptr, key_ptr, value_ptr, bias_ptr, pages_ptr, output_ptr, lse_ptr, group_ptr, rows_ptr, split, kv_head,
    scale_log2, stride_slot, stride_head, stride_entry, stride_bias, stride_pages,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP_LOG2: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attend with a group's rows to one split of their prefix."""
    slot = tl.load(group_ptr).to(tl.int64)
    first_row = tl.load(group_ptr + 1)
    num_rows = tl.load(group_ptr + 2)
    boundary = tl.load(group_ptr + 3)
    first_block, end, split_blocks = blocks_of(boundary, LEAST_BLOCKS, WINDOW, BLOCK)
    start = first_block + split * split_blocks
    end = tl.minimum(start + split_blocks, end)
    num_heads: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV
    index, is_real, row_head = rows_of_group(first_row, num_rows, kv_head, num_heads, HEADS_PER_KV, TILE_ROWS)
    columns = tl.arange(0, WIDTH)
    query = load_rows(query_ptr + row_head[:, None] * HEAD_DIM + columns[None, :], is_real, columns, HEAD_DIM, True)
    cache = slot * stride_slot + kv_head.to(tl.int64) * stride_head
    first_seen = index
    if WINDOW:
        tail_lengths = tl.load(rows_ptr + (first_row + index // HEADS_PER_KV) * 5 + 2, mask=is_real, other=WINDOW)
        first_seen = boundary + tail_lengths - WINDOW
    highest, total, acc_first, acc_second = attend_blocks(
        query, key_ptr, value_ptr, bias_ptr, pages_ptr, cache, slot, start, end, boundary, first_seen,
        scale_log2, stride_entry, stride_bias, stride_pages,
        HEAD_DIM, WIDTH, VALUE_DIM, HALF, HAS_BIAS, WINDOW, SOFTCAP_LOG2, TILE_ROWS, BLOCK, PAGE,
    )  # fmt: skip
    row_head += split * (NUM_ROWS * num_heads)
    store_split(output_ptr, lse_ptr, row_head, is_real, highest, total, acc_first, acc_second, VALUE_DIM, HALF)


# Attention to the tails of rows, and their merge with prefixes: the second of two launches.


MERGE_STAGES = tl.constexpr(4)  # splits are loaded ahead, since their copies would otherwise wait for each other


@triton.jit
def merge_split(output_ptr, lse_ptr, row_head, is_real, highest, total, acc, columns, VALUE_DIM: tl.constexpr):
    part = load_rows(output_ptr + row_head[:, None] * VALUE_DIM + columns[None, :], is_real, columns, VALUE_DIM, True)
    lse = tl.load(lse_ptr + row_head, mask=is_real, other=0.0)
    return merge_part(part, lse, highest, total, acc)


@triton.jit
def merge_part(part, lse, highest, total, acc):
    """Merge a normalised output `[rows, columns]` and its LSE `[rows]`, base 2."""
    new_highest = tl.maximum(highest, lse)
    weight = tl.exp2(lse - new_highest)
    decay = tl.exp2(highest - new_highest)
    return new_highest, total * decay + weight, acc * decay[:, None] + part * weight[:, None]


@triton.jit
def attend_tail(
    query, key_ptr, value_ptr, tail_slots_ptr, tail_length, columns, of_values, scale_log2, stride_entry,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr = 0,
    SOFTCAP_LOG2: tl.constexpr = 0.0,
):  # fmt: skip
    """Attend to the tail with a row's heads; return highest scores, totals, and unnormalised values.

    Keys have `columns`, values the columns `of_values`.
    """
    n = tl.arange(0, BLOCK)
    seen = n < tail_length  # masks values too: 0 times the NaN of an unused entry is NaN
    if WINDOW:
        seen = seen & (n >= tail_length - WINDOW)
    places = tl.load(tail_slots_ptr + n).to(tl.int64)[:, None] * stride_entry
    keys = load_codes(key_ptr + places, seen, columns, HEAD_DIM, True, query.dtype)
    factors = load_scales(key_ptr + places, seen, HEAD_DIM, True) * scale_log2
    scores = dot(query, tl.trans(keys), tl.zeros([query.shape[0], BLOCK], tl.float32)) * factors[None, :]
    scores = tl.where(seen[None, :], softcapped(scores, SOFTCAP_LOG2), float("-inf"))
    highest = tl.max(scores, 1)
    probabilities = tl.exp2(scores - highest[:, None])
    total = tl.sum(probabilities, 1)
    values = load_codes(value_ptr + places, seen, of_values, VALUE_DIM, True, query.dtype)
    probabilities *= load_scales(value_ptr + places, seen, HEAD_DIM, True)[None, :]
    probabilities = rounded(probabilities, values.dtype).to(values.dtype)
    return highest, total, dot(probabilities, values, tl.zeros([query.shape[0], values.shape[1]], tl.float32))


@triton.jit
def tail_merge(
    query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr, mixed_ptr, rows_ptr, tail_slots_ptr, sinks_ptr,
    scale_log2, stride_slot, stride_head, stride_entry,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP_LOG2: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head): merges the row's tail, a sink, then the splits of its prefix in order."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = tl.load(rows_ptr + row * 5).to(tl.int64)
    boundary = tl.load(rows_ptr + row * 5 + 1)
    tail_length = tl.load(rows_ptr + row * 5 + 2)
    if tail_length == 0:
        return

    num_heads: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV
    index = tl.arange(0, TILE_ROWS)
    is_real = index < HEADS_PER_KV
    row_head = row * num_heads + kv_head * HEADS_PER_KV + index
    columns, of_values = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    query = load_rows(query_ptr + row_head[:, None] * HEAD_DIM + columns[None, :], is_real, columns, HEAD_DIM, True)
    cache = slot * stride_slot + kv_head.to(tl.int64) * stride_head
    highest, total, acc = attend_tail(
        query, key_ptr + cache, value_ptr + cache, tail_slots_ptr + row * BLOCK, tail_length, columns, of_values,
        scale_log2, stride_entry, HEAD_DIM, VALUE_DIM, BLOCK, WINDOW, SOFTCAP_LOG2,
    )  # fmt: skip
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + kv_head * HEADS_PER_KV + index, mask=is_real, other=0.0) * LOG2_E
        new_highest = tl.maximum(highest, sinks)
        decay = tl.exp2(highest - new_highest)
        highest, total, acc = new_highest, total * decay + tl.exp2(sinks - new_highest), acc * decay[:, None]

    first_block, end, split_blocks = blocks_of(boundary, LEAST_BLOCKS, WINDOW, BLOCK)
    for split in tl.range(0, tl.cdiv(end - first_block, split_blocks), num_stages=MERGE_STAGES):
        place = split * (NUM_ROWS * num_heads) + row_head
        highest, total, acc = merge_split(
            output_ptr, lse_ptr, place, is_real, highest, total, acc, of_values, VALUE_DIM
        )  # fmt: skip
    is_place = is_real[:, None] & (of_values < VALUE_DIM)[None, :]
    mixed_ptr += row_head[:, None] * VALUE_DIM + of_values[None, :]
    tl.store(mixed_ptr, rounded(acc / total[:, None], mixed_ptr.dtype.element_ty), mask=is_place)


# Attention of draft-tree rows over long caches: two launches per layer for all sequences, with exact rows.


SCALE_TO_LOG2 = math.log2(math.e)
TAIL_TILE_ROWS = 16  # the most query heads per KV head; tensor cores support no fewer rows
PROGRAMS = 2  # of `prefix_split` on a multiprocessor: shared memory allows no more
WIDEST_FOR_THREE_STAGES = 128  # at two stages the loop waits for each page number; wider blocks have no third buffer
WIDEST_FOR_FOUR_WARPS = 128  # accumulators of wider heads need more registers


@dataclass(frozen=True)
class Scratch:
    """Partial results of prefixes, in buffers that all layers share because layers run in turn."""

    output: Tensor  # [most_splits, num_rows, num_heads, value_dim] float32
    lse: Tensor  # [most_splits, num_rows, num_heads] float32, base 2

    @classmethod
    def empty(cls, num_splits: int, num_heads: int, value_dim: int, device: torch.device, num_rows: int) -> Scratch:
        size = (num_splits, num_rows, num_heads)
        return cls(torch.empty(*size, value_dim, device=device), torch.empty(size, device=device))

    def narrowed(self, num_rows: int, value_dim: int | None = None) -> Scratch:
        """Return results of fewer rows, or of narrower heads, in the same memory."""
        shape = (len(self.lse), num_rows, self.lse.shape[2])
        output = (*shape, self.output.shape[3] if value_dim is None else value_dim)
        return Scratch(first_of(self.output, *output), first_of(self.lse, *shape))


def first_of(buffer: Tensor, *shape: int) -> Tensor:
    """Return a view of a buffer's first numbers in another shape."""
    return buffer.flatten()[: math.prod(shape)].view(shape)


def resident_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Return how many programs run at the same time; together they walk all splits, so that none begins in vain."""
    is_gpu = device.type == "cuda"
    return per_multiprocessor * (torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1)


@dataclass(frozen=True)
class AttentionShape:
    """Sizes for which a run's attention kernels are compiled."""

    num_kv_heads: int
    heads_per_kv: int  # 1 to 16
    head_dim: int
    dtype: torch.dtype
    num_rows: int = NUM_ROWS
    narrow_values: int = 0  # width of a head's values; 0: that of its keys
    num_stages: int = 0  # of the loop over a prefix; 0: as shared memory allows; no bit depends on it

    def __post_init__(self) -> None:
        """Raise ValueError for more query heads per KV head than `tail_merge` supports."""
        if self.heads_per_kv > TAIL_TILE_ROWS:
            raise ValueError(f"found {self.heads_per_kv} query heads a KV head, expected at most {TAIL_TILE_ROWS}")

    @property
    def value_dim(self) -> int:
        return self.narrow_values or self.head_dim

    @property
    def tile_rows(self) -> int:
        """Return the tile height: rows times query heads per KV head.

        It is 64 in bfloat16 because wgmma on sm_90 needs 64 rows.
        """
        return 64 if self.dtype == torch.bfloat16 else 16

    @property
    def rows_per_group(self) -> int:
        """Return the rows of a sequence that share a tile; a tile reads each key once."""
        return self.tile_rows // self.heads_per_kv

    def prefix_constants(self, view: AttentionView = SEES_ALL) -> dict[str, Any]:
        """Return constants, warps and stages of `prefix_split`."""
        bf16_warps = 4 if self.value_dim <= WIDEST_FOR_FOUR_WARPS else 8
        return {
            **self._sizes(),
            **_seen(view),
            "TILE_ROWS": self.tile_rows,
            "HALF": triton.next_power_of_2(self.value_dim) // 2,
            "num_warps": bf16_warps if self.dtype == torch.bfloat16 else 16,
            "num_stages": self.num_stages or (3 if self.head_dim <= WIDEST_FOR_THREE_STAGES else 2),
        }

    def tail_constants(self, view: AttentionView = SEES_ALL) -> dict[str, Any]:
        """Return constants, warps and stages of `tail_merge`."""
        return {
            **self._sizes(),
            **_seen(view),
            "HAS_SINKS": view.sinks is not None,
            "TILE_ROWS": TAIL_TILE_ROWS,
            "VALUE_WIDTH": triton.next_power_of_2(self.value_dim),
            "num_warps": 4 if self.dtype == torch.bfloat16 else 8,
            "num_stages": 1,
        }

    def _sizes(self) -> dict[str, int]:
        return {
            "NUM_ROWS": self.num_rows,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEADS_PER_KV": self.heads_per_kv,
            "HEAD_DIM": self.head_dim,
            "WIDTH": triton.next_power_of_2(self.head_dim),
            "VALUE_DIM": self.value_dim,
            "LEAST_BLOCKS": HEAD_BLOCKS,
            "BLOCK": BLOCK,
        }


def _seen(view: AttentionView) -> dict[str, Any]:
    return {"WINDOW": view.window or 0, "SOFTCAP_LOG2": (view.softcap or 0.0) * SCALE_TO_LOG2}


@dataclass(frozen=True)
class KeptLayer:
    """Keys and values of one layer of an arena, and which of them its rows see."""

    keys: Tensor  # [num_slots, num_kv_heads, capacity, row_width]
    values: Tensor  # as keys, with the same strides; in latent attention the keys themselves
    bias: Tensor | None = None  # [num_slots, capacity] float32, added to scores of the prefix; -inf hides an entry
    view: AttentionView = SEES_ALL  # has sinks in float32, on the device
    pages: PageTable | None = None  # None if each slot's entries are contiguous
    index_cache: tuple[Tensor, Tensor] | None = None  # one head of each, of an indexer of blocks

    def prefix_arguments(self) -> tuple[Tensor | None, Tensor | None, int, int]:
        """Return what kernels of prefixes take: biases, pages, and the strides of both."""
        bias, pages = self.bias, None if self.pages is None else self.pages.numbers
        return bias, pages, 0 if bias is None else bias.stride(0), 0 if pages is None else pages.stride(0)

    @property
    def page(self) -> int:
        """Return the entries per page, or 0 without pages."""
        return 0 if self.pages is None else self.pages.page

    def prefix_constants(self) -> dict[str, Any]:
        return {"HAS_BIAS": self.bias is not None, "PAGE": self.page}


def attend(
    shape: AttentionShape,
    query: Tensor,  # [num_rows, num_heads, head_dim], contiguous
    kept: KeptLayer,
    table: CudaRowTable[Tensor],
    scratch: Scratch,
    mixed: Tensor,  # whose first numbers become [num_rows, num_heads, value_dim]
    scale: float,
) -> None:
    """Attend with each row's heads to the entries that the row sees.

    Leaves padding rows unchanged, allocates nothing.
    """
    bias, pages, *strides = kept.prefix_arguments()
    prefix_split[(resident_programs(query.device, PROGRAMS),)](
        query, kept.keys, kept.values, bias, pages, scratch.output, scratch.lse, table.groups, table.rows,
        len(table.groups), scale * SCALE_TO_LOG2, *kept.keys.stride()[:3], *strides,
        **kept.prefix_constants(), **shape.prefix_constants(kept.view),
    )  # fmt: skip
    tail_merge[(shape.num_rows, shape.num_kv_heads)](
        query, kept.keys, kept.values, scratch.output, scratch.lse, mixed, table.rows, table.tail_slots,
        kept.view.sinks, scale * SCALE_TO_LOG2, *kept.keys.stride()[:3], **shape.tail_constants(kept.view),
    )  # fmt: skip
