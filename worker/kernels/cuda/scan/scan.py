"""Attention of rows to a partial cache and the scanned text beside it: seven launches a layer for all sequences.

A query's best keys by their codes are read exactly from the full cache, the others weigh as clouds. Drafts alone see
this. A row's bits follow from the rows of its own sequence in the forward: nothing is summed across sequences, and
nothing is counted by several programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from swiftbatch.worker.kernels.attention_view import SEES_ALL, AttentionView
from swiftbatch.worker.kernels.cuda.attend import AttentionShape, Scratch
from swiftbatch.worker.kernels.cuda.attentions import TritonAttention
from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable, PageTable
from swiftbatch.worker.kernels.cuda.prefix import prefix_split
from swiftbatch.worker.kernels.cuda.scan.best import attend_best
from swiftbatch.worker.kernels.cuda.scan.clouds import look_at_clouds
from swiftbatch.worker.kernels.cuda.scan.merge import scan_merge
from swiftbatch.worker.kernels.cuda.scan.scan_choice import choose_keys, find_threshold, sample_scores
from swiftbatch.worker.kernels.cuda.scan.scanned_texts import (
    MOST_SAMPLED,
    SAMPLED_PER_PROGRAM,
    ScannedTexts,
    ScanScratch,
    scan_constants,
)


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
