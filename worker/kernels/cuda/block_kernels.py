"""Triton kernels of indexers of blocks (MiniMax M3): scores of blocks, and each row's list of the best.

Each head of keys has a list of its own, of pages with `BLOCK` entries. Attention reads it as if the row, with this head
alone, were a row of its own. Scores are float32, and of equal ones the lower block is chosen.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable, PageTable
from swiftbatch.worker.kernels.cuda.indexer_kernels import next_digit, score_orders
from swiftbatch.worker.kernels.cuda.kv_kernels import in_pool, load_rows
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape, KeptLayer, Scratch, attend, first_of
from swiftbatch.worker.kernels.cuda.triton_primitives import dot
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, LANES, BlockChoice

SPAN = 2048  # positions that a program scores
READ_AT_ONCE = 1024  # scores that the choice reads per step


@triton.jit
def score_blocks(
    query_ptr, keys_ptr, pages_ptr, rows_ptr, scores_ptr, stride_slot, stride_entry, stride_pages, stride_scores,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, TILE_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program (row, blocks): scores blocks in front of the row's own, if the row sees more than it chooses."""
    row = tl.program_id(0).to(tl.int64)
    own, start = tl.load(rows_ptr + row * 5 + 1) // SIZE, tl.program_id(1) * NUM_BLOCKS
    if (tl.load(rows_ptr + row * 5 + 2) == 0) | (own < NUM_CHOSEN) | (start >= own):
        return
    slot, columns = tl.load(rows_ptr + row * 5).to(tl.int64), tl.arange(0, WIDTH)
    keys_ptr += slot * stride_slot
    if PAGE:
        pages_ptr += slot * stride_pages
    head = tl.arange(0, TILE_HEADS)
    is_head = head < NUM_KV_HEADS
    query_ptr += (row * NUM_KV_HEADS + head)[:, None] * HEAD_DIM + columns[None, :]
    query = tl.trans(load_rows(query_ptr, is_head, columns, HEAD_DIM, True))
    scores_ptr += (row * NUM_KV_HEADS + head) * stride_scores
    seen = tl.arange(0, BLOCK) >= 0
    for block in range(start, tl.minimum(start + NUM_BLOCKS, own)):
        score = tl.full([TILE_HEADS], float("-inf"), tl.float32)
        for part in range(SIZE // BLOCK):
            entries = in_pool(block * SIZE + part * BLOCK + tl.arange(0, BLOCK), pages_ptr, seen, PAGE)
            key_ptr = keys_ptr + entries[:, None] * stride_entry + columns[None, :]
            keys = load_rows(key_ptr, seen, columns, HEAD_DIM, HEAD_DIM < WIDTH)
            products = dot(keys, query, tl.zeros([BLOCK, TILE_HEADS], tl.float32))
            score = tl.maximum(score, tl.max(products, 0))
        tl.store(scores_ptr + block, score, mask=is_head)


@triton.jit
def list_blocks(
    scores_ptr, pages_ptr, rows_ptr, tail_slots_ptr, list_ptr, groups_ptr, listed_ptr, ends_ptr,
    slot_entries, head_entries, stride_pages, stride_scores, stride_list,
    NUM_KV_HEADS: tl.constexpr, SIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr, READ_AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head): lists the pages of its chosen blocks in order, then those in front of the row's tail.

    Entries are numbered over all heads of all slots.
    """
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    item = row * NUM_KV_HEADS + kv_head
    slot, boundary = tl.load(rows_ptr + row * 5).to(tl.int64), tl.load(rows_ptr + row * 5 + 1)
    tail_length = tl.load(rows_ptr + row * 5 + 2)
    boundary = tl.where(tail_length > 0, boundary, 0)
    own = boundary // SIZE
    scored = tl.where(own < NUM_CHOSEN, 0, own)
    listed = tl.where(own < NUM_CHOSEN, boundary, (NUM_CHOSEN - 1 - own) * SIZE + boundary)
    tl.store(groups_ptr + item * 4, item.to(tl.int32))
    tl.store(groups_ptr + item * 4 + 1, item.to(tl.int32))
    tl.store(groups_ptr + item * 4 + 2, (tail_length > 0).to(tl.int32))
    tl.store(groups_ptr + item * 4 + 3, listed)
    tl.store(listed_ptr + item * 5, item.to(tl.int32))
    tl.store(listed_ptr + item * 5 + 1, listed)
    tl.store(listed_ptr + item * 5 + 2, tail_length)
    first_entry = slot * slot_entries + kv_head.to(tl.int64) * head_entries
    tail = tl.arange(0, BLOCK)
    ends = tl.load(tail_slots_ptr + row * BLOCK + tail, mask=tail < tail_length, other=0)
    tl.store(ends_ptr + item * BLOCK + tail, (first_entry + ends).to(tl.int32))
    if PAGE:
        pages_ptr += slot * stride_pages
    scores_ptr += item * stride_scores
    list_ptr += item * stride_list
    least, num_equal = tl.full([], 0, tl.uint32), tl.full([], NUM_CHOSEN - 1, tl.int32)
    for step in tl.static_range(4):
        least, num_equal = next_digit(scores_ptr, scored, least, num_equal, 24 - 8 * step, READ_AT_ONCE)
    num_listed, num_met = 0, 0
    for start in range(0, tl.cdiv(boundary, SIZE), READ_AT_ONCE):
        blocks = start + tl.arange(0, READ_AT_ONCE)
        orders, is_scored = score_orders(scores_ptr, blocks, scored), blocks < scored
        is_equal = (is_scored & (orders == least)).to(tl.int32)
        is_early = num_met + tl.cumsum(is_equal, 0) <= num_equal
        is_chosen = (blocks >= scored) | (orders > least) | ((is_equal > 0) & is_early)
        is_chosen = is_chosen & (blocks * SIZE < boundary)
        at = (num_listed + tl.cumsum(is_chosen.to(tl.int32), 0) - 1) * (SIZE // BLOCK)
        for part in range(SIZE // BLOCK):
            places = blocks * SIZE + part * BLOCK
            is_page = is_chosen & (places < boundary)
            entries = first_entry + in_pool(places, pages_ptr, is_page, PAGE)
            tl.store(list_ptr + at + part, (entries // BLOCK).to(tl.int32), mask=is_page)
        num_met += tl.sum(is_equal, 0)
        num_listed += tl.sum(is_chosen.to(tl.int32), 0)


class CudaBlocks:
    """Buffers of indexers of blocks, their launches, and attention to what they choose."""

    def __init__(self, shape: AttentionShape, choice: BlockChoice, capacity: int, device: torch.device) -> None:
        """Take the shape of layers without an indexer. Raises ValueError for heads that attention does not take."""
        self.shape, self.choice = shape, choice
        num_lists = shape.num_rows * shape.num_kv_heads

        def rows(width: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num_lists, width, dtype=dtype, device=device)

        self.queries = rows(shape.head_dim, shape.dtype)
        self.scores = rows(-(-capacity // choice.size), torch.float32)
        self._list = rows(choice.most_attended(capacity) // BLOCK)
        self._groups, self._rows, self._ends = rows(4), rows(5), rows(BLOCK)

    def narrowed(self, num_rows: int) -> CudaBlocks:
        """Return the launches of forwards of fewer rows, in the first rows of the same buffers."""
        other = copy.copy(self)
        other.shape = replace(self.shape, num_rows=num_rows)
        for name in ("queries", "scores", "_list", "_groups", "_rows", "_ends"):
            setattr(other, name, getattr(self, name)[: num_rows * self.shape.num_kv_heads])
        return other

    @property
    def index_queries(self) -> Tensor:
        """Return the index queries, `[num_rows, num_kv_heads, head_dim]`."""
        return self.queries.view(self.shape.num_rows, self.shape.num_kv_heads, self.shape.head_dim)

    def choose(self, kept: KeptLayer, index_keys: Tensor, table: CudaRowTable[Tensor]) -> None:
        """Score blocks by `index_keys [num_slots, 1, capacity, head_dim]`, and list what each row sees."""
        _, pages, _, stride_pages = kept.prefix_arguments()
        constants = score_constants(self.shape, self.choice)
        grid = (self.shape.num_rows, triton.cdiv(self.scores.shape[1], constants["NUM_BLOCKS"]))
        score_blocks[grid](
            self.queries, index_keys, pages, table.rows, self.scores, index_keys.stride(0), index_keys.stride(2),
            stride_pages, self.scores.stride(0), PAGE=kept.page, **constants,
        )  # fmt: skip
        self.list_best(kept, table)

    def list_best(self, kept: KeptLayer, table: CudaRowTable[Tensor]) -> None:
        """List each row's chosen blocks by `scores`. Rows that see few need none."""
        _, pages, _, stride_pages = kept.prefix_arguments()
        list_blocks[(self.shape.num_rows, self.shape.num_kv_heads)](
            self.scores, pages, table.rows, table.tail_slots, self._list, self._groups, self._rows, self._ends,
            *entries_between(kept.keys), stride_pages, self.scores.stride(0), self._list.stride(0),
            PAGE=kept.page, **list_constants(self.shape.num_kv_heads, self.choice),
        )  # fmt: skip

    def chosen(self, kept: KeptLayer, table: CudaRowTable[Tensor]) -> tuple[KeptLayer, CudaRowTable[Tensor]]:
        """Return a layer's cache and the table as attention with one head of keys takes them."""
        strides, num_lists = (0, 0, kept.keys.stride(2), 1), len(self._list)
        keys, values = (each.as_strided((num_lists, 1, 1, each.shape[3]), strides) for each in (kept.keys, kept.values))
        listed = replace(kept, keys=keys, values=values, pages=PageTable(self._list, BLOCK))
        return listed, replace(table, groups=self._groups, rows=self._rows, tail_slots=self._ends)

    def attend(
        self, query: Tensor, kept: KeptLayer, table: CudaRowTable[Tensor], scratch: Scratch, mixed: Tensor, scale: float
    ) -> None:
        """Attend as `tree_attention.attend` does, to the chosen blocks."""
        shape = replace(self.shape, num_kv_heads=1, num_rows=len(self._list))
        rows = (len(self._list), shape.heads_per_kv, shape.head_dim)
        sums = (len(scratch.lse), *rows[:2])
        own = Scratch(first_of(scratch.output, *sums, shape.head_dim), first_of(scratch.lse, *sums))
        attend(shape, query.view(rows), *self.chosen(kept, table), own, mixed.view(rows), scale)


def entries_between(keys: Tensor) -> tuple[int, int]:
    """Return the entries from one slot to the next, and from one head to the next. Raises ValueError for others."""
    found = keys.stride(0) // keys.stride(2), keys.stride(1) // keys.stride(2)
    if any(number % BLOCK for number in found):
        raise ValueError(f"found caches with strides {keys.stride()}, expected whole blocks of {BLOCK} entries")
    return found


def score_constants(shape: AttentionShape, choice: BlockChoice) -> dict[str, Any]:
    """Return constants, warps and stages of `score_blocks`."""
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "SIZE": choice.size,
        "NUM_CHOSEN": choice.num_chosen,
        "NUM_BLOCKS": max(1, SPAN // choice.size),
        "TILE_HEADS": max(LANES, triton.next_power_of_2(shape.num_kv_heads)),
        "WIDTH": triton.next_power_of_2(shape.head_dim),
        "BLOCK": BLOCK,
        "num_warps": 4,
        "num_stages": 3,
    }


def list_constants(num_kv_heads: int, choice: BlockChoice) -> dict[str, int]:
    """Return the constants and warps of `list_blocks`."""
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "SIZE": choice.size,
        "NUM_CHOSEN": choice.num_chosen,
        "READ_AT_ONCE": READ_AT_ONCE,
        "BLOCK": BLOCK,
        "num_warps": 4,
    }
