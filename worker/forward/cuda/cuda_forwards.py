"""Forwards on a GPU as CUDA graphs, over arenas and sparse caches."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftbatch.worker.forward.expert_counts import CudaExpertCounts
from swiftbatch.worker.forward.forward_interface import DecodedChain, DrawChains, SparseRows
from swiftbatch.worker.forward.hardware import hardware_of
from swiftbatch.worker.forward.tile_packing import SequenceRows, known_rows, pack_tiles, rows_of_trees, tree_rows
from swiftbatch.worker.kernels.cuda.cuda_decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.cuda_graph import Capture, Upload, capture, capture_ranks
from swiftbatch.worker.kernels.cuda.cuda_recurrence import StateRows
from swiftbatch.worker.kernels.cuda.cuda_recurrent_layers import NAME as STATES_NAME
from swiftbatch.worker.kernels.cuda.gemm import LINEAR_KERNELS, LinearKernel, packed_gemm
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights
from swiftbatch.worker.kernels.gpu_kernel_choice import CUBLAS_WORKSPACES, CudaKernels, triton_version, with_kv
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, narrower_rows
from swiftbatch.worker.kernels.quantized_weights import AnyLinear, PackedLinear
from swiftbatch.worker.kernels.rope_scaling import Rotary
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.host_copies import computing_stream
from swiftbatch.worker.kv.recurrent_arena import SlotStates
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.kv.sparse_arena import RowMover, SlotEntries, SparseArena, arena_for
from swiftbatch.worker.kv.sparse_cache import NewEntries, SparseCacheFactory
from swiftbatch.worker.sampling.cuda.cuda_sampler import MOST_AHEAD, CudaBatchSampler, CudaSampler
from swiftbatch.worker.sampling.draft_tree import DraftTree


class CapturedForward:
    """Captured forward of a decoder on one or several GPUs, and the tables that it reads."""

    def __init__(self, ranks: Sequence[CudaDecoder], capture: Capture) -> None:
        self.decoder, self.num_rows = ranks[0], ranks[0].layout.num_rows
        self._table, *self._others = (Upload(each.table_buffer) for each in ranks)
        devices = [each.table_buffer.device for each in ranks]
        if len(ranks) > 1:
            self.graph = capture_ranks([each.launches for each in ranks], devices, capture)
        else:
            self.graph = capture(self.decoder.forward, devices[0])

    def table(self) -> NDArray[np.int32]:
        """Return the host's table to fill for `send`."""
        return self._table.buffer()

    def send(self) -> None:
        for other in self._others:
            other.buffer()[:] = self._table.buffer()
            other.send()
        self._table.send()


class CudaRounds:
    """Draft rounds over one `SparseArena`. The graph is captured in the constructor, before other threads copy."""

    def __init__(self, decoder: CudaDecoder, arena: SparseArena, capture: Capture) -> None:
        self._captured = CapturedForward([decoder.over(arena.buffer, arena.bias)], capture)

    def check(self, groups: list[SparseRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states `[num_rows, hidden]` and float32 logits `[num_rows, vocab]`, valid as those of `run`."""
        tiles = [*_tiles(groups, self._captured.num_rows)]
        if len(tiles) == 1:
            hidden, logits = self._forward(tiles[0])
            return hidden.clone(), logits
        found = [[each.clone() for each in self._forward(tile)] for tile in tiles]
        return torch.cat([hidden for hidden, _ in found]), torch.cat([logits for _, logits in found])

    def _forward(self, tile: list[SparseRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one tile's rows. The results are valid until the next forward."""
        buffer, decoder = self._captured.table(), self._captured.decoder
        decoder.layout.fill(buffer[: decoder.layout.size], [(rows, entries_of(rows).slot) for rows in tile])
        decoder.fill_adapters(buffer, ((len(rows), rows.cache.adapter) for rows in tile))
        self._captured.send()
        self._captured.graph.replay()
        num_rows = sum(map(len, tile))
        return decoder.hidden[:num_rows], decoder.logits[:num_rows]


def entries_of(rows: SparseRows) -> SlotEntries:
    return cast(SlotEntries, rows.cache.entries)


def _tiles(groups: list[SparseRows], tile_rows: int) -> Iterator[list[SparseRows]]:
    """Yield tiles of up to `tile_rows` rows in order."""
    tile: list[SparseRows] = []
    num_left = tile_rows
    for group in groups:
        rows = replace(group, boundary=group.first_entry)
        while len(rows) > num_left:
            yield [*tile, rows.part(0, num_left)] if num_left else tile
            rows = rows.part(num_left, len(rows))
            tile, num_left = [], tile_rows
        tile.append(rows)
        num_left -= len(rows)
    if tile:
        yield tile


# Forwards of a dense decoder on a GPU: each sends a table and replays one graph.


@dataclass(frozen=True)
class Surroundings:
    """Embedding and head of the target, its matrix product kernel, and its rotary angles."""

    embedding: Tensor  # [vocab, hidden]
    head: AnyLinear
    linear: LinearKernel
    turns: tuple[Rotary, Tensor]


class CudaForwards:
    """`Forwards` with exact rows, because all forwards have the same shape and order of sums.

    Logits of `run` and `check` are valid until the next forward, or the next draw from other rows.
    """

    team = None
    can_scan = False
    never_sampled_ids: torch.Tensor | None = None

    def __init__(
        self,
        weights: StackedWeights,
        arena: KVArena,
        eos_token_ids: frozenset[int],
        kernels: CudaKernels,
        capture: Capture = capture,
        others: Sequence[StackedWeights] = (),
    ) -> None:
        """Take the weights of `others` than the first of several GPUs. Raises ValueError if the arena is unfit."""
        self.sizes = sizes = weights.sizes
        self.has_experts = any(layer.experts is not None for layer in weights.layers)
        self.arena, self.eos_token_ids = arena, eos_token_ids
        self.device, self.dtype = arena.shape.device, sizes.dtype
        self.vocab_size, self.hidden_size = sizes.vocab, sizes.hidden
        self.cache_shape = arena.whole_shape
        self._weights = weights
        kernels = kernels.for_weights(weights.is_packed)
        self.kernels, self.capture = kernels, capture
        self.rows_per_forward = kernels.num_rows
        self._other_heads = [each.head for each in others]
        self._decoder = CudaDecoder(weights, arena.on_device, kernels)
        ranks = zip(others, arena.other_ranks, strict=True)
        self._ranks = [self._decoder, *(CudaDecoder(own, each.on_device, kernels) for own, each in ranks)]
        if others:
            CudaDecoder.join(self._ranks)
        num_routed, met = sum(layer.experts is not None for layer in weights.layers), self._decoder.experts_met
        self.expert_counts = None if met is None else CudaExpertCounts(met, num_routed)
        self.surroundings = Surroundings(
            weights.embedding, weights.head, LINEAR_KERNELS[kernels.linear], self._decoder.turns
        )
        self._rounds = weakref.WeakKeyDictionary[SparseArena, CudaRounds]()  # freed with the drafter's arena
        for own in (arena, *arena.other_ranks):
            for each in (own, own.windowed):
                if each is not None:
                    each.move_rows = RowMover(each.buffer, capture)
        narrower = narrower_rows(kernels.num_rows, weights.gains_by_few_rows)
        self.narrow_rows = narrower if self._decoder.can_be_narrowed else ()
        self._captured = self._capture_all()

    def _capture_all(self) -> list[CapturedForward]:
        """Capture forwards of every number of rows, the narrowest first."""
        narrower = [[each.narrowed(num_rows) for each in self._ranks] for num_rows in self.narrow_rows]
        return [CapturedForward(each, self.capture) for each in (*narrower, self._ranks)]

    def new_batch_sampler(self) -> CudaBatchSampler:
        return self._batch_sampler  # shared, because the sampler's buffers are large and draws are sequential

    @property
    def numerics(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        computed = (
            f"cuda {hardware_of('cuda')}, workspaces {CUBLAS_WORKSPACES}, {dtype}, torch {torch.__version__}, "
            f"triton {triton_version()}, triton kernels 2, {self._decoder.attention.numerics}, {self.kernels.linear}"
            f"{'' if self.narrow_rows else self.kernels.rows_suffix}"
        )
        states = "" if self._decoder.mixers is None else f", {STATES_NAME}"
        return with_kv(computed + states, self.cache_shape.kv_dtype)

    def run(
        self, groups: list[SequenceRows], feature_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if (num_rows := sum(map(len, groups))) <= self.rows_per_forward:
            return self._forward(groups, feature_layers).clone(), self._decoder.logits[:num_rows]
        hidden, logits = [], []
        for tile in pack_tiles(groups, pad_rows=True, tile_rows=self.rows_per_forward):
            hidden.append(self._forward(tile.parts, feature_layers).clone())
            logits.append(self._decoder.logits[: tile.num_rows].clone())
        return torch.cat(hidden), torch.cat(logits)

    @property
    def draw_chains(self) -> DrawChains | None:
        return self._draw_chains if len(self._ranks) == 1 else None

    def _draw_chains(
        self, rows: Sequence[SequenceRows], samplers: Sequence[CudaSampler], num_rounds: int, ends: object = None
    ) -> list[DecodedChain]:
        """Queue plain steps, whose drawn tokens go on the GPU into the next step's table; the host waits once for all.

        Chains end where one sequence cannot draw, not at their `ends`: what lies behind is overwritten later. They are
        empty if draws need earlier tokens on the host.
        """
        caches, number, num_rounds = [each.cache for each in rows], len(rows), min(num_rounds, MOST_AHEAD)
        if number > self.rows_per_forward or not all(each.draws_by_position for each in samplers):
            return [DecodedChain([], has_failed=False)] * number
        for cache in caches:
            cache.reserve(cache.length + num_rounds)
        captured, given = self._captured_for(number), ([each.token_ids[0] for each in rows], [DraftTree()] * number)
        for num_ahead in range(num_rounds):
            self._send(rows_of_trees(caches, *given, num_ahead), captured)
            if num_ahead:
                self._batch_sampler.put_tokens(captured.decoder.token_ids[:number])
            captured.graph.replay()
            if self.never_sampled_ids is not None:
                self._decoder.logits[:number].index_fill_(1, self.never_sampled_ids, -math.inf)
            self._batch_sampler.draw_ahead(samplers, num_ahead)
        return [DecodedChain(*each) for each in self._batch_sampler.drawn_ahead(number, num_rounds)]

    def read(self, cache: FullKVCache, token_ids: list[int], feature_layers: tuple[int, ...] = ()) -> torch.Tensor:
        rows = known_rows(cache, token_ids[:BLOCK])[0]  # a call ends at the next boundary
        hidden = self._forward([rows], feature_layers).clone()
        cache.advance(len(rows))
        return hidden

    def check(self, groups: list[SparseRows]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rounds[entries_of(groups[0]).arena].check(groups)

    def room_for(self, new_cache: SparseCacheFactory, budget: int) -> NewEntries:
        arena = arena_for(new_cache, budget, self.cache_shape, self.arena.num_slots, self.arena.longest_job)
        self._rounds[arena] = CudaRounds(self._decoder, arena, self.capture)
        self._tap  # noqa: B018 - captured now, before other threads copy
        return arena.new_entries

    def queries(self, cache: FullKVCache, token_id: int) -> torch.Tensor:
        groups = [tree_rows(cache, token_id, DraftTree())]
        self._send(groups, self._captured[-1])
        queries = self._tap.replay()
        self._note_states(groups)
        return queries

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weights.embedding[token_ids]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scale, cap = self.sizes.logit_scale, self.sizes.logit_softcap
        logits = torch.cat([_logits_of(hidden, each) for each in (self._weights.head, *self._other_heads)], dim=1)
        logits = logits if scale == 1.0 else logits * scale
        return cap * torch.tanh(logits / cap) if cap else logits

    @functools.cached_property
    def _tap(self) -> CudaQueryTap:
        return CudaQueryTap(self._decoder, self.cache_shape.num_layers, self.device, self.capture)

    @functools.cached_property
    def _batch_sampler(self) -> CudaBatchSampler:
        return CudaBatchSampler(self._decoder.logits, self.capture)

    def _forward(self, groups: list[SequenceRows], feature_layers: tuple[int, ...]) -> torch.Tensor:
        """Return final hidden states, `[num_rows, hidden]`, or features, valid until the next forward."""
        if feature_layers and feature_layers != self._decoder.feature_layers:
            self._decoder.hand_out(feature_layers)
            self._captured = self._capture_all()
        num_rows = sum(len(group) for group in groups)
        captured = self._captured_for(num_rows)
        self._send(groups, captured)
        captured.graph.replay()
        self._note_states(groups)
        if self.expert_counts is not None:
            self.expert_counts.look(num_rows)
        return (self._decoder.buffers.features if feature_layers else self._decoder.hidden)[:num_rows]

    def _captured_for(self, num_rows: int) -> CapturedForward:
        return next(each for each in self._captured if num_rows <= each.num_rows)

    def _send(self, groups: list[SequenceRows], captured: CapturedForward) -> None:
        computing_stream(self.device).join()
        caches = [group.cache for group in groups]
        placed = list[tuple[SequenceRows, int]]()
        for group, cache in zip(groups, caches, strict=True):
            cache.reserve(group.first_entry + len(group.token_ids))
            placed.append((group, cache.slot))
        decoder, buffer = captured.decoder, captured.table()
        windowed = caches if decoder.layout.has_window_pages else ()
        pages = [cache.pages for cache in caches], [cache.window_pages for cache in windowed]
        decoder.layout.fill(buffer[: decoder.layout.size], placed, *pages)
        if decoder.mixers is not None:
            rows = [StateRows(group, slot, cache.boundary) for (group, slot), cache in zip(placed, caches, strict=True)]
            start = decoder.layout.size
            decoder.mixers.layout.fill(buffer[start : start + decoder.mixers.layout.size], rows)
        decoder.fill_adapters(
            buffer, ((len(group), cache.adapter) for group, cache in zip(groups, caches, strict=True))
        )
        captured.send()

    def _note_states(self, groups: list[SequenceRows]) -> None:
        """Note the states that the forward has stored; one that fails before its launch stores none."""
        if self._decoder.mixers is not None:
            for group in groups:
                cast("SlotStates", group.cache.layer_states).fold_to(group.boundary)


def _logits_of(hidden: torch.Tensor, head: AnyLinear) -> torch.Tensor:
    rows = hidden.to(head.weight.device)
    if isinstance(head, PackedLinear):
        logits = packed_gemm(rows, head.weight, head.bias)
    else:
        logits = torch.nn.functional.linear(rows, head.weight, head.bias).float()
    return logits.to(hidden.device)


class CudaQueryTap:
    """Runs the decoder on its row table, and copies the first row's queries."""

    def __init__(self, decoder: CudaDecoder, num_layers: int, device: torch.device, capture: Capture) -> None:
        sizes = decoder.sizes
        heads = (sizes.num_kv_heads, sizes.num_heads // sizes.num_kv_heads, sizes.head_dim)
        queries = self._queries = torch.zeros(num_layers, *heads, dtype=sizes.dtype, device=device)

        def keep(layer: int, query: torch.Tensor) -> None:
            queries[layer, ..., : query.shape[-1]].copy_(query[0])  # zeros meet an indexer's keys

        self._graph = capture(lambda: decoder.forward(keep), device)

    def replay(self) -> torch.Tensor:
        """Return `[num_layers, num_kv_heads, group, head_dim]`, valid until the next call."""
        self._graph.replay()
        return self._queries
