"""Triton kernels of indexers (DeepSeek sparse attention): scores of keys, and each row's list of the best.

All that follows from a row's own path: float32 scores, heads summed in a fixed order, and the `num_chosen` best by the
order of their bits as integers. Of equal scores, the lower position is chosen. Attention then reads the list as if it
were a cache with pages of one entry.
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
from swiftbatch.worker.kernels.cuda.gemm import LinearKernel
from swiftbatch.worker.kernels.cuda.kv_kernels import in_pool, load_rows, store_halves
from swiftbatch.worker.kernels.cuda.row_kernels import is_padding, root_mean
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedIndexer
from swiftbatch.worker.kernels.cuda.tree_attention import KeptLayer
from swiftbatch.worker.kernels.cuda.triton_primitives import dot, rounded
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, LANES, IndexerSizes, MLASizes

EPSILON = 1e-6  # of the norms of index keys in all models
SPAN = 1024  # positions that a program scores
READ_AT_ONCE = 4096  # scores that the choice reads per step
HEADS_AT_ONCE = 64


@triton.jit
def shifted(pointers, norm_ptr, columns, mask, mean, scale, DIM: tl.constexpr, dtype: tl.constexpr):
    """Load numbers of a key and return them normed, with biases, which follow the weights."""
    numbers = tl.load(pointers + columns, mask=mask, other=0.0).to(tl.float32)
    weights = tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    shifts = tl.load(norm_ptr + DIM + columns, mask=mask, other=0.0).to(tl.float32)
    return rounded((numbers - mean) * scale * weights + shifts, dtype)


@triton.jit
def rotated(first, second, angles_ptr, mask, TURNED: tl.constexpr, dtype: tl.constexpr):
    cosines = tl.load(angles_ptr, mask=mask, other=0.0).to(tl.float32)
    sines = tl.load(angles_ptr + TURNED // 2, mask=mask, other=0.0).to(tl.float32)
    return rounded(first * cosines - second * sines, dtype), rounded(second * cosines + first * sines, dtype)


@triton.jit
def ready_index_row(
    narrow_ptr, query_ptr, norm_ptr, angles_ptr, rows_ptr, kept_ptr, epsilon, stride_slot, stride_entry,
    HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, START: tl.constexpr, TILE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, SPUN: tl.constexpr,
):  # fmt: skip
    """Program (row, heads): rotates their queries in place. The first also stores the row's key, normed and rotated."""
    row = tl.program_id(0).to(tl.int64)
    if is_padding(rows_ptr, row):
        return
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    spun = tl.arange(0, SPUN)
    is_spun = spun < TURNED // 2
    angles_ptr += tl.load(rows_ptr + row * 5 + 3).to(tl.int64) * TURNED + spun
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    heads_ptr = query_ptr + (row * HEADS + head)[:, None] * DIM + spun[None, :]
    mask = (head < HEADS)[:, None] & is_spun[None, :]
    first = tl.load(heads_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + TURNED // 2, mask=mask, other=0.0).to(tl.float32)
    first, second = rotated(first, second, angles_ptr[None, :], is_spun[None, :], TURNED, dtype)
    store_halves(heads_ptr, first, second, mask, TURNED)
    if tl.program_id(1) > 0:
        return

    key_ptr = narrow_ptr + row * (DIM + HEADS)
    columns = tl.arange(0, WIDTH)
    is_column = columns < DIM
    key = tl.load(key_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    mean = tl.sum(key, 0) / DIM
    scale = root_mean(tl.where(is_column, key - mean, 0.0), DIM, epsilon)
    entry_ptr = kept_ptr + tl.load(rows_ptr + row * 5).to(tl.int64) * stride_slot + START
    entry_ptr += tl.load(rows_ptr + row * 5 + 4).to(tl.int64) * stride_entry
    is_still = is_column & (columns >= TURNED)
    tl.store(entry_ptr + columns, shifted(key_ptr, norm_ptr, columns, is_still, mean, scale, DIM, dtype), mask=is_still)
    first = shifted(key_ptr, norm_ptr, spun, is_spun, mean, scale, DIM, dtype)
    second = shifted(key_ptr, norm_ptr, TURNED // 2 + spun, is_spun, mean, scale, DIM, dtype)
    first, second = rotated(first, second, angles_ptr, is_spun, TURNED, dtype)
    store_halves(entry_ptr + spun, first, second, is_spun, TURNED)


@triton.jit
def entries_of(keys, seen, boundary, pages_ptr, tail_slots_ptr, PAGE: tl.constexpr):
    """Return the entries of a row's visible keys, numbered by position, as int64."""
    in_prefix = keys < boundary
    tail = tl.load(tail_slots_ptr + keys - boundary, mask=seen & (keys >= boundary), other=0)
    return tl.where(in_prefix, in_pool(keys, pages_ptr, seen & in_prefix, PAGE), tail.to(tl.int64))


@triton.jit
def weighed(
    keys, query_ptr, weights_ptr, tile, scale, HEADS: tl.constexpr, DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the sum, over a tile of heads, of weights times positive products with `keys [keys, WIDTH]`."""
    head, columns = tile * TILE_HEADS + tl.arange(0, TILE_HEADS), tl.arange(0, WIDTH)
    is_head = head < HEADS
    query = load_rows(query_ptr + head[:, None] * DIM + columns[None, :], is_head, columns, DIM, True)
    weights = tl.load(weights_ptr + head, mask=is_head, other=0.0).to(tl.float32) * scale
    products = dot(keys, tl.trans(query), tl.zeros([keys.shape[0], TILE_HEADS], tl.float32))
    return tl.sum(tl.maximum(products, 0.0) * weights[None, :], 1)


@triton.jit
def score_span(
    narrow_ptr, query_ptr, kept_ptr, pages_ptr, rows_ptr, tail_slots_ptr, scores_ptr, scale,
    stride_slot, stride_entry, stride_pages, stride_scores,
    HEADS: tl.constexpr, DIM: tl.constexpr, START: tl.constexpr, NUM_CHOSEN: tl.constexpr, TILE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program (row, span): scores the keys of the span that the row sees, if it sees more than it chooses."""
    row = tl.program_id(0).to(tl.int64)
    boundary, tail_length = tl.load(rows_ptr + row * 5 + 1), tl.load(rows_ptr + row * 5 + 2)
    count, start = boundary + tail_length, tl.program_id(1) * SPAN
    if (tail_length == 0) | (count <= NUM_CHOSEN) | (start >= count):
        return
    slot, columns = tl.load(rows_ptr + row * 5).to(tl.int64), tl.arange(0, WIDTH)
    kept_ptr += slot * stride_slot + START
    if PAGE:
        pages_ptr += slot * stride_pages
    query_ptr += row * HEADS * DIM
    weights_ptr = narrow_ptr + row * (DIM + HEADS) + DIM
    for first in range(start, tl.minimum(start + SPAN, count), KEYS):
        places = first + tl.arange(0, KEYS)
        seen = places < count
        entries = entries_of(places, seen, boundary, pages_ptr, tail_slots_ptr + row * BLOCK, PAGE)
        key_ptr = kept_ptr + entries[:, None] * stride_entry + columns[None, :]
        keys = load_rows(key_ptr, seen, columns, DIM, True)
        scores = weighed(keys, query_ptr, weights_ptr, 0, scale, HEADS, DIM, TILE_HEADS, WIDTH)
        for tile in range(1, (HEADS + TILE_HEADS - 1) // TILE_HEADS):
            scores += weighed(keys, query_ptr, weights_ptr, tile, scale, HEADS, DIM, TILE_HEADS, WIDTH)
        tl.store(scores_ptr + row * stride_scores + places, scores, mask=seen)


@triton.jit
def score_orders(scores_ptr, places, end):
    """Return unsigned integers in the order of scores, where both zeros are equal; the highest ones from `end` on."""
    scores = tl.load(scores_ptr + places, mask=places < end, other=0.0)
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    orders = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(places < end, orders, 0xFFFFFFFF)


@triton.jit
def next_digit(scores_ptr, end, found, wanted, SHIFT: tl.constexpr, READ_AT_ONCE: tl.constexpr):
    """Find the next 8 bits of the `wanted`-th best order among those that begin with `found`.

    Return the bits so far, and the place of this order among those that begin with them. Without scores all bits are 0.
    """
    counts, digits = tl.zeros([256], tl.int32), tl.arange(0, 256)
    for start in range(0, end, READ_AT_ONCE):
        places = start + tl.arange(0, READ_AT_ONCE)
        orders = score_orders(scores_ptr, places, end)
        is_open = places < end
        if SHIFT < 24:
            is_open = is_open & (orders >> (SHIFT + 8) == found >> (SHIFT + 8))
        counts += tl.histogram(((orders >> SHIFT) & 255).to(tl.int32), 256, mask=is_open)
    not_below = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.max(tl.where(not_below >= wanted, digits, 0), 0)
    return found | (digit.to(tl.uint32) << SHIFT), wanted - tl.sum(tl.where(digits > digit, counts, 0), 0)


@triton.jit
def list_chosen(
    scores_ptr, pages_ptr, rows_ptr, tail_slots_ptr, list_ptr, groups_ptr, listed_ptr, ends_ptr,
    slot_entries, stride_pages, stride_scores, stride_list,
    NUM_CHOSEN: tl.constexpr, READ_AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program (row): lists the entries of its chosen keys in the order of positions.

    The last 1 to `BLOCK` of them go to `ends_ptr`, as a row's tail does; the list is the prefix before it.
    """
    row = tl.program_id(0).to(tl.int64)
    slot, boundary = tl.load(rows_ptr + row * 5).to(tl.int64), tl.load(rows_ptr + row * 5 + 1)
    tail_length = tl.load(rows_ptr + row * 5 + 2)
    count = tl.where(tail_length > 0, boundary + tail_length, 0)
    wanted = tl.minimum(count, NUM_CHOSEN)
    scored = tl.where(count > NUM_CHOSEN, count, 0)
    listed = tl.maximum(wanted - 1, 0) // BLOCK * BLOCK
    tl.store(groups_ptr + row * 4, row.to(tl.int32))
    tl.store(groups_ptr + row * 4 + 1, row.to(tl.int32))
    tl.store(groups_ptr + row * 4 + 2, (count > 0).to(tl.int32))
    tl.store(groups_ptr + row * 4 + 3, listed)
    tl.store(listed_ptr + row * 5, row.to(tl.int32))
    tl.store(listed_ptr + row * 5 + 1, listed)
    tl.store(listed_ptr + row * 5 + 2, wanted - listed)
    if PAGE:
        pages_ptr += slot * stride_pages
    scores_ptr += row * stride_scores
    least, num_equal = tl.full([], 0, tl.uint32), wanted
    for step in tl.static_range(4):
        least, num_equal = next_digit(scores_ptr, scored, least, num_equal, 24 - 8 * step, READ_AT_ONCE)
    num_listed, num_met = 0, 0
    for start in range(0, count, READ_AT_ONCE):
        places = start + tl.arange(0, READ_AT_ONCE)
        seen = places < count
        orders = score_orders(scores_ptr, places, scored)
        is_equal = (seen & (orders == least)).to(tl.int32)
        is_early = num_met + tl.cumsum(is_equal, 0) <= num_equal
        is_chosen = seen & ((orders > least) | ((is_equal > 0) & is_early))
        at = num_listed + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        entries = entries_of(places, is_chosen, boundary, pages_ptr, tail_slots_ptr + row * BLOCK, PAGE)
        entries = (slot * slot_entries + entries).to(tl.int32)
        tl.store(list_ptr + row * stride_list + at, entries, mask=is_chosen & (at < listed))
        tl.store(ends_ptr + row * BLOCK + at - listed, entries, mask=is_chosen & (at >= listed))
        num_met += tl.sum(is_equal, 0)
        num_listed += tl.sum(is_chosen.to(tl.int32), 0)


class CudaIndexer:
    """Buffers of indexers, and their launches: layers without one attend to what the last one before has chosen."""

    def __init__(
        self, sizes: DecoderSizes, indexer: IndexerSizes, linear: LinearKernel, device: torch.device, capacity: int,
        num_rows: int,
    ) -> None:  # fmt: skip
        assert sizes.latent is not None
        self._latent, self._indexer, self._linear = sizes.latent, indexer, linear

        def rows(width: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num_rows, width, dtype=dtype, device=device)

        self._queries = rows(indexer.num_heads * indexer.dim, sizes.dtype)
        self._narrow = rows(indexer.dim + indexer.num_heads, sizes.dtype)
        self.scores = rows(capacity, torch.float32)
        self._list = rows(sizes.latent.most_attended(capacity))
        self._groups, self._rows, self._ends = rows(4), rows(5), rows(BLOCK)

    def narrowed(self, num_rows: int) -> CudaIndexer:
        """Return the launches of forwards of fewer rows, in the first rows of the same buffers."""
        other = copy.copy(self)
        for name in ("_queries", "_narrow", "scores", "_list", "_groups", "_rows", "_ends"):
            setattr(other, name, getattr(self, name)[:num_rows])
        return other

    def choose(
        self,
        weights: StackedIndexer,
        vectors: Tensor,
        rows: Tensor,
        table: CudaRowTable[Tensor],
        angles: Tensor,
        kept: KeptLayer,
    ) -> None:
        """Store the keys of `rows [num_rows, hidden]` behind their latent vectors, and choose what each row sees.

        `vectors [num_rows, query_rank]` are the queries' latent vectors.
        """
        self._linear(vectors, weights.query.weight, weights.query.bias, self._queries)
        self._linear(rows, weights.narrow.weight, weights.narrow.bias, self._narrow)
        constants = ready_constants(self._latent, self._indexer)
        num_rows, strides = len(rows), (kept.keys.stride(0), kept.keys.stride(2))
        ready_index_row[(num_rows, triton.cdiv(self._indexer.num_heads, constants["TILE_HEADS"]))](
            self._narrow, self._queries, weights.norm, angles, table.rows, kept.keys, EPSILON, *strides, **constants,
        )  # fmt: skip
        _, pages, _, stride_pages = kept.prefix_arguments()
        scale = (self._indexer.num_heads * self._indexer.dim) ** -0.5
        score_span[(num_rows, triton.cdiv(self.scores.shape[1], SPAN))](
            self._narrow, self._queries, kept.keys, pages, table.rows, table.tail_slots, self.scores, scale,
            *strides, stride_pages, self.scores.stride(0),
            PAGE=kept.page, **score_constants(self._latent, self._indexer, rows.dtype),
        )  # fmt: skip
        self.list_best(kept, table)

    def list_best(self, kept: KeptLayer, table: CudaRowTable[Tensor]) -> None:
        """List each row's chosen keys by `scores [num_rows, capacity] float32`. Rows that see few need none."""
        _, pages, _, stride_pages = kept.prefix_arguments()
        list_chosen[(len(self.scores),)](
            self.scores, pages, table.rows, table.tail_slots, self._list, self._groups, self._rows, self._ends,
            kept.keys.stride(0) // kept.keys.stride(2), stride_pages, self.scores.stride(0), self._list.stride(0),
            PAGE=kept.page, **list_constants(self._indexer),
        )  # fmt: skip

    def chosen(self, kept: KeptLayer, table: CudaRowTable[Tensor]) -> tuple[KeptLayer, CudaRowTable[Tensor]]:
        """Return a layer's cache and the table as attention takes them, with each row's chosen keys alone."""
        pool = kept.keys if kept.pages is None else kept.keys[:1]  # slots that share pages are one pool
        keys = pool.flatten(0, 2).expand(len(self._list), 1, -1, -1)  # whose numbers the lists have, not those of slots
        listed = replace(kept, keys=keys, values=keys, pages=PageTable(self._list, 1))
        return listed, replace(table, groups=self._groups, rows=self._rows, tail_slots=self._ends)


def ready_constants(latent: MLASizes, indexer: IndexerSizes) -> dict[str, int]:
    """Return the constants of `ready_index_row`."""
    return {
        "HEADS": indexer.num_heads,
        "DIM": indexer.dim,
        "TURNED": latent.rope_dim,
        "START": latent.key_dim,
        "TILE_HEADS": min(HEADS_AT_ONCE, triton.next_power_of_2(indexer.num_heads)),
        "WIDTH": triton.next_power_of_2(indexer.dim),
        "SPUN": triton.next_power_of_2(latent.rope_dim // 2),
    }


def score_constants(latent: MLASizes, indexer: IndexerSizes, dtype: torch.dtype) -> dict[str, Any]:
    """Return constants, warps and stages of `score_span`."""
    has_products = dtype == torch.bfloat16  # on tensor cores
    num_heads = max(LANES, triton.next_power_of_2(indexer.num_heads))
    return {
        "HEADS": indexer.num_heads,
        "DIM": indexer.dim,
        "START": latent.key_dim,
        "NUM_CHOSEN": indexer.num_chosen,
        "TILE_HEADS": min(HEADS_AT_ONCE, num_heads) if has_products else LANES,
        "WIDTH": triton.next_power_of_2(indexer.dim),
        "KEYS": 128 if has_products else 32,
        "SPAN": SPAN,
        "BLOCK": BLOCK,
        "num_warps": 4 if has_products else 8,
        "num_stages": 3,
    }  # fmt: skip


def list_constants(indexer: IndexerSizes) -> dict[str, int]:
    """Return the constants and warps of `list_chosen`."""
    return {
        "NUM_CHOSEN": indexer.num_chosen,
        "READ_AT_ONCE": READ_AT_ONCE,
        "BLOCK": BLOCK,
        "num_warps": 16,
    }
