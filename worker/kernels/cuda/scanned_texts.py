"""Scanned texts on a GPU: their static buffers, and the choice of the keys that a query reads exactly.

Programs find their rows and chunks on the device. Keys above a threshold from sampled blocks are chosen. Codes have two
bits per dimension, four per byte, as in `source/scan_intake.c`; a block of 64 keys is `[head_dim / 4, 64]` bytes. A
score is the query times its chunk's mean plus each code's level times the dimension's spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.kv_kernels import load_rows
from swiftbatch.worker.kernels.cuda.triton_primitives import dot, rounded
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS, least_blocks
from swiftbatch.worker.kernels.kv_codes import CLUSTER_CHUNKS, SCAN_CHUNK

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape


TILE_ROWS = 16  # a tile has one list of keys; tensor cores support no fewer rows
MOST_SAMPLED = 128  # number of sampled blocks that determine a threshold
SAMPLED_PER_PROGRAM = 8
CLUSTER_COLUMNS = 32  # number of columns of a cluster's matrix that a program reads at a time


@dataclass(frozen=True)
class TextSizes:
    """Limits of the scanned texts of one model."""

    num_layers: int
    num_slots: int
    num_kv_heads: int
    head_dim: int
    most_chunks: int  # at least 1
    num_best: int  # approximate number of keys that a query reads exactly
    first: int  # position of the first scanned key

    @property
    def most_clusters(self) -> int:
        return -(-self.most_chunks // CLUSTER_CHUNKS)


@dataclass(frozen=True)
class ScannedTexts:
    """Coded chunks of every layer and slot, and addresses of the slots' keys."""

    sizes: TextSizes
    codes: Tensor  # [num_layers, num_slots, num_kv_heads, most_chunks * SCAN_CHUNK * head_dim / 4] uint8
    means: Tensor  # [num_layers, num_slots, num_kv_heads, most_chunks, head_dim] float32
    spreads: Tensor  # [num_layers, num_slots, num_kv_heads, head_dim] float32
    moments: Tensor  # [num_layers, num_slots, num_kv_heads, most_clusters, 2 * head_dim * (head_dim + 1)] float32
    addresses: Tensor  # [num_layers, num_slots] int64: addresses of the full cache's keys, on the device or the host
    full_slots: Tensor  # [num_slots] int32: slots of the full caches, to find their pages
    num_chunks: Tensor  # [num_slots] int32
    flat_deviations: Tensor  # [num_slots] float32: deviation of scores below which no key is worth reading

    @classmethod
    def empty(cls, sizes: TextSizes, device: torch.device) -> ScannedTexts:
        heads, head_dim = (sizes.num_layers, sizes.num_slots, sizes.num_kv_heads), sizes.head_dim
        num_bytes = sizes.most_chunks * SCAN_CHUNK * head_dim // 4
        return cls(
            sizes,
            torch.empty(*heads, num_bytes, dtype=torch.uint8, device=device),
            torch.empty(*heads, sizes.most_chunks, head_dim, device=device),
            torch.empty(*heads, head_dim, device=device),
            torch.empty(*heads, sizes.most_clusters, 2 * head_dim * (head_dim + 1), device=device),
            torch.zeros(sizes.num_layers, sizes.num_slots, dtype=torch.int64, device=device),
            torch.zeros(sizes.num_slots, dtype=torch.int32, device=device),
            torch.zeros(sizes.num_slots, dtype=torch.int32, device=device),
            torch.zeros(sizes.num_slots, device=device),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.codes, self.means, self.spreads, self.moments, self.addresses, self.full_slots, self.num_chunks,
            self.flat_deviations,
        )  # fmt: skip


@dataclass(frozen=True)
class ScanScratch:
    """Buffers between the launches of a layer, shared by all layers."""

    stats: Tensor  # [num_rows, num_heads, most_clusters, 2] float32: mean and deviation of scores
    gains: Tensor  # [most_clusters, num_rows, num_heads, head_dim] float32
    samples: Tensor  # [num_rows, num_heads, MOST_SAMPLED * BLOCK] float32
    limits: Tensor  # [num_rows, num_heads] float32: lowest scores of keys to read
    entries: Tensor  # [num_rows, num_kv_heads, most_chunks, SCAN_CHUNK] int32: keys, at a tile's first row
    counts: Tensor  # [num_rows, num_kv_heads, most_chunks] int32
    output: Tensor  # [num_splits, num_rows, num_heads, head_dim] float32
    lse: Tensor  # [num_splits, num_rows, num_heads] float32, base 2

    @classmethod
    def empty(
        cls, sizes: TextSizes, num_heads: int, num_splits: int, device: torch.device, num_rows: int = NUM_ROWS
    ) -> ScanScratch:
        rows, lists = (num_rows, num_heads), (num_rows, sizes.num_kv_heads, sizes.most_chunks)
        return cls(
            torch.empty(*rows, sizes.most_clusters, 2, device=device),
            torch.empty(sizes.most_clusters, *rows, sizes.head_dim, device=device),
            torch.empty(*rows, MOST_SAMPLED * BLOCK, device=device),
            torch.empty(rows, device=device),
            torch.empty(*lists, SCAN_CHUNK, dtype=torch.int32, device=device),
            torch.empty(lists, dtype=torch.int32, device=device),
            torch.empty(num_splits, *rows, sizes.head_dim, device=device),
            torch.empty(num_splits, *rows, device=device),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.stats, self.gains, self.samples, self.limits, self.entries, self.counts, self.output, self.lse,
        )  # fmt: skip


def scan_constants(kernel: Any, shape: AttentionShape, sizes: TextSizes) -> dict[str, int]:
    """Return the constants that a scan kernel takes, its warps and stages."""
    width = triton.next_power_of_2(shape.head_dim)
    known = {
        "NUM_ROWS": shape.num_rows,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEADS_PER_KV": shape.heads_per_kv,
        "NUM_HEADS": shape.num_kv_heads * shape.heads_per_kv,
        "HEAD_DIM": shape.head_dim,
        "NUM_SPLITS": shape.num_splits,
        "LEAST_BLOCKS": least_blocks(shape.num_rows),
        "TILE_ROWS": TILE_ROWS,
        "WIDTH": width,
        "QUARTER": max(16, width // 4),
        "COLUMNS": CLUSTER_COLUMNS,
        "BLOCK": BLOCK,
        "CHUNK": SCAN_CHUNK,
        "CLUSTER_CHUNKS": CLUSTER_CHUNKS,
        "MOST_CHUNKS": sizes.most_chunks,
        "MOST_CLUSTERS": sizes.most_clusters,
        "CLUSTERS_WIDTH": max(2, triton.next_power_of_2(sizes.most_clusters)),
        "MOST_SAMPLED": MOST_SAMPLED,
        "PER_PROGRAM": SAMPLED_PER_PROGRAM,
    }
    name = kernel.__name__
    is_wide = shape.dtype != torch.bfloat16 or name in ("find_threshold", "choose_keys", "scan_merge")
    options = {"num_warps": 8 if is_wide else 4, "num_stages": 3 if name == "attend_best" else 2}
    return {each: known[each] for each in kernel.arg_names if each in known} | options


@triton.jit
def group_of(groups_ptr, num_chunks_ptr, NUM_KV_HEADS: tl.constexpr):
    """Return the slot, KV head, first row, end row and number of chunks (0: padding) by the first program index."""
    group_ptr = groups_ptr + tl.program_id(0) // NUM_KV_HEADS * 4
    slot = tl.load(group_ptr).to(tl.int64)
    first_row = tl.load(group_ptr + 1)
    num_rows = tl.load(group_ptr + 2)
    num_chunks = tl.where(num_rows > 0, tl.load(num_chunks_ptr + slot), 0)
    return slot, tl.program_id(0) % NUM_KV_HEADS, first_row, first_row + num_rows, num_chunks


@triton.jit
def tile_of(
    row, end, kv_head, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, TILE_ROWS: tl.constexpr
):  # fmt: skip
    """Return the indices (row, then head) of the queries in the tile that starts at `row`.

    The second result is a mask that is False for padding.
    """
    index = tl.arange(0, TILE_ROWS)
    in_rows = row + index // HEADS_PER_KV
    is_real = (index < TILE_ROWS // HEADS_PER_KV * HEADS_PER_KV) & (in_rows < end)
    return in_rows * (NUM_KV_HEADS * HEADS_PER_KV) + kv_head * HEADS_PER_KV + index % HEADS_PER_KV, is_real


# Choice of keys: scores of sampled blocks, their threshold, and the keys above it.


NEAR_LEVEL = tl.constexpr(0.56640625)  # levels in units of the mean distance: 0.566 and 1.89, rounded to bfloat16
FAR_LEVEL = tl.constexpr(1.890625)


@triton.jit
def quarter_of(
    query_ptr, spread_ptr, row_head, is_real, number, HEAD_DIM: tl.constexpr, QUARTER: tl.constexpr
):  # fmt: skip
    """Return every fourth dimension of the queries from `number` on, times its spread: `[rows, QUARTER]`."""
    d = 4 * tl.arange(0, QUARTER) + number
    is_dim = d < HEAD_DIM
    mask = is_real[:, None] & is_dim[None, :]
    query = tl.load(query_ptr + row_head[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0).to(tl.float32)
    spread = tl.load(spread_ptr + d, mask=is_dim, other=0.0)
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    return rounded(query * spread[None, :], dtype).to(dtype)


@triton.jit
def levels(codes, dtype: tl.constexpr):
    """Return the levels of two-bit codes: 0 far below the mean, 1 near below it, 2 near above, 3 far above."""
    distance = tl.where((codes == 0) | (codes == 3), FAR_LEVEL, NEAR_LEVEL)
    return tl.where(codes < 2, -distance, distance).to(dtype)


@triton.jit
def score_block(
    first, second, third, fourth, offset, code_ptr,
    HEAD_DIM: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return scores `[rows, BLOCK]` of a block of codes."""
    byte = tl.arange(0, QUARTER)
    places = byte[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    codes = tl.load(code_ptr + places, mask=(byte < HEAD_DIM // 4)[:, None], other=0).to(tl.int32)
    scores = dot(first, levels(codes & 3, first.dtype), tl.zeros([first.shape[0], BLOCK], tl.float32))
    scores = dot(second, levels((codes >> 2) & 3, first.dtype), scores)
    scores = dot(third, levels((codes >> 4) & 3, first.dtype), scores)
    scores = dot(fourth, levels((codes >> 6) & 3, first.dtype), scores)
    return scores + offset[:, None]


@triton.jit
def offset_of(query, mean_ptr, columns, HEAD_DIM: tl.constexpr):
    mean = tl.load(mean_ptr + columns, mask=columns < HEAD_DIM, other=0.0)
    return tl.sum(query.to(tl.float32) * mean[None, :], 1)


@triton.jit
def sample_scores(
    query_ptr, codes_ptr, means_ptr, spreads_ptr, samples_ptr, groups_ptr, num_chunks_ptr,
    NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, MOST_CHUNKS: tl.constexpr,
    MOST_SAMPLED: tl.constexpr, PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Program (group and KV head, some sampled blocks): computes their scores.

    If the text has few blocks, all are sampled.
    """
    slot, kv_head, first_row, end_row, num_chunks = group_of(groups_ptr, num_chunks_ptr, NUM_KV_HEADS)
    num_blocks = num_chunks * (CHUNK // BLOCK)
    stride = tl.cdiv(num_blocks, MOST_SAMPLED)
    first_sample = tl.program_id(1) * PER_PROGRAM
    if first_sample * stride >= num_blocks:
        return
    end_sample = tl.minimum(first_sample + PER_PROGRAM, tl.cdiv(num_blocks, stride))
    text = slot * NUM_KV_HEADS + kv_head
    columns = tl.arange(0, WIDTH)
    spread_ptr = spreads_ptr + text * HEAD_DIM
    for row in range(first_row, end_row, TILE_ROWS // HEADS_PER_KV):
        row_head, is_real = tile_of(row, end_row, kv_head, NUM_KV_HEADS, HEADS_PER_KV, TILE_ROWS)
        query = load_rows(query_ptr + row_head[:, None] * HEAD_DIM + columns[None, :], is_real, columns, HEAD_DIM, True)
        first = quarter_of(query_ptr, spread_ptr, row_head, is_real, 0, HEAD_DIM, QUARTER)
        second = quarter_of(query_ptr, spread_ptr, row_head, is_real, 1, HEAD_DIM, QUARTER)
        third = quarter_of(query_ptr, spread_ptr, row_head, is_real, 2, HEAD_DIM, QUARTER)
        fourth = quarter_of(query_ptr, spread_ptr, row_head, is_real, 3, HEAD_DIM, QUARTER)
        for sample in range(first_sample, end_sample):
            block = sample * stride
            chunk = block // (CHUNK // BLOCK)
            offset = offset_of(query, means_ptr + (text * MOST_CHUNKS + chunk) * HEAD_DIM, columns, HEAD_DIM)
            code_ptr = codes_ptr + (text * (MOST_CHUNKS * CHUNK) + block * BLOCK) * (HEAD_DIM // 4)
            scores = score_block(first, second, third, fourth, offset, code_ptr, HEAD_DIM, QUARTER, BLOCK)
            places = row_head[:, None] * (MOST_SAMPLED * BLOCK) + sample * BLOCK + tl.arange(0, BLOCK)[None, :]
            tl.store(samples_ptr + places, scores, mask=is_real[:, None])


@triton.jit
def in_order(bits):
    """Convert float32 bits to integers that sort in the same order; a second call converts back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def count_bytes(keys, is_counted, found, shift):
    """Count how often each value `[256]` of a byte occurs in the keys whose higher bytes equal those of `found`."""
    is_left = is_counted & (((keys >> shift) >> 8) == ((found >> shift) >> 8))
    return tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=is_left)


@triton.jit
def byte_at(counts, place):
    """Return the byte of the key at `place` in falling order, and its place among the keys with the same byte."""
    values = tl.arange(0, 256)
    reached = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # numbers with this byte or a higher one
    value = tl.sum((reached >= place).to(tl.int32), 0) - 1
    return value.to(tl.uint32), place - tl.sum(tl.where(values > value, counts, 0), 0)


@triton.jit
def largest_number(numbers, is_counted, place):
    """Return the counted number of rank `place`, where rank 1 is the largest number, in four passes over bytes."""
    keys = numbers.to(tl.uint32, bitcast=True) ^ 0x80000000  # makes the order that of unsigned integers
    found = tl.full((), 0, tl.uint32)
    for shift in range(24, -1, -8):
        value, place = byte_at(count_bytes(keys, is_counted, found, shift), place)
        found |= value << shift
    return (found ^ 0x80000000).to(tl.int32, bitcast=True)


@triton.jit
def find_threshold(
    samples_ptr, stats_ptr, limits_ptr, rows_ptr, num_chunks_ptr, flat_deviations_ptr, num_best,
    NUM_HEADS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, CLUSTER_CHUNKS: tl.constexpr,
    MOST_SAMPLED: tl.constexpr, MOST_CLUSTERS: tl.constexpr, CLUSTERS_WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row, head): finds the lowest score that few enough samples reach.

    At most the samples' share of `num_best` reach it. It is infinity if the scores of all clusters are flat.
    """
    row = tl.program_id(0)
    row_head = row * NUM_HEADS + tl.program_id(1)
    slot = tl.load(rows_ptr + row * 5).to(tl.int64)
    num_chunks = tl.load(num_chunks_ptr + slot)
    if (tl.load(rows_ptr + row * 5 + 2) == 0) | (num_chunks == 0):
        return
    cloud = tl.arange(0, CLUSTERS_WIDTH)
    stats = stats_ptr + (row_head * MOST_CLUSTERS + cloud) * 2
    deviations = tl.load(stats + 1, mask=cloud < tl.cdiv(num_chunks, CLUSTER_CHUNKS), other=0.0)
    if tl.max(deviations, 0) < tl.load(flat_deviations_ptr + slot):
        tl.store(limits_ptr + row_head, float("inf"))
        return
    num_blocks = num_chunks * (CHUNK // BLOCK)
    stride = tl.cdiv(num_blocks, MOST_SAMPLED)
    share = tl.maximum(num_best // stride, 1)
    n = tl.arange(0, MOST_SAMPLED * BLOCK)
    is_sample = n < tl.cdiv(num_blocks, stride) * BLOCK
    scores = tl.load(samples_ptr + row_head * (MOST_SAMPLED * BLOCK) + n, mask=is_sample, other=0.0)
    numbers = in_order(scores.to(tl.int32, bitcast=True))
    limit = largest_number(numbers, is_sample, share + 1) + 1
    if tl.sum(is_sample.to(tl.int32), 0) <= share:
        limit = tl.min(tl.where(is_sample, numbers, 0x7FFFFFFF), 0)
    tl.store(limits_ptr + row_head, in_order(limit).to(tl.float32, bitcast=True))


@triton.jit
def list_chosen(scores, limits, is_real, first_entry, count, entries_ptr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Append a block's chosen keys: the index in the chunk, and in the lower 16 bits a mask of the queries."""
    is_chosen = (scores >= limits[:, None]) & is_real[:, None]
    queries = tl.sum(is_chosen.to(tl.int32) << tl.arange(0, TILE_ROWS)[:, None], 0)
    is_listed = (queries != 0).to(tl.int32)
    places = count + tl.cumsum(is_listed, 0) - 1
    entries = ((first_entry + tl.arange(0, BLOCK)) << 16) | queries
    tl.store(entries_ptr + places, entries, mask=is_listed != 0)
    return count + tl.sum(is_listed, 0)


@triton.jit
def choose_keys(
    query_ptr, codes_ptr, means_ptr, spreads_ptr, limits_ptr, entries_ptr, counts_ptr, groups_ptr, num_chunks_ptr,
    NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (group and KV head, split): lists the keys that a tile's queries read, in order."""
    slot, kv_head, first_row, end_row, num_chunks = group_of(groups_ptr, num_chunks_ptr, NUM_KV_HEADS)
    per_split = tl.cdiv(num_chunks, NUM_SPLITS)
    start = tl.program_id(1) * per_split
    end = tl.minimum(start + per_split, num_chunks)
    if start >= end:
        return
    text = slot * NUM_KV_HEADS + kv_head
    columns = tl.arange(0, WIDTH)
    spread_ptr = spreads_ptr + text * HEAD_DIM
    for row in range(first_row, end_row, TILE_ROWS // HEADS_PER_KV):
        row_head, is_real = tile_of(row, end_row, kv_head, NUM_KV_HEADS, HEADS_PER_KV, TILE_ROWS)
        limits = tl.load(limits_ptr + row_head, mask=is_real, other=float("inf"))
        num_seeking = tl.sum((limits < float("inf")).to(tl.int32), 0)
        query = load_rows(query_ptr + row_head[:, None] * HEAD_DIM + columns[None, :], is_real, columns, HEAD_DIM, True)
        first = quarter_of(query_ptr, spread_ptr, row_head, is_real, 0, HEAD_DIM, QUARTER)
        second = quarter_of(query_ptr, spread_ptr, row_head, is_real, 1, HEAD_DIM, QUARTER)
        third = quarter_of(query_ptr, spread_ptr, row_head, is_real, 2, HEAD_DIM, QUARTER)
        fourth = quarter_of(query_ptr, spread_ptr, row_head, is_real, 3, HEAD_DIM, QUARTER)
        for chunk in range(start, end):
            offset = offset_of(query, means_ptr + (text * MOST_CHUNKS + chunk) * HEAD_DIM, columns, HEAD_DIM)
            code_ptr = codes_ptr + (text * MOST_CHUNKS + chunk) * (CHUNK * HEAD_DIM // 4)
            number = (row * NUM_KV_HEADS + kv_head).to(tl.int64) * MOST_CHUNKS + chunk
            count = 0
            for place in range(0, tl.where(num_seeking > 0, CHUNK, 0), BLOCK):  # flat queries need no codes
                block_ptr = code_ptr + place * (HEAD_DIM // 4)
                scores = score_block(first, second, third, fourth, offset, block_ptr, HEAD_DIM, QUARTER, BLOCK)
                list_ptr = entries_ptr + number * CHUNK
                count = list_chosen(scores, limits, is_real, place, count, list_ptr, TILE_ROWS, BLOCK)
            tl.store(counts_ptr + number, count)
