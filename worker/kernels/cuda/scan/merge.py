"""The merge of all that rows see behind a scanned text: tail, entries, chosen keys, clouds."""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.kept_rows import load_rows
from swiftbatch.worker.kernels.cuda.prefix import split_blocks
from swiftbatch.worker.kernels.cuda.rounding import rounded
from swiftbatch.worker.kernels.cuda.scan.clouds import rest_of_cloud
from swiftbatch.worker.kernels.cuda.tail import MERGE_STAGES, attend_tail, merge_part, merge_split


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
