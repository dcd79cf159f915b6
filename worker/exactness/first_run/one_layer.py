"""Attention of one layer over an arena of noise: any rows of its slots, and each of them alone."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from swiftbatch.worker.caches.arena import ArenaKVCache, KVArena
from swiftbatch.worker.drawing.tree import DraftTree
from swiftbatch.worker.exactness.first_run.parts import Parts
from swiftbatch.worker.exactness.probe import random_tree
from swiftbatch.worker.kernels.cuda.attend import AttentionShape
from swiftbatch.worker.kernels.cuda.attentions import ATTENTION_KERNELS
from swiftbatch.worker.kernels.cuda.cuda_row_table import NUM_ROWS, TableLayout
from swiftbatch.worker.kernels.cuda.upload import Upload
from swiftbatch.worker.target.tiles import SequenceRows, max_tree_depth, tree_rows

Placed = tuple[SequenceRows, int]  # rows and their slot
SHORTER = 37  # positions by which the cache of a slot is shorter than that of the slot before


class OneLayer:
    """Kernels, buffers and caches as a whole model has them."""

    def __init__(self, parts: Parts, num_slots: int, longest: int) -> None:
        self._parts, sizes = parts, parts.sizes
        self.arena = KVArena(parts.cache_shape(num_layers=1), num_slots, longest)
        self.arena.buffer.normal_(generator=parts.generator(4))
        heads_per_kv = sizes.num_heads // sizes.num_kv_heads
        shape = AttentionShape(sizes.num_kv_heads, heads_per_kv, sizes.head_dim, parts.num_splits, sizes.dtype)
        capacity = self.arena.capacity
        self._layout = TableLayout(num_slots, capacity, shape.rows_per_group, capacity, sizes.vocab)
        self._buffer = torch.zeros(self._layout.size, dtype=torch.int32, device=parts.device)
        self._upload = Upload(self._buffer)
        self._table = self._layout.table(self._buffer)
        kernel = ATTENTION_KERNELS[parts.kernels.attention]
        self._attention = kernel(shape, self._layout, sizes.scale, parts.device)
        self._mixed = self._rows()
        self._caches = [self.arena.new_cache(longest) for _ in range(num_slots)]

    def placed(self, rng: random.Random, length: int, num_slots: int, num_rows: int) -> list[Placed]:
        """Return trees of so many rows in all at most, over some slots of nearly this length."""
        found = []
        for number, cache in enumerate(self._caches[:num_slots]):
            rows = self._tree(rng, cache, max(0, length - number * SHORTER), num_rows // num_slots)
            found.append((rows, cache.slot))
        return found

    def random_query(self, seed: int) -> Tensor:
        """Draw a query `[NUM_ROWS, num_heads, head_dim]`."""
        query = self._rows().float().normal_(generator=self._parts.generator(seed))
        return query.to(self._parts.dtype)

    def attended(self, query: Tensor, placed: list[Placed]) -> Tensor:
        """Attend with rows `query [num_rows, num_heads, head_dim]` to the same shape; NaN lies where none may look."""
        self.upload(placed)
        self._mixed.fill_(torch.nan)
        self._attention.put(query, self._table)
        self.attend()
        return self._mixed[: len(query)].clone()

    def upload(self, placed: list[Placed]) -> None:
        self._layout.fill(self._upload.buffer(), placed)
        self._upload.send()

    def attend(self) -> None:
        """Attend over what was uploaded, in two launches."""
        keys, values = self.arena.buffer[0]
        self._attention.attend(0, keys, values, None, self._table, self._mixed)

    def exact(self, query: Tensor, rows: SequenceRows, slot: int, row: int) -> Tensor:
        """One row's `[num_heads, head_dim]` in float64, of `query` as it is."""
        length = rows.tail_lengths[row]
        tail = torch.from_numpy(rows.tail_entries[row][:length].copy()).to(query.device)
        found = []
        for kv_head, heads in enumerate(query.double().chunk(self._parts.sizes.num_kv_heads)):
            keys, values = (
                torch.cat([part[slot, kv_head, : rows.boundary], part[slot, kv_head, tail]]).double()
                for part in self.arena.buffer[0]
            )
            weights = torch.softmax(heads @ keys.t() * self._parts.sizes.scale, dim=-1)
            found.append(weights @ values)
        return torch.cat(found)

    def _tree(self, rng: random.Random, cache: ArenaKVCache, length: int, num_rows: int) -> SequenceRows:
        cache.length = length
        vocab = self._parts.sizes.vocab
        tree = random_tree(rng, num_rows - 1, max_tree_depth(length), vocab) if num_rows > 1 else DraftTree()
        return tree_rows(cache, rng.randrange(vocab), tree)

    def _rows(self) -> Tensor:
        sizes = self._parts.sizes
        return torch.zeros(NUM_ROWS, sizes.num_heads, sizes.head_dim, dtype=sizes.dtype, device=self._parts.device)
