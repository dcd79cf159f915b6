"""Attention of rows to a partial cache and the scanned text beside it: seven launches a layer for all sequences.

One in the host's pinned memory has an address on the device too, and of its keys only those that are read cross.

A query's best keys by their codes are read exactly from the full cache, the others weigh as clouds. Drafts alone see
this. A row's bits follow from the rows of its own sequence in the forward: nothing is summed across sequences, and
nothing is counted by several programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.attend import AttentionShape, Scratch
from swiftbatch.worker.kernels.cuda.attentions import TritonAttention
from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable, PageTable
from swiftbatch.worker.kernels.cuda.kept_rows import in_pool, load_kept, load_rows
from swiftbatch.worker.kernels.cuda.prefix import prefix_split
from swiftbatch.worker.kernels.cuda.rounding import dot, rounded
from swiftbatch.worker.kernels.cuda.scan.clouds import look_at_clouds, scan_merge
from swiftbatch.worker.kernels.cuda.scan.scan_choice import choose_keys, find_threshold, sample_scores
from swiftbatch.worker.kernels.cuda.scan.scanned_texts import (
    MOST_SAMPLED,
    SAMPLED_PER_PROGRAM,
    ScannedTexts,
    ScanScratch,
    group_of,
    scan_constants,
    tile_of,
)
from swiftbatch.worker.kernels.forms import SEES_ALL, AttentionView


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


@dataclass(frozen=True)
class Scan:
    """One layer's launches over texts of given sizes. Nothing is allocated, and no number is asked for on the host."""

    shape: AttentionShape
    texts: ScannedTexts
    scratch: ScanScratch
    scale: float
    full: Tensor  # [:, 2, :, num_kv_heads, :, row_width], as which all full caches are laid out
    pages: PageTable | None = None  # of full caches; None: the entries of each lie side by side

    def choose(self, layer: int, query: Tensor, table: CudaRowTable[Tensor]) -> None:
        """Fill the scratch but for what is attended: queries `[num_rows, num_heads, head_dim]` behind the table."""
        texts, scratch, num_kv_heads = self.texts, self.scratch, self.shape.num_kv_heads
        constants = scan_constants(self.shape, texts.sizes)
        codes, means, spreads = texts.codes[layer], texts.means[layer], texts.spreads[layer]
        num_pairs = len(table.groups) * num_kv_heads
        look_at_clouds[(num_pairs, texts.sizes.most_clouds)](
            query, texts.moments[layer], scratch.stats, scratch.gains, table.groups, texts.num_chunks,
            self.scale, **constants["look_at_clouds"],
        )  # fmt: skip
        sample_scores[(num_pairs, MOST_SAMPLED // SAMPLED_PER_PROGRAM)](
            query, codes, means, spreads, scratch.samples, table.groups, texts.num_chunks, **constants["sample_scores"],
        )  # fmt: skip
        find_threshold[(self.shape.num_rows, num_kv_heads * self.shape.heads_per_kv)](
            scratch.samples, scratch.stats, scratch.limits, table.rows, texts.num_chunks, texts.flat_deviations,
            texts.sizes.num_best, **constants["find_threshold"],
        )  # fmt: skip
        choose_keys[(num_pairs, self.shape.num_splits)](
            query, codes, means, spreads, scratch.limits, scratch.entries, scratch.counts, table.groups,
            texts.num_chunks, **constants["choose_keys"],
        )  # fmt: skip

    def read_best(self, layer: int, query: Tensor, table: CudaRowTable[Tensor]) -> None:
        """Attend to the chosen keys of one layer of full caches."""
        texts, scratch, full, pages = self.texts, self.scratch, self.full, self.pages
        attend_best[(len(table.groups) * self.shape.num_kv_heads, self.shape.num_splits)](
            query, full, texts.addresses[layer], texts.full_slots, None if pages is None else pages.numbers,
            scratch.entries, scratch.counts, scratch.output, scratch.lse, table.groups, texts.num_chunks,
            self.scale * math.log2(math.e), texts.sizes.first, full.stride(1), full.stride(3), full.stride(4),
            0 if pages is None else pages.numbers.stride(0), PAGE=0 if pages is None else pages.page,
            **scan_constants(self.shape, texts.sizes)["attend_best"],
        )  # fmt: skip

    def merge(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, prefixes: Scratch, table: CudaRowTable[Tensor],
        mixed: Tensor,
    ) -> None:  # fmt: skip
        """Merge all parts and the tails of one layer of entries; padding rows of `mixed` stay as they are."""
        texts, scratch = self.texts, self.scratch
        scan_merge[(self.shape.num_rows, self.shape.num_kv_heads)](
            query, keys, values, prefixes.output, prefixes.lse, scratch.output, scratch.lse, texts.moments[layer],
            scratch.stats, scratch.gains, scratch.limits, mixed, table.rows, table.tail_slots, texts.num_chunks,
            self.scale * math.log2(math.e), self.scale, *keys.stride()[:3],
            **scan_constants(self.shape, texts.sizes)["scan_merge"],
        )  # fmt: skip


def scan_attend(
    scan: Scan,
    layer: int,
    query: Tensor,  # [num_rows, num_heads, head_dim], side by side
    entries: tuple[Tensor, Tensor],  # keys and values of partial caches, [num_slots, num_kv_heads, capacity, head_dim]
    bias: Tensor,  # [num_slots, capacity] float32, added to scores of the entries' prefix
    table: CudaRowTable[Tensor],
    prefixes: Scratch,
    mixed: Tensor,  # as query
) -> None:
    """Mix each row's heads from entries, tail and scanned text. Padding rows stay as they are."""
    keys, values = entries
    shape = scan.shape
    prefix_split[(len(table.groups) * shape.num_kv_heads, shape.num_splits)](
        query, keys, values, bias, None, prefixes.output, prefixes.lse, table.groups, table.rows,
        scan.scale * math.log2(math.e), *keys.stride()[:3], bias.stride(0), 0,
        HAS_BIAS=True, PAGE=0, **shape.prefix_constants(),
    )  # fmt: skip
    scan.choose(layer, query, table)
    scan.read_best(layer, query, table)
    scan.merge(layer, query, keys, values, prefixes, table, mixed)


class ScanAttention:
    """An `Attention` that takes turns with another one, whose queries and partial sums it uses."""

    def __init__(self, other: TritonAttention, texts: ScannedTexts, full: Tensor, pages: PageTable | None) -> None:
        """The best keys are read where `texts` has them, as in `full [:, 2, :, num_kv_heads, :, row_width]`.

        `pages` are those of full caches, None where the entries of each lie side by side.
        """
        shape, num_heads = other.shape, other.query.shape[1]
        scratch = ScanScratch.empty(texts.sizes, num_heads, shape.num_splits, full.device, shape.num_rows)
        self._other = other
        self._scan = Scan(shape, texts, scratch, other.scale, full, pages)
        self.query = other.query

    @property
    def numerics(self) -> str:
        return self._other.numerics

    def places(self, table: CudaRowTable[Tensor]) -> None:
        return None

    def attend(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        bias: Tensor | None,
        table: CudaRowTable[Tensor],
        mixed: Tensor,
        view: AttentionView = SEES_ALL,
        pages: PageTable | None = None,
    ) -> None:
        """Raises ValueError without biases, and for a window, which entries that are no positions know nothing of."""
        if bias is None or view != SEES_ALL or pages is not None:
            raise ValueError("found no biases, which entries of partial caches have, or a window, which they have not")
        scratch = self._other.scratch
        scan_attend(self._scan, layer, self.query, (keys, values), bias, table, scratch, mixed)

    def put(self, query: Tensor, table: CudaRowTable[Tensor]) -> None:
        self._other.put(query, table)

    def heads(self) -> Tensor:
        return self._other.heads()
