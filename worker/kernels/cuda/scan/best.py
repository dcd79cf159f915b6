"""Attention to the keys that were chosen, read exactly from the full cache, wherever that is.

One in the host's pinned memory has an address on the device too, and of its keys only those that are read cross.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.kept_rows import in_pool, load_kept, load_rows
from swiftbatch.worker.kernels.cuda.rounding import dot, rounded
from swiftbatch.worker.kernels.cuda.scan.scanned_texts import group_of, tile_of


@triton.jit
def attend_chosen(
    query, key_ptr, value_ptr, places, is_chosen, is_listed, columns, scale_log2, highest, total, acc,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """One step of online softmax over listed keys, of which each query sees those that it chose: maybe none."""
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
    """Program (group and KV head, split): the chosen keys of its chunks; normalised output and LSE, -inf for none.

    `kept_ptr` tells how full caches keep keys, and is not read. With pages of `PAGE` entries keys lie in those of the
    full cache's own slot.
    """
    slot, kv_head, first_row, end_row, num_chunks = group_of(groups_ptr, num_chunks_ptr, NUM_KV_HEADS)
    per_split = tl.cdiv(num_chunks, NUM_SPLITS)
    start = tl.program_id(1) * per_split
    end = tl.minimum(start + per_split, num_chunks)
    if start >= end:
        return
    cache_ptr = tl.multiple_of(tl.load(addresses_ptr + slot).to(kept_ptr.dtype), 16)  # else dimensions come singly
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
