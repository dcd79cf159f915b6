"""Forwards of a dense decoder on a GPU: a table goes up, one graph is replayed, whatever rows share it."""

from __future__ import annotations

import functools
from typing import cast

import torch

from worker.caches.arena import ArenaKVCache, KVArena
from worker.caches.full import FullKVCache
from worker.kernels.cuda.decoder import CudaDecoder
from worker.kernels.cuda.linear import LINEAR_KERNELS
from worker.kernels.cuda.stacked import StackedWeights, unstacked
from worker.kernels.cuda.table import NUM_ROWS
from worker.kernels.reference import ReferenceDecoder
from worker.target.cuda.drawing import CudaDrawing
from worker.target.cuda.graph import Capture, capture
from worker.target.cuda.row_mover import RowMover
from worker.target.cuda.upload import Upload
from worker.target.hardware import hardware_of
from worker.target.partial_rows import PartialRows
from worker.target.tiles import SequenceRows, known_rows, pack_tiles, tree_rows
from worker.tree import DraftTree


class CudaForwards:
    """`Forwards` whose rows are exact since every forward is the same one: `NUM_ROWS` rows in one order of sums.

    Logits that `run` returns hold until the next forward.
    """

    def __init__(
        self,
        weights: StackedWeights,
        arena: KVArena,
        eos_token_ids: frozenset[int],
        num_splits: int,
        linear: str,
        capture: Capture = capture,
    ) -> None:
        """Prefixes are attended to in `num_splits` parts; `linear` is one of `LINEAR_KERNELS`.

        Raises ValueError for weights that do not fit the arena.
        """
        self.sizes = sizes = weights.sizes
        self.arena, self.eos_token_ids = arena, eos_token_ids
        self.device, self.dtype = arena.shape.device, sizes.dtype
        self.vocab_size, self.hidden_size = sizes.vocab, sizes.hidden
        self.cache_shape = arena.shape
        self._weights, self._num_splits, self._linear = weights, num_splits, linear
        self._decoder = CudaDecoder(weights, arena.buffer, arena.capacity, num_splits, LINEAR_KERNELS[linear])
        self._table = Upload(self._decoder.table_buffer)
        self._capture = capture
        arena.move_rows = RowMover(arena.buffer)
        self._graph = capture(self._decoder.forward, self.device)

    def new_drawing(self) -> CudaDrawing:
        return CudaDrawing(self.vocab_size, self.device, self._capture)

    @property
    def numerics(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"cuda {hardware_of('cuda')}, {dtype}, torch {torch.__version__}, triton kernels 1, "
            f"{self._num_splits} splits, {self._linear}"
        )

    def run(self, groups: list[SequenceRows]) -> tuple[torch.Tensor, torch.Tensor]:
        tiles = list(pack_tiles(groups, pad_rows=True, tile_rows=NUM_ROWS))
        if len(tiles) == 1:
            return self._forward(groups).clone(), self._decoder.logits[: tiles[0].num_rows]
        hidden, logits = [], []
        for tile in tiles:
            hidden.append(self._forward(tile.parts).clone())
            logits.append(self._decoder.logits[: tile.num_rows].clone())
        return torch.cat(hidden), torch.cat(logits)

    def read(self, cache: FullKVCache, token_ids: list[int]) -> torch.Tensor:
        rows = known_rows(cache, token_ids[:NUM_ROWS])[0]  # up to the next boundary
        hidden = self._forward([rows]).clone()
        cache.advance(len(rows))
        return hidden

    def check(self, groups: list[PartialRows]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, logits = self._torch.forward(groups)
        assert hidden is not None
        assert logits is not None
        return hidden, logits

    def queries(self, cache: FullKVCache, token_id: int) -> torch.Tensor:
        sizes = self.sizes
        queries = torch.empty(sizes.num_layers, sizes.num_heads, sizes.head_dim, dtype=sizes.dtype, device=self.device)
        self._send([tree_rows(cache, token_id, DraftTree())])

        def keep(layer: int, query: torch.Tensor) -> None:
            queries[layer] = query[0]

        self._decoder.forward(keep)
        return queries.view(sizes.num_layers, sizes.num_kv_heads, -1, sizes.head_dim)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weights.embedding[token_ids]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self._weights.head
        return torch.nn.functional.linear(hidden, head.weight, head.bias).float()

    @functools.cached_property
    def _torch(self) -> ReferenceDecoder:
        """For what only steers drafts: any caches, any number of rows."""
        return ReferenceDecoder(unstacked(self._weights))

    def _forward(self, groups: list[SequenceRows]) -> torch.Tensor:
        """Final hidden states of at most `NUM_ROWS` rows, `[num_rows, hidden]`, until the next forward."""
        self._send(groups)
        self._graph.replay()
        return self._decoder.hidden[: sum(len(group) for group in groups)]

    def _send(self, groups: list[SequenceRows]) -> None:
        slots = [(group, cast(ArenaKVCache, group.cache).slot) for group in groups]
        self._decoder.layout.fill(self._table.buffer(), slots)
        self._table.send()
