"""Forwards of a dense decoder through the compiled kernels on a CPU, and chains drawn in one call (source/chain.c)."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence as Many

import numpy as np
import torch

from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.forward.expert_counts import ExpertCounts
from swiftbatch.worker.forward.forward_interface import MOST_READ, DecodedChain, DrawChains, SparseRows
from swiftbatch.worker.forward.tile_packing import SequenceRows, known_rows, tree_rows
from swiftbatch.worker.kernels.decoder_weights import AdapterWeights, DecoderSizes, DecoderWeights
from swiftbatch.worker.kernels.gpu_kernel_choice import with_kv
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.layer_specs import MOST_ROWS
from swiftbatch.worker.kernels.native_decoder import CForwardCall, NativeDecoder
from swiftbatch.worker.kernels.native_library import numerics_of
from swiftbatch.worker.kernels.row_tables import Rows, RowTable, address_of
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.file_offload import FileRows
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.sparse_cache import Entries, NewEntries, SparseCacheFactory
from swiftbatch.worker.sampling.batch_sampler import BatchSampler, NativeBatchSampler, create_batch_sampler
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.native_sampler import CTreeWalk, NativeSampler, scratch

MOST_ROUNDS = BLOCK - 1  # all drawn rows must fit in one tail of a partial cache


class CTokenSet(ctypes.Structure):
    """`token_set` of source/chain.h."""

    _fields_ = (("token_ids", ctypes.c_void_p), ("num_tokens", ctypes.c_int64))


class CChainCall(ctypes.Structure):
    """`chain_call` of source/chain.h."""

    _fields_ = (
        ("forward", CForwardCall),
        *((name, ctypes.c_void_p) for name in ("groups", "token_ids", "positions", "tail_lengths", "tail_slots")),
        *((name, ctypes.c_void_p) for name in ("walks", "texts")),
        ("num_rounds", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("ends", ctypes.c_void_p),
        ("undrawn", CTokenSet),
    )


def draw_chains(
    decoder: NativeDecoder,
    groups: Many[Rows],
    samplers: Many[NativeSampler],
    num_rounds: int,
    ends: Many[frozenset[int]] | None = None,
    never_sampled_ids: torch.Tensor | None = None,
) -> list[DecodedChain]:
    """Draw 1 to `MOST_ROUNDS` tokens per sequence, one forward per round.

    `groups` have one row each, with tail entries up to the block's end for the tokens to draw. Tokens are written after
    the sequences' own, which the caller extends. All chains end when one of them cannot draw, or draws one of its
    `ends`. Raises ValueError.
    """
    room = min(sampler.sequence.num_remaining_tokens for sampler in samplers)
    if not 1 <= num_rounds <= min(MOST_ROUNDS, room):
        raise ValueError(f"found {num_rounds} rounds, expected from 1 to {MOST_ROUNDS}, and to {room} tokens left")
    table = decoder.table(groups, range(decoder.sizes.num_layers))
    if table.num_rows != len(samplers) or table.num_groups != len(samplers):
        raise ValueError(f"found {table.num_rows} rows of {table.num_groups} groups for {len(samplers)} sequences")
    _check_room(table, groups, num_rounds)
    walks = _run(decoder, table, groups, samplers, num_rounds, ends, never_sampled_ids)
    return [_drawn(sampler, walk) for sampler, walk in zip(samplers, walks, strict=True)]


def _run(
    decoder: NativeDecoder,
    table: RowTable,
    groups: Many[Rows],
    samplers: Many[NativeSampler],
    num_rounds: int,
    ends: Many[frozenset[int]] | None,
    never_sampled_ids: torch.Tensor | None,
) -> Many[CTreeWalk]:
    sizes = decoder.sizes
    state = torch.empty(table.num_rows, sizes.state_width)
    hidden = torch.empty(table.num_rows, sizes.hidden, dtype=sizes.dtype)
    logits = torch.empty(table.num_rows, sizes.vocab)
    made = [sampler.walk_call(DraftTree(), row[None]) for sampler, row in zip(samplers, logits, strict=True)]
    walks = (CTreeWalk * len(made))(*(walk for walk, _ in made))
    texts = (ctypes.c_void_p * len(made))(*(address_of(sampler.sequence.token_ids) for sampler in samplers))
    endings = [np.array([*token_ids], dtype=np.int64) for token_ids in ends or ()]
    sets = (CTokenSet * len(endings))(*(CTokenSet(address_of(each), len(each)) for each in endings))
    last_position = int(table.positions.max()) + num_rounds
    with decoder.team.lock:
        call = CChainCall(
            forward=decoder.call(table, range(sizes.num_layers), last_position, state, True, hidden, logits),
            groups=ctypes.addressof(table.groups),
            token_ids=address_of(table.token_ids),
            positions=address_of(table.positions),
            tail_lengths=address_of(table.arrays[1]),
            tail_slots=address_of(table.arrays[0]),
            walks=ctypes.addressof(walks),
            texts=ctypes.addressof(texts),
            ends=ctypes.addressof(sets) if endings else None,
            num_rounds=num_rounds,
            vocab=sizes.vocab,
            undrawn=CTokenSet()
            if never_sampled_ids is None
            else CTokenSet(never_sampled_ids.data_ptr(), len(never_sampled_ids)),
        )
        decoder.team.library.draw_chains(decoder.handle, decoder.team.handle, ctypes.byref(call), scratch(sizes.vocab))
        decoder.team.hold([list(groups), table, state, hidden, logits])
    return list(walks)


def _check_room(table: RowTable, groups: Many[Rows], num_rounds: int) -> None:
    for entry, group in zip(table.groups, groups, strict=True):
        own = group.tail_lengths[0] - 1
        # full caches start a new block on their own
        num_named = num_rounds if group.is_partial else min(num_rounds, BLOCK - own)
        expected = np.arange(group.first_entry, group.first_entry + num_named)
        found = group.tail_entries[0, own : own + num_named]
        if entry.capacity < group.first_entry + num_rounds or not np.array_equal(found, expected):
            raise ValueError(f"found no room for {num_rounds} rows from entry {group.first_entry} on")


def _drawn(sampler: NativeSampler, walk: CTreeWalk) -> DecodedChain:
    sequence = sampler.sequence
    return DecodedChain(sequence.ahead(walk.length - len(sequence)).tolist(), walk.failed_row >= 0)


class NativeForwards:
    """`Forwards` whose rows are exact by construction."""

    arena = None
    rows_per_forward = 1
    narrow_rows: tuple[int, ...] = ()
    never_sampled_ids: torch.Tensor | None = None

    def __init__(
        self,
        weights: DecoderWeights,
        eos_token_ids: frozenset[int],
        variant: str,
        kv_dtype: KVDtype | None = None,
        as_integers: bool = False,
    ) -> None:
        """Raise ValueError for weights whose shapes do not fit together."""
        self.sizes = sizes = weights.sizes
        self.has_experts = any(layer.experts is not None for layer in weights.layers)
        self.expert_counts = ExpertCounts() if self.has_experts else None
        self.device, self.dtype = torch.device("cpu"), sizes.dtype
        self.cache_shape = CacheShape.of(weights, self.device, kv_dtype)
        sees_all = not _sees_otherwise(sizes) and not any(layer.window or layer.heads for layer in weights.layers)
        self.can_scan = sees_all and self.cache_shape.recurrent is None  # a state cannot be read in part
        self._most_read = MOST_READ if self.cache_shape.recurrent is None else MOST_ROWS
        # removes the layers from `weights`
        self._decoder = NativeDecoder(weights, torch.get_num_threads(), variant, as_integers)
        self.team = self._decoder.team
        self.vocab_size, self.hidden_size = sizes.vocab, sizes.hidden
        self.eos_token_ids = eos_token_ids
        computed = with_kv(numerics_of(variant, str(sizes.dtype).removeprefix("torch."), as_integers), kv_dtype)
        named = (computed, weights.rotary.numerics)
        self.numerics = f"cpu {', '.join(filter(None, named))}"

    def add_adapter(self, adapter: AdapterWeights) -> None:
        """Load a LoRA adapter. `FullKVCache.adapter` counts them from 1 on."""
        self._decoder.add_adapter(adapter)

    def new_batch_sampler(self) -> BatchSampler:
        return create_batch_sampler(self.vocab_size, self.device)

    def run(
        self, groups: list[SequenceRows], feature_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        met = self._decoder.num_experts_met
        hidden, logits = self._forward(groups, with_logits=True, feature_layers=feature_layers)
        assert logits is not None
        if self.expert_counts is not None:
            self.expert_counts.observe(len(hidden), self._decoder.num_experts_met - met)
        return hidden, logits

    def read(self, cache: FullKVCache, token_ids: list[int], feature_layers: tuple[int, ...] = ()) -> torch.Tensor:
        groups = known_rows(cache, token_ids[: cache.num_readable(self._most_read)])
        hidden, _ = self._forward(groups, with_logits=False, feature_layers=feature_layers)
        cache.advance(len(hidden))
        return hidden

    def check(self, groups: list[SparseRows]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, logits = self._decoder.forward(groups)
        assert hidden is not None
        assert logits is not None
        return hidden, logits

    @property
    def draw_chains(self) -> DrawChains | None:
        """Return a function that replaces several calls of `check` and draws, or None unless sampling is in C."""
        return self._draw_chains if isinstance(self.new_batch_sampler(), NativeBatchSampler) else None

    def _draw_chains(
        self,
        groups: Many[Rows],
        samplers: Many[NativeSampler],
        num_rounds: int,
        ends: Many[frozenset[int]] | None = None,
    ) -> list[DecodedChain]:
        return draw_chains(self._decoder, groups, samplers, num_rounds, ends, self.never_sampled_ids)

    def room_for(self, new_cache: SparseCacheFactory, budget: int) -> NewEntries:
        return Entries

    def queries(self, cache: FullKVCache, token_id: int) -> torch.Tensor:
        sizes, num_layers = self.sizes, self.cache_shape.num_layers
        queries = torch.empty(num_layers, 1, sizes.num_heads, sizes.head_dim, dtype=sizes.dtype)
        self._forward([tree_rows(cache, token_id, DraftTree())], with_logits=False, queries=queries)
        return queries.view(num_layers, sizes.num_kv_heads, -1, sizes.head_dim)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._decoder.embed(token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._decoder.logits(hidden.flatten(0, -2))
        return logits.view(*hidden.shape[:-1], self.vocab_size)

    def _forward(
        self,
        groups: list[SequenceRows],
        with_logits: bool,
        queries: torch.Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the kernels once, or up to each wanted layer, or once per layer if a cache is loaded layer by layer."""
        in_files = [(group, rows) for group in groups if isinstance(rows := group.cache.rows, FileRows)]
        num_layers, by_layer = self.sizes.num_layers, bool(in_files)
        ends = range(1, num_layers + 1) if by_layer else sorted({*(layer + 1 for layer in feature_layers), num_layers})
        state = torch.empty(sum(len(group) for group in groups), self.sizes.state_width) if len(ends) > 1 else None
        features: dict[int, torch.Tensor] = {}
        for first, end in itertools.pairwise([0, *ends]):
            places = self._decoder.keeping_among(range(first, end))
            own = queries[places.start : places.stop] if by_layer and queries is not None else queries
            hidden, logits = self._decoder.forward(groups, with_logits, range(first, end), state, own)
            if state is not None and end - 1 in feature_layers:
                features[end - 1] = state.to(self.dtype, copy=True)  # later layers change it
            for group, rows in in_files if places else ():
                rows.keep(places.start, group.first_entry, group.first_entry + len(group))
        assert hidden is not None
        return torch.cat([features[each] for each in feature_layers], dim=1) if feature_layers else hidden, logits


def _sees_otherwise(sizes: DecoderSizes) -> bool:
    return bool(sizes.score_softcap) or sizes.latent is not None
