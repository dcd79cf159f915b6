"""Scanned texts in slots, with NaN elsewhere."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from swiftbatch.worker.forward.forward_interface import SparseRows, partial_rows
from swiftbatch.worker.kernels.cuda.attention_backends import TritonAttention
from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable, TableLayout
from swiftbatch.worker.kernels.cuda.scan_attention import ScanAttention
from swiftbatch.worker.kernels.cuda.scanned_texts import TILE_ROWS, ScannedTexts, TextSizes
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape, KeptLayer
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS
from swiftbatch.worker.kernels.kv_codes import MOMENT_STRIDE, SCAN_CHUNK
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import PoolSize, pages_of
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.kv.sparse_arena import SlotKeys
from swiftbatch.worker.kv.sparse_cache import SparseCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.kv.cache_parts import everything_of

CPU, NAN = torch.device("cpu"), float("nan")
NUM_SPLITS, FIRST, ENTRIES = 2, 16, 128  # of the entries' caches
LEVELS = torch.tensor([-1.890625, -0.56640625, 0.56640625, 1.890625], dtype=torch.float64)


@dataclass(frozen=True)
class Rows:
    num_chunks: int
    num_entries: int
    num_rows: int


class Texts:
    """A layer of jointly normal caches in slots, last to first."""

    def __init__(
        self,
        sequences: list[Rows],
        num_best: int,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        page: int | None = None,
    ) -> None:
        self.sequences, self.num_kv_heads, self.group = sequences, 2, 2
        self.shape = CacheShape(1, self.num_kv_heads, head_dim, dtype, CPU)
        longest = FIRST + max(rows.num_chunks for rows in sequences) * SCAN_CHUNK + ENTRIES
        arena = KVArena(self.shape, len(sequences), longest)
        if page is not None:
            pool = PoolSize(len(sequences) * pages_of(longest, page), page)
            arena = KVArena(self.shape, len(sequences), longest, pool)
            random.Random(page).shuffle(arena.pool._free)
        self.full, self.entries, self.pages = arena.buffer.fill_(NAN), self._empty_entries(), arena.pages
        most_chunks = max(1, max(rows.num_chunks for rows in sequences))
        sizes = TextSizes(1, len(sequences), self.num_kv_heads, head_dim, most_chunks, num_best, FIRST)
        self.texts = ScannedTexts.empty(sizes, CPU)
        for tensor in self.texts.tensors():
            tensor.fill_(NAN if tensor.is_floating_point() else -1)
        generator = torch.Generator().manual_seed(head_dim)
        self.caches: list[FullKVCache] = [arena.new_cache(longest) for _ in sequences][::-1]
        self.partial: list[SparseCache] = []
        for slot, rows in enumerate(sequences):
            cache = self.caches[slot]
            self._write(cache, FIRST + rows.num_chunks * SCAN_CHUNK + ENTRIES, generator)
            keys = SlotKeys(cache, self.texts, slot)
            keys.extend(cache.length)
            self.partial.append(everything_of(self.shape, cache.prefix(rows.num_entries)))
            self._place(slot, rows, generator)

    def _empty_entries(self) -> Tensor:
        size = (1, 2, len(self.sequences), self.num_kv_heads, ENTRIES, self.shape.head_dim)
        return torch.full(size, NAN, dtype=self.shape.dtype)

    def _write(self, cache: FullKVCache, length: int, generator: torch.Generator) -> None:
        head_dim = self.shape.head_dim
        mixed = torch.randn(head_dim, head_dim, generator=generator) / head_dim**0.5
        noise = torch.randn(2, self.num_kv_heads, length, head_dim, generator=generator)
        keys = (0.3 + noise[0] @ (torch.eye(head_dim) + 0.5 * mixed)).to(self.shape.dtype)
        cache.write(0, 0, keys, (0.5 * noise[0] @ mixed + noise[1]).to(self.shape.dtype))
        cache.advance(length)

    def _place(self, slot: int, rows: Rows, generator: torch.Generator) -> None:
        """Write as `rope_store` does."""
        seen = self.entries[:, :, slot, :, : rows.num_entries + rows.num_rows]
        seen[..., : rows.num_entries, :] = self.caches[slot].rows.between(slice(0, rows.num_entries))
        own = torch.randn(seen[..., rows.num_entries :, :].shape, generator=generator)
        seen[..., rows.num_entries :, :] = own.to(seen.dtype)

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.num_kv_heads, self.group, self.shape.head_dim, NUM_SPLITS, self.shape.dtype)

    def table(self) -> CudaRowTable[Tensor]:
        layout = self.layout()
        buffer = np.full(layout.size, -1, dtype=np.int32)
        chains = [self.chain(slot) for slot in range(len(self.sequences))]
        layout.fill(buffer, [(replace(rows, boundary=rows.first_entry), slot) for slot, rows in enumerate(chains)])
        table = layout.table(torch.from_numpy(buffer))
        table.tail_slots[torch.arange(BLOCK) >= table.rows[:, 2, None]] = ENTRIES - 1
        return table

    def layout(self) -> TableLayout:
        return TableLayout(len(self.sequences), ENTRIES, self.attention.rows_per_group, 10**6, 10, 1)

    def chain(self, slot: int) -> SparseRows:
        num_rows = self.sequences[slot].num_rows
        return partial_rows(self.partial[slot], 0, self.caches[slot].length, DraftTree.chain([0] * (num_rows - 1)))

    def queries(self, deviation: float = 2.0) -> Tensor:
        """Return queries whose scores deviate by about this much; NaN pads them."""
        size = (NUM_ROWS, self.num_kv_heads * self.group, self.shape.head_dim)
        query = deviation * torch.randn(size, generator=torch.Generator().manual_seed(7))
        query[sum(rows.num_rows for rows in self.sequences) :] = NAN
        return query.to(self.shape.dtype)

    def scan(self) -> ScanAttention:
        """Return a scan whose scratch is full of NaN."""
        plain = TritonAttention(self.attention, self.layout(), self.shape.head_dim**-0.5, CPU)
        scan = ScanAttention(plain, self.texts, self.full, self.pages)
        for tensor in scan.found.tensors():
            tensor.fill_(NAN if tensor.is_floating_point() else -1)
        return scan

    def attended(self, scan: ScanAttention, query: Tensor) -> Tensor:
        """Return `[num_rows, num_heads, head_dim]`, and check that padding was not written."""
        table, mixed = self.table(), torch.full_like(query, NAN)
        scan.put(query, table)
        kept = KeptLayer(*self.entries[0], torch.zeros(len(self.sequences), ENTRIES))
        scan.attend(0, kept, table, mixed)
        num_rows = sum(rows.num_rows for rows in self.sequences)
        assert mixed[num_rows:].isnan().all()
        return mixed[:num_rows]

    def scores(self, query: Tensor, slot: int, head: int) -> Tensor:
        """Return `[num_rows, num_keys]` in float64, by codes; queries are `[num_rows, head_dim]`."""
        texts, kv_head, head_dim = self.texts, head // self.group, self.shape.head_dim
        num_chunks = self.sequences[slot].num_chunks
        codes = texts.codes[0, slot, kv_head].view(-1, head_dim // 4, BLOCK)[: num_chunks * SCAN_CHUNK // BLOCK]
        parts = torch.stack([codes >> 2 * part & 3 for part in range(4)], dim=2).flatten(1, 2)
        levels = LEVELS[parts.mT.flatten(0, 1).long()]  # [num_keys, head_dim]
        spread = (query.float() * texts.spreads[0, slot, kv_head]).to(query.dtype).double()
        means = query.double() @ texts.means[0, slot, kv_head, :num_chunks].double().T
        return spread @ levels.T + means.repeat_interleave(SCAN_CHUNK, dim=1)

    def chosen(self, scan: ScanAttention, slot: int, row: int, head: int) -> Tensor:
        """Return a row's keys in text order."""
        first_row = sum(rows.num_rows for rows in self.sequences[:slot])
        per_tile = TILE_ROWS // self.group
        tile, kv_head = first_row + row // per_tile * per_tile, head // self.group
        bit = row % per_tile * self.group + head % self.group
        found = []
        for chunk in range(self.sequences[slot].num_chunks):
            count = int(scan.found.counts[tile, kv_head, chunk])
            entries = scan.found.entries[tile, kv_head, chunk, :count]
            found.append(chunk * SCAN_CHUNK + (entries >> 16)[entries >> bit & 1 != 0])
        return torch.cat(found)

    def rows_of(self, slot: int) -> slice:
        first = sum(rows.num_rows for rows in self.sequences[:slot])
        return slice(first, first + self.sequences[slot].num_rows)

    def exactly(self, scan: ScanAttention, query: Tensor, slot: int, row: int, head: int) -> Tensor:
        """Return `[head_dim]` in float64: entries, rows before it, chosen keys, and a cloud of the others."""
        rows, kv_head, scale = self.sequences[slot], head // self.group, scan.scale
        own = query[self.rows_of(slot)][row, head].double()
        keys, values = self.entries[0, :, slot, kv_head, : rows.num_entries + row + 1].double()
        if rows.num_chunks:
            text = slice(FIRST, FIRST + rows.num_chunks * SCAN_CHUNK)
            all_keys, all_values = (part[kv_head, text].double() for part in self.caches[slot].stored(0))
            best = self.chosen(scan, slot, row, head)
            limit = float(scan.found.limits[self.rows_of(slot)][row, head])
            keys, values = torch.cat([keys, all_keys[best]]), torch.cat([values, all_values[best]])
        scores = keys @ own * scale
        if not rows.num_chunks:
            return scores.softmax(0) @ values
        log_weight, value = cloud(all_keys, all_values, own, scale, limit)
        return torch.cat([scores, log_weight[None]]).softmax(0) @ torch.cat([values, value[None]])


def cloud(keys: Tensor, values: Tensor, query: Tensor, scale: float, limit: float) -> tuple[Tensor, Tensor]:
    """Return the log weight and value of jointly normal keys whose products with a query are below a limit."""
    scores, mean_value = keys @ query * scale, values.mean(0)
    chunks, away = scores.view(-1, SCAN_CHUNK), values.view(-1, SCAN_CHUNK, values.shape[-1]) - mean_value
    mean, means = scores.mean(), chunks.mean(1, keepdim=True)
    within = (chunks - means)[:, ::MOMENT_STRIDE]  # [num_chunks, num_seen]
    away_within = (away - away.mean(1, keepdim=True))[:, ::MOMENT_STRIDE]
    deviation = (within.square().mean() + (means - mean).square().mean()).sqrt()
    gains = (within[..., None] * away_within).mean((0, 1)) + ((means - mean) * away.mean(1)).mean(0)
    x = (scale * limit - mean) / deviation - deviation
    log_share = torch.special.log_ndtr(x)
    density = 0.0 if x.isinf() else torch.exp(-0.5 * x * x - 0.5 * math.log(2 * math.pi) - log_share)
    log_weight = math.log(len(keys)) + mean + deviation**2 / 2 + log_share
    return log_weight, mean_value + gains * (1 - density / deviation)
