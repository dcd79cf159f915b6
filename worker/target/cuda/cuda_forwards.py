"""Forwards of a dense decoder on a GPU: a table goes up, one graph is replayed, whatever rows share it.

One row's queries come from the same forward as a graph of its own, which keeps them on its way.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from swiftbatch.worker.caches.full_cache import FullKVCache
from swiftbatch.worker.caches.host_copies import computing_stream
from swiftbatch.worker.caches.partial_cache import NewEntries, PartialCacheFactory
from swiftbatch.worker.caches.slot_arena import ArenaKVCache, KVArena
from swiftbatch.worker.drawing.cuda.cuda_drawing import CudaDrawing
from swiftbatch.worker.drawing.draft_tree import DraftTree
from swiftbatch.worker.kernels.cuda.cuda_attention_choice import ATTENTION_KERNELS
from swiftbatch.worker.kernels.cuda.cuda_graph import Capture, capture
from swiftbatch.worker.kernels.cuda.decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.linear import LINEAR_KERNELS
from swiftbatch.worker.kernels.cuda.packed_linear import WeightKernel, packed_product
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights
from swiftbatch.worker.kernels.cuda.states.state_layers import NAME as STATES_NAME
from swiftbatch.worker.kernels.cuda.states.state_table import StateRows
from swiftbatch.worker.kernels.cuda.upload import Upload
from swiftbatch.worker.kernels.decoder_weights import AnyLinear, PackedLinear
from swiftbatch.worker.kernels.kernel_choice import CUBLAS_WORKSPACES, CudaKernels, triton_version, with_kv
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.rotary_frequencies import Rotary
from swiftbatch.worker.target.cuda.partial_arena import PartialArena, RowMover, arena_for
from swiftbatch.worker.target.cuda.partial_cache_forwards import CudaRounds, entries_of
from swiftbatch.worker.target.expert_counts import CudaExpertCounts
from swiftbatch.worker.target.hardware import hardware_of
from swiftbatch.worker.target.partial_rows import PartialRows
from swiftbatch.worker.target.tiles import SequenceRows, known_rows, pack_tiles, tree_rows


@dataclass(frozen=True)
class Surroundings:
    """Embedding and head of the target, the kernel that makes its products, and the angles of its heads."""

    embedding: Tensor  # [vocab, hidden]
    head: AnyLinear
    linear: WeightKernel
    turns: tuple[Rotary, Tensor]


class CudaForwards:
    """`Forwards` whose rows are exact since every forward is the same one: so many rows in one order of sums.

    Logits that `run` returns hold until the next forward.
    """

    team = None
    draw_chains = None
    undrawn_ids: torch.Tensor | None = None

    def __init__(
        self,
        weights: StackedWeights,
        arena: KVArena,
        eos_token_ids: frozenset[int],
        num_splits: int,
        kernels: CudaKernels,
        capture: Capture = capture,
    ) -> None:
        """Prefixes are attended to in `num_splits` parts, or as many as the kernel for them takes.

        Raises ValueError for weights that do not fit the arena.
        """
        self.sizes = sizes = weights.sizes
        hides = (layer.window is not None or layer.sinks is not None for layer in weights.layers)
        self.has_windows = bool(sizes.score_cap) or sizes.latent is not None or any(hides)
        self.has_experts = any(layer.experts is not None for layer in weights.layers)
        self.arena, self.eos_token_ids = arena, eos_token_ids
        self.device, self.dtype = arena.shape.device, sizes.dtype
        self.vocab_size, self.hidden_size = sizes.vocab, sizes.hidden
        self.cache_shape = arena.shape
        self._weights = weights
        kernels = kernels.for_weights(weights.is_packed)
        self.num_splits, self.kernels, self.capture = num_splits, kernels, capture
        self.rows_per_forward = kernels.num_rows
        attention, linear = ATTENTION_KERNELS[kernels.attention], LINEAR_KERNELS[kernels.linear]
        self._decoder = CudaDecoder(
            weights, arena.buffer, arena.capacity, num_splits, linear, attention=attention, pages=arena.pages,
            states=arena.states, num_rows=kernels.num_rows,
            windowed=None if arena.windowed is None else (arena.windowed.buffer, arena.windowed.pages),
        )  # fmt: skip
        self._table = Upload(self._decoder.table_buffer)
        num_routed, met = sum(layer.experts is not None for layer in weights.layers), self._decoder.experts_met
        self.expert_counts = None if met is None else CudaExpertCounts(met, num_routed)
        self.surroundings = Surroundings(weights.embedding, weights.head, WeightKernel(linear), self._decoder.turns)
        self._rounds = weakref.WeakKeyDictionary[PartialArena, CudaRounds]()  # as long as a drafter has the arena
        self._prepare()

    def new_drawing(self) -> CudaDrawing:
        return self._drawing  # one for all: its buffers are large, and draws come one after the other

    @property
    def numerics(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        computed = (
            f"cuda {hardware_of('cuda')}, workspaces {CUBLAS_WORKSPACES}, {dtype}, torch {torch.__version__}, "
            f"triton {triton_version()}, triton kernels 1, {self._decoder.attention.numerics}, {self.kernels.linear}"
            f"{self.kernels.rows_suffix}"
        )
        states = "" if self._decoder.mixers is None else f", {STATES_NAME}"
        return with_kv(computed + states, self.cache_shape.kv_dtype)

    def run(self, groups: list[SequenceRows]) -> tuple[torch.Tensor, torch.Tensor]:
        if (num_rows := sum(map(len, groups))) <= self.rows_per_forward:
            return self._forward(groups).clone(), self._decoder.logits[:num_rows]
        hidden, logits = [], []
        for tile in pack_tiles(groups, pad_rows=True, tile_rows=self.rows_per_forward):
            hidden.append(self._forward(tile.parts).clone())
            logits.append(self._decoder.logits[: tile.num_rows].clone())
        return torch.cat(hidden), torch.cat(logits)

    def read(self, cache: FullKVCache, token_ids: list[int]) -> torch.Tensor:
        rows = known_rows(cache, token_ids[:BLOCK])[0]  # up to the next boundary
        hidden = self._forward([rows]).clone()
        cache.advance(len(rows))
        return hidden

    def check(self, groups: list[PartialRows]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rounds[entries_of(groups[0]).arena].check(groups)

    def room_for(self, new_cache: PartialCacheFactory, budget: int) -> NewEntries:
        arena = arena_for(new_cache, budget, self.cache_shape, self.arena.num_drafted, self.arena.longest_job)
        self._rounds[arena] = CudaRounds(self._decoder, arena, self.capture)
        self._prepare_queries()
        return arena.new_entries

    def queries(self, cache: FullKVCache, token_id: int) -> torch.Tensor:
        self._send([tree_rows(cache, token_id, DraftTree())])
        return self._tap.replay()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weights.embedding[token_ids]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head, scale, cap = self._weights.head, self.sizes.logit_scale, self.sizes.logit_cap
        if isinstance(head, PackedLinear):
            logits = packed_product(hidden, head.weight, head.bias)
        else:
            logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
        logits = logits if scale == 1.0 else logits * scale
        return cap * torch.tanh(logits / cap) if cap else logits

    @functools.cached_property
    def _tap(self) -> CudaQueryTap:
        return CudaQueryTap(self._decoder, self.cache_shape.num_layers, self.device, self.capture)

    @functools.cached_property
    def _drawing(self) -> CudaDrawing:
        return CudaDrawing(self.vocab_size, self.device, self.capture, self.rows_per_forward)

    def _forward(self, groups: list[SequenceRows]) -> torch.Tensor:
        """Final hidden states of at most `rows_per_forward` rows, `[num_rows, hidden]`, until the next forward."""
        self._pass(groups)
        num_rows = sum(len(group) for group in groups)
        if self.expert_counts is not None:
            self.expert_counts.look(num_rows)
        return self._decoder.hidden[:num_rows]

    def _prepare(self) -> None:
        """Capture what `_pass` replays."""
        for arena in (self.arena, self.arena.windowed):
            if arena is not None:
                arena.move_rows = RowMover(arena.buffer, self.capture)
        self._graph = self.capture(self._decoder.forward, self.device)

    def _prepare_queries(self) -> None:
        """Capture what `queries` replays now: copies of other threads would disturb it later."""
        self._tap  # noqa: B018

    def _pass(self, groups: list[SequenceRows]) -> None:
        """Run at most `rows_per_forward` rows through all layers."""
        self._send(groups)
        self._graph.replay()

    def _send(self, groups: list[SequenceRows]) -> None:
        computing_stream(self.device).join()
        caches = cast("list[ArenaKVCache]", [group.cache for group in groups])
        placed = list[tuple[SequenceRows, int]]()
        for group, cache in zip(groups, caches, strict=True):
            cache.reserve(group.first_entry + len(group.token_ids))
            placed.append((group, cache.slot))
        decoder, buffer = self._decoder, self._table.buffer()
        windowed = caches if decoder.layout.has_window_pages else ()
        pages = [cache.pages for cache in caches], [cache.window_pages for cache in windowed]
        decoder.layout.fill(buffer[: decoder.layout.size], placed, *pages)
        if decoder.mixers is not None:
            rows = [StateRows(group, slot, cache.boundary) for (group, slot), cache in zip(placed, caches, strict=True)]
            decoder.mixers.layout.fill(buffer[decoder.layout.size :], rows)
            for group, cache in zip(groups, caches, strict=True):
                cache.fold_to(group.boundary)
        self._table.send()


class CudaQueryTap:
    """Runs the rows of the decoder's table and keeps the first one's queries."""

    def __init__(self, decoder: CudaDecoder, num_layers: int, device: torch.device, capture: Capture) -> None:
        sizes = decoder.sizes
        heads = (sizes.num_kv_heads, sizes.num_heads // sizes.num_kv_heads, sizes.head_dim)
        queries = self._queries = torch.zeros(num_layers, *heads, dtype=sizes.dtype, device=device)

        def keep(layer: int, query: torch.Tensor) -> None:
            queries[layer].copy_(query[0])

        self._graph = capture(lambda: decoder.forward(keep), device)

    def replay(self) -> torch.Tensor:
        """Return the queries, `[num_layers, num_kv_heads, group, head_dim]`, until the next call."""
        self._graph.replay()
        return self._queries
