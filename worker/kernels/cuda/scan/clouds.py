"""Clouds: what the keys that are not read weigh, and bring; and their merge with all that rows see behind a text.

The closed form is that of `worker/kernels/source/scan.c`. A cloud's numbers are the mean key, the mean value, how keys
change with keys, and how values change with keys: `2 * head_dim * (head_dim + 1)` float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.kv_buffers import load_rows
from swiftbatch.worker.kernels.cuda.prefix_attention import split_blocks
from swiftbatch.worker.kernels.cuda.rounding import rounded
from swiftbatch.worker.kernels.cuda.scan.scanned_texts import group_of, tile_of
from swiftbatch.worker.kernels.cuda.tail_attention import MERGE_STAGES, attend_tail, merge_part, merge_split

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_VARIANCE = tl.constexpr(1e-4)  # of scores


@triton.jit
def times_changes(row_ptr, is_real, changes_ptr, some, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Queries times some columns of both matrices: how keys change with keys, and values with keys."""
    spread = tl.zeros([row_ptr.shape[0], COLUMNS], tl.float32)
    gains = tl.zeros([row_ptr.shape[0], COLUMNS], tl.float32)
    for first in range(0, HEAD_DIM, COLUMNS):  # float32 in one piece has no room in registers
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
def look_at_clouds(
    query_ptr, moments_ptr, stats_ptr, gains_ptr, groups_ptr, num_chunks_ptr, scale,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CLOUD_CHUNKS: tl.constexpr,
    MOST_CLOUDS: tl.constexpr,
):  # fmt: skip
    """Program (group and KV head, cloud): mean and deviation of scores, and what values gain with them."""
    slot, kv_head, first_row, end_row, num_chunks = group_of(groups_ptr, num_chunks_ptr, NUM_KV_HEADS)
    cloud = tl.program_id(1)
    if cloud * CLOUD_CHUNKS >= num_chunks:
        return
    cloud_ptr = moments_ptr + ((slot * NUM_KV_HEADS + kv_head) * MOST_CLOUDS + cloud) * (2 * HEAD_DIM * (HEAD_DIM + 1))
    columns = tl.arange(0, WIDTH)
    some = tl.arange(0, COLUMNS)
    mean_key = tl.load(cloud_ptr + columns, mask=columns < HEAD_DIM, other=0.0)
    for row in range(first_row, end_row, TILE_ROWS // HEADS_PER_KV):
        row_head, is_real = tile_of(row, end_row, kv_head, NUM_KV_HEADS, HEADS_PER_KV, TILE_ROWS)
        row_ptr = query_ptr + row_head[:, None] * HEAD_DIM
        gain_ptr = gains_ptr + (cloud * (NUM_ROWS * NUM_KV_HEADS * HEADS_PER_KV) + row_head)[:, None] * HEAD_DIM
        variance = tl.zeros([TILE_ROWS], tl.float32)
        for first in range(0, HEAD_DIM, COLUMNS):
            spread, gains = times_changes(row_ptr, is_real, cloud_ptr + 2 * HEAD_DIM, first + some, HEAD_DIM, COLUMNS)
            own = load_rows(row_ptr + (first + some)[None, :], is_real, first + some, HEAD_DIM, True)
            variance += tl.sum(own.to(tl.float32) * spread, 1)
            is_place = is_real[:, None] & (first + some < HEAD_DIM)[None, :]
            tl.store(gain_ptr + (first + some)[None, :], gains, mask=is_place)
        query = load_rows(row_ptr + columns[None, :], is_real, columns, HEAD_DIM, True).to(tl.float32)
        stat_ptr = stats_ptr + (row_head * MOST_CLOUDS + cloud) * 2
        tl.store(stat_ptr, scale * tl.sum(query * mean_key[None, :], 1), mask=is_real)
        tl.store(stat_ptr + 1, tl.sqrt(tl.maximum(scale * scale * variance, LEAST_VARIANCE)), mask=is_real)


@triton.jit
def normal(x):
    """Logarithm of the share P of a normal distribution below x, and its density there over P.

    Abramowitz and Stegun 26.2.17; far below the mean their asymptotic series.
    """
    size = tl.minimum(tl.abs(x), 1e4)  # infinity times nothing is no number
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
def rest_of_cloud(mean, deviation, limit, num_keys):
    """Return the LSE, base 2, of a cloud's keys with scores below a limit, and how much of its gain is theirs."""
    log_share, density = normal((limit - mean) / deviation - deviation)
    height = mean + 0.5 * deviation * deviation + log_share + tl.log(num_keys)
    return height * LOG2_E, 1.0 - density / deviation


@triton.jit
def merge_cloud(
    stat_ptr, gain_ptr, mean_value_ptr, limits, is_real, columns, num_keys, scale, highest, total, acc,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Fold in what is left of one cloud."""
    mean = tl.load(stat_ptr, mask=is_real, other=0.0)
    deviation = tl.load(stat_ptr + 1, mask=is_real, other=1.0)
    lse, gain = rest_of_cloud(mean, deviation, limits, num_keys)
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
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, CLOUD_CHUNKS: tl.constexpr, MOST_CLOUDS: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head): as `tail_merge`, and behind it splits of chosen keys and clouds, each in order."""
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
    num_clouds = tl.cdiv(num_chunks, CLOUD_CHUNKS)
    limits = scale * tl.load(limits_ptr + row_head, mask=is_real & (num_clouds > 0), other=0.0)
    for cloud in range(0, num_clouds):
        number = (slot * NUM_KV_HEADS + kv_head) * MOST_CLOUDS + cloud
        mean_value_ptr = moments_ptr + number * (2 * HEAD_DIM * (HEAD_DIM + 1)) + HEAD_DIM
        gain_ptr = gains_ptr + (cloud * (NUM_ROWS * num_heads) + row_head)[:, None] * HEAD_DIM
        stat_ptr = stats_ptr + (row_head * MOST_CLOUDS + cloud) * 2
        num_keys = (CHUNK * tl.minimum(num_chunks - cloud * CLOUD_CHUNKS, CLOUD_CHUNKS)).to(tl.float32)
        highest, total, acc = merge_cloud(
            stat_ptr, gain_ptr, mean_value_ptr, limits, is_real, columns, num_keys, scale, highest, total, acc, HEAD_DIM
        )
    is_place = is_real[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(mixed_ptr + offsets, rounded(acc / total[:, None], mixed_ptr.dtype.element_ty), mask=is_place)
