"""Draft attention over scanned keys: the best are read exactly, clusters stand for all others."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.attention_backends import TritonAttention
from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable, PageTable
from swiftbatch.worker.kernels.cuda.kv_kernels import in_pool, load_kept, load_rows
from swiftbatch.worker.kernels.cuda.scanned_texts import (
    MOST_SAMPLED,
    SAMPLED_PER_PROGRAM,
    ScannedTexts,
    ScanScratch,
    choose_keys,
    find_threshold,
    group_of,
    sample_scores,
    scan_constants,
    tile_of,
)
from swiftbatch.worker.kernels.cuda.tree_attention import (
    LOG2_E,
    MERGE_STAGES,
    SCALE_TO_LOG2,
    KeptLayer,
    attend_tail,
    attend_to_prefixes,
    merge_part,
    merge_split,
    split_blocks,
)
from swiftbatch.worker.kernels.cuda.triton_primitives import dot, rounded
from swiftbatch.worker.kernels.layer_specs import SEES_ALL

LEAST_VARIANCE = tl.constexpr(1e-4)  # limits the variance of scores


@triton.jit
def times_changes(row_ptr, is_real, changes_ptr, some, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Return queries times some columns of two covariance matrices: of keys with keys, and of keys with values."""
    spread = tl.zeros([row_ptr.shape[0], COLUMNS], tl.float32)
    gains = tl.zeros([row_ptr.shape[0], COLUMNS], tl.float32)
    for first in range(0, HEAD_DIM, COLUMNS):  # the whole product in float32 does not fit in registers
        d = first + tl.arange(0, COLUMNS)
        query = load_rows(row_ptr + d[None, :], is_real, d, HEAD_DIM, True).to(tl.float32)
        matrix_ptr = changes_ptr + d[:, None] * HEAD_DIM + some[None, :]
        inside = (d < HEAD_DIM)[:, None] & (some < HEAD_DIM)[None, :]
        keys = tl.load(matrix_ptr, mask=inside, other=0.0)
        spread = tl.dot(query, keys, spread, input_precision="ieee")
        values = tl.load(matrix_ptr + HEAD_DIM * HEAD_DIM, mask=inside, other=0.0)
        gains = tl.dot(query, values, gains, input_precision="ieee")
    return spread, gains


@triton.jit
def attend_to_clusters(
    query_ptr, moments_ptr, stats_ptr, gains_ptr, groups_ptr, num_chunks_ptr, scale,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CLUSTER_CHUNKS: tl.constexpr,
    MOST_CLUSTERS: tl.constexpr,
):  # fmt: skip
    """Program (group and KV head, cluster): stores mean and deviation of scores, and the values' gain per score."""
    slot, kv_head, first_row, end_row, num_chunks = group_of(groups_ptr, num_chunks_ptr, NUM_KV_HEADS)
    cloud = tl.program_id(1)
    if cloud * CLUSTER_CHUNKS >= num_chunks:
        return
    cluster_ptr = moments_ptr + ((slot * NUM_KV_HEADS + kv_head) * MOST_CLUSTERS + cloud) * (
        2 * HEAD_DIM * (HEAD_DIM + 1)
    )
    columns = tl.arange(0, WIDTH)
    some = tl.arange(0, COLUMNS)
    mean_key = tl.load(cluster_ptr + columns, mask=columns < HEAD_DIM, other=0.0)
    for row in range(first_row, end_row, TILE_ROWS // HEADS_PER_KV):
        row_head, is_real = tile_of(row, end_row, kv_head, NUM_KV_HEADS, HEADS_PER_KV, TILE_ROWS)
        row_ptr = query_ptr + row_head[:, None] * HEAD_DIM
        gain_ptr = gains_ptr + (cloud * (NUM_ROWS * NUM_KV_HEADS * HEADS_PER_KV) + row_head)[:, None] * HEAD_DIM
        variance = tl.zeros([TILE_ROWS], tl.float32)
        for first in range(0, HEAD_DIM, COLUMNS):
            spread, gains = times_changes(row_ptr, is_real, cluster_ptr + 2 * HEAD_DIM, first + some, HEAD_DIM, COLUMNS)
            own = load_rows(row_ptr + (first + some)[None, :], is_real, first + some, HEAD_DIM, True)
            variance += tl.sum(own.to(tl.float32) * spread, 1)
            is_place = is_real[:, None] & (first + some < HEAD_DIM)[None, :]
            tl.store(gain_ptr + (first + some)[None, :], gains, mask=is_place)
        query = load_rows(row_ptr + columns[None, :], is_real, columns, HEAD_DIM, True).to(tl.float32)
        stat_ptr = stats_ptr + (row_head * MOST_CLUSTERS + cloud) * 2
        tl.store(stat_ptr, scale * tl.sum(query * mean_key[None, :], 1), mask=is_real)
        tl.store(stat_ptr + 1, tl.sqrt(tl.maximum(scale * scale * variance, LEAST_VARIANCE)), mask=is_real)


@triton.jit
def normal(x):
    """Return log P for a normal distribution's probability P below x, and the density at x divided by P.

    Uses Abramowitz and Stegun 26.2.17 and, far below the mean, their asymptotic series.
    """
    size = tl.minimum(tl.abs(x), 1e4)  # infinity times zero would be NaN
    height = tl.exp(-0.5 * size * size - 0.91893853)
    t = 1.0 / (1.0 + 0.2316419 * size)
    series = t * (0.31938153 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    share = tl.where(x < 0, height * series, 1.0 - height * series)
    is_far = x < -5.0
    share = tl.where(is_far, 1.0, share)
    ratio = size + 1.0 / tl.maximum(size, 1.0)
    log_share = tl.where(is_far, -0.5 * size * size - 0.91893853 - tl.log(ratio), tl.log(share))
    return log_share, tl.where(is_far, ratio, height / share)


@triton.jit
def rest_of_cluster(mean, deviation, limit, num_keys):
    """Return the LSE, base 2, of a cluster's keys with scores below a limit, and the factor of its gain."""
    log_share, density = normal((limit - mean) / deviation - deviation)
    height = mean + 0.5 * deviation * deviation + log_share + tl.log(num_keys)
    return height * LOG2_E, 1.0 - density / deviation


@triton.jit
def merge_cluster(
    stat_ptr, gain_ptr, mean_value_ptr, limits, is_real, columns, num_keys, scale, highest, total, acc,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Merge the keys of one cluster that were not chosen."""
    mean = tl.load(stat_ptr, mask=is_real, other=0.0)
    deviation = tl.load(stat_ptr + 1, mask=is_real, other=1.0)
    lse, gain = rest_of_cluster(mean, deviation, limits, num_keys)
    gains = load_rows(gain_ptr + columns[None, :], is_real, columns, HEAD_DIM, True)
    mean_value = tl.load(mean_value_ptr + columns, mask=columns < HEAD_DIM, other=0.0)
    return merge_part(mean_value[None, :] + (scale * gain)[:, None] * gains, lse, highest, total, acc)


@triton.jit
def scan_merge(
    query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr, best_output_ptr, best_lse_ptr, moments_ptr, stats_ptr,
    gains_ptr, limits_ptr, mixed_ptr, rows_ptr, tail_slots_ptr, num_chunks_ptr,
    scale_log2, scale, stride_slot, stride_head, stride_entry,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, LEAST_BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, CLUSTER_CHUNKS: tl.constexpr, MOST_CLUSTERS: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head): merges as `tail_merge`, then chosen keys by split, then clusters in order."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = tl.load(rows_ptr + row * 5).to(tl.int64)
    num_blocks = tl.cdiv(tl.load(rows_ptr + row * 5 + 1), BLOCK)
    tail_length = tl.load(rows_ptr + row * 5 + 2)
    if tail_length == 0:
        return

    num_heads: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV
    index = tl.arange(0, TILE_ROWS)
    is_real = index < HEADS_PER_KV
    row_head = row * num_heads + kv_head * HEADS_PER_KV + index
    columns = tl.arange(0, WIDTH)
    offsets = row_head[:, None] * HEAD_DIM + columns[None, :]
    query = load_rows(query_ptr + offsets, is_real, columns, HEAD_DIM, True)
    cache = slot * stride_slot + kv_head.to(tl.int64) * stride_head
    highest, total, acc = attend_tail(
        query, key_ptr + cache, value_ptr + cache, tail_slots_ptr + row * BLOCK, tail_length, columns, scale_log2,
        stride_entry, HEAD_DIM, BLOCK,
    )  # fmt: skip
    per_split = split_blocks(num_blocks, NUM_SPLITS, LEAST_BLOCKS)
    for split in tl.range(0, tl.cdiv(num_blocks, tl.maximum(per_split, 1)), num_stages=MERGE_STAGES):
        place = split * (NUM_ROWS * num_heads) + row_head
        highest, total, acc = merge_split(output_ptr, lse_ptr, place, is_real, highest, total, acc, columns, HEAD_DIM)

    num_chunks = tl.load(num_chunks_ptr + slot)
    chunks_per_split = tl.cdiv(num_chunks, NUM_SPLITS)
    for split in tl.range(0, tl.cdiv(num_chunks, tl.maximum(chunks_per_split, 1)), num_stages=MERGE_STAGES):
        place = split * (NUM_ROWS * num_heads) + row_head
        highest, total, acc = merge_split(
            best_output_ptr, best_lse_ptr, place, is_real, highest, total, acc, columns, HEAD_DIM
        )
    num_clusters = tl.cdiv(num_chunks, CLUSTER_CHUNKS)
    limits = scale * tl.load(limits_ptr + row_head, mask=is_real & (num_clusters > 0), other=0.0)
    for cloud in range(0, num_clusters):
        number = (slot * NUM_KV_HEADS + kv_head) * MOST_CLUSTERS + cloud
        mean_value_ptr = moments_ptr + number * (2 * HEAD_DIM * (HEAD_DIM + 1)) + HEAD_DIM
        gain_ptr = gains_ptr + (cloud * (NUM_ROWS * num_heads) + row_head)[:, None] * HEAD_DIM
        stat_ptr = stats_ptr + (row_head * MOST_CLUSTERS + cloud) * 2
        num_keys = (CHUNK * tl.minimum(num_chunks - cloud * CLUSTER_CHUNKS, CLUSTER_CHUNKS)).to(tl.float32)
        highest, total, acc = merge_cluster(
            stat_ptr, gain_ptr, mean_value_ptr, limits, is_real, columns, num_keys, scale, highest, total, acc, HEAD_DIM
        )
    is_place = is_real[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(mixed_ptr + offsets, rounded(acc / total[:, None], mixed_ptr.dtype.element_ty), mask=is_place)


# Attention of rows to a partial cache and the scanned text: seven launches per layer for all sequences.


@triton.jit
def attend_chosen(
    query, key_ptr, value_ptr, places, is_chosen, is_listed, columns, scale_log2, highest, total, acc,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Take one step of online softmax over listed keys, of which each query sees only the keys that it chose."""
    keys = load_kept(key_ptr + places, is_listed, columns, HEAD_DIM, True, query.dtype)
    scores = dot(query, tl.trans(keys), tl.zeros([query.shape[0], keys.shape[0]], tl.float32)) * scale_log2
    scores = tl.where(is_chosen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    origin = tl.where(new_highest > float("-inf"), new_highest, 0.0)
    probabilities = tl.exp2(scores - origin[:, None])
    decay = tl.exp2(highest - origin)
    values = load_kept(value_ptr + places, is_listed, columns, HEAD_DIM, True, query.dtype)
    weights = rounded(probabilities, values.dtype).to(values.dtype)
    return new_highest, total * decay + tl.sum(probabilities, 1), dot(weights, values, acc * decay[:, None])


@triton.jit
def attend_best(
    query_ptr, kept_ptr, addresses_ptr, full_slots_ptr, pages_ptr, entries_ptr, counts_ptr, output_ptr, lse_ptr,
    groups_ptr, num_chunks_ptr, scale_log2, first, stride_value, stride_head, stride_entry, stride_pages,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    MOST_CHUNKS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program (group and KV head, split): attends to chosen keys, and stores output and LSE (-inf without chosen keys).

    `kept_ptr` only has the pointer type of the full caches.
    """
    slot, kv_head, first_row, end_row, num_chunks = group_of(groups_ptr, num_chunks_ptr, NUM_KV_HEADS)
    per_split = tl.cdiv(num_chunks, NUM_SPLITS)
    start = tl.program_id(1) * per_split
    end = tl.minimum(start + per_split, num_chunks)
    if start >= end:
        return
    cache_ptr = tl.multiple_of(tl.load(addresses_ptr + slot).to(kept_ptr.dtype), 16)  # enables vectorised loads
    if PAGE:
        pages_ptr += tl.load(full_slots_ptr + slot) * stride_pages
    key_ptr = cache_ptr + kv_head.to(tl.int64) * stride_head
    value_ptr = key_ptr + stride_value
    columns = tl.arange(0, WIDTH)
    n = tl.arange(0, BLOCK)
    for row in range(first_row, end_row, TILE_ROWS // HEADS_PER_KV):
        row_head, is_real = tile_of(row, end_row, kv_head, NUM_KV_HEADS, HEADS_PER_KV, TILE_ROWS)
        query = load_rows(query_ptr + row_head[:, None] * HEAD_DIM + columns[None, :], is_real, columns, HEAD_DIM, True)
        highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        acc = tl.zeros([TILE_ROWS, WIDTH], tl.float32)
        for chunk in range(start, end):
            number = (row * NUM_KV_HEADS + kv_head).to(tl.int64) * MOST_CHUNKS + chunk
            count = tl.load(counts_ptr + number)
            for listed in range(0, count, BLOCK):
                is_listed = listed + n < count
                entries = tl.load(entries_ptr + number * CHUNK + listed + n, mask=is_listed, other=0)
                is_chosen = ((entries[None, :] >> tl.arange(0, TILE_ROWS)[:, None]) & 1) != 0
                positions = first + chunk * CHUNK + (entries >> 16)
                places = in_pool(positions, pages_ptr, is_listed, PAGE)[:, None] * stride_entry
                highest, total, acc = attend_chosen(
                    query, key_ptr, value_ptr, places, is_chosen, is_listed, columns, scale_log2, highest, total, acc,
                    HEAD_DIM,
                )  # fmt: skip
        place = tl.program_id(1) * (NUM_ROWS * NUM_KV_HEADS * HEADS_PER_KV) + row_head
        has_some = total > 0.0
        output = acc / tl.where(has_some, total, 1.0)[:, None]
        is_place = is_real[:, None] & (columns < HEAD_DIM)[None, :]
        tl.store(output_ptr + place[:, None] * HEAD_DIM + columns[None, :], output, mask=is_place)
        lse = tl.where(has_some, highest + tl.log2(tl.where(has_some, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + place, lse, mask=is_real)


class ScanAttention(TritonAttention):
    """`Attention` to partial caches and scanned texts, without allocations or synchronization with the host.

    It shares another one's queries and partial sums, so only one of both may run at a time.
    """

    def __init__(self, other: TritonAttention, texts: ScannedTexts, full: Tensor, pages: PageTable | None) -> None:
        """Take the texts to scan.

        Their best keys are read from full caches with the layout of `full [:, 2, :, num_kv_heads, :, row_width]`.
        """
        self.shape, self.scale, self.scratch, self.query = other.shape, other.scale, other.scratch, other.query
        num_heads = other.query.shape[1]
        self.found = ScanScratch.empty(texts.sizes, num_heads, self.shape.num_splits, full.device, self.shape.num_rows)
        self._texts, self._full, self._pages = texts, full, pages

    def attend(self, layer: int, kept: KeptLayer, table: CudaRowTable[Tensor], mixed: Tensor) -> None:
        """Attend to the partial cache, the tail and the scanned text. Raises ValueError without biases."""
        if kept.bias is None or kept.view != SEES_ALL or kept.pages is not None:
            raise ValueError("found no biases, which entries of partial caches have, or a window, which they have not")
        attend_to_prefixes(self.shape, self.query, kept, table, self.scratch, self.scale)
        self._choose(layer, table)
        self._read_best(layer, table)
        self._merge(layer, kept, table, mixed)

    def _choose(self, layer: int, table: CudaRowTable[Tensor]) -> None:
        """Fill `found` up to and including the chosen keys."""
        texts, found, num_kv_heads = self._texts, self.found, self.shape.num_kv_heads
        codes, means, spreads = texts.codes[layer], texts.means[layer], texts.spreads[layer]
        num_pairs = len(table.groups) * num_kv_heads
        attend_to_clusters[(num_pairs, texts.sizes.most_clusters)](
            self.query, texts.moments[layer], found.stats, found.gains, table.groups, texts.num_chunks,
            self.scale, **self._constants(attend_to_clusters),
        )  # fmt: skip
        sample_scores[(num_pairs, MOST_SAMPLED // SAMPLED_PER_PROGRAM)](
            self.query, codes, means, spreads, found.samples, table.groups, texts.num_chunks,
            **self._constants(sample_scores),
        )  # fmt: skip
        find_threshold[(self.shape.num_rows, num_kv_heads * self.shape.heads_per_kv)](
            found.samples, found.stats, found.limits, table.rows, texts.num_chunks, texts.flat_deviations,
            texts.sizes.num_best, **self._constants(find_threshold),
        )  # fmt: skip
        choose_keys[(num_pairs, self.shape.num_splits)](
            self.query, codes, means, spreads, found.limits, found.entries, found.counts, table.groups,
            texts.num_chunks, **self._constants(choose_keys),
        )  # fmt: skip

    def _read_best(self, layer: int, table: CudaRowTable[Tensor]) -> None:
        """Attend to the chosen keys of one layer of full caches."""
        texts, found, full, pages = self._texts, self.found, self._full, self._pages
        attend_best[(len(table.groups) * self.shape.num_kv_heads, self.shape.num_splits)](
            self.query, full, texts.addresses[layer], texts.full_slots, None if pages is None else pages.numbers,
            found.entries, found.counts, found.output, found.lse, table.groups, texts.num_chunks,
            self.scale * SCALE_TO_LOG2, texts.sizes.first, full.stride(1), full.stride(3), full.stride(4),
            0 if pages is None else pages.numbers.stride(0), PAGE=0 if pages is None else pages.page,
            **self._constants(attend_best),
        )  # fmt: skip

    def _merge(self, layer: int, kept: KeptLayer, table: CudaRowTable[Tensor], mixed: Tensor) -> None:
        """Merge all partial results and the tails of one layer. Padding rows of `mixed` are unchanged."""
        texts, found = self._texts, self.found
        scan_merge[(self.shape.num_rows, self.shape.num_kv_heads)](
            self.query, kept.keys, kept.values, self.scratch.output, self.scratch.lse, found.output, found.lse,
            texts.moments[layer], found.stats, found.gains, found.limits, mixed, table.rows, table.tail_slots,
            texts.num_chunks, self.scale * SCALE_TO_LOG2, self.scale, *kept.keys.stride()[:3],
            **self._constants(scan_merge),
        )  # fmt: skip

    def _constants(self, kernel: Any) -> dict[str, int]:
        return scan_constants(kernel, self.shape, self._texts.sizes)
