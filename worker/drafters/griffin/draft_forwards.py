"""The forwards of a draft model over a worker's sequences, by compiled kernels or by torch."""

from __future__ import annotations

import ctypes
import functools
import statistics
import weakref
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.griffin.draft_input import (
    NOTHING,
    NUM_ENTRIES,
    NUM_SINKS,
    WINDOW,
    Candidates,
    DraftRows,
    Room,
    TorchRoom,
    entry_of,
    features_of,
    keep_and_rank,
    position_of,
    regressed_place,
    wanted_rows,
    window_start,
)
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig, GriffinModel, GriffinWeights, packed_weights
from swiftbatch.worker.drafters.griffin.published_layers import FeatureProjection
from swiftbatch.worker.forward.forward_interface import Forwards
from swiftbatch.worker.forward.step_costs import seconds_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import SequenceRows, Tile, needs_whole_tiles, pack_tiles, tree_rows
from swiftbatch.worker.forward.transformers_attention import ATTENTION_NAME, BatchInvariantRows, RowGroup
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, LANES
from swiftbatch.worker.kernels.native_decoder import NativeLayers
from swiftbatch.worker.kernels.native_library import Team
from swiftbatch.worker.kernels.native_weights import ELEMENTS, check_weights, checked, load_weight
from swiftbatch.worker.kernels.row_tables import Rows
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

SOURCES = ("feature", "token", "fused")  # in the order of `fusion_source` in source/api.h
ROLES = {  # in the order of `griffin_role` in source/api.h
    name: number for number, name in enumerate(("fuse", "expand", "contract", "predict", "regress", "norm 0", "norm 1"))
}
MOST_PARTS = 2


class CGriffinSizes(ctypes.Structure):
    """`griffin_sizes` of source/api.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("element", "hidden", "num_parts")),
        ("parts", ctypes.c_int32 * MOST_PARTS),
        ("expansion", ctypes.c_int32),
    )


class NativeGriffin:
    def __init__(self, weights: GriffinWeights, team: Team) -> None:
        """Raise ValueError for weights that do not fit together."""
        _check(weights)
        self._sizes = weights.sizes
        self._layer = NativeLayers(weights.sizes, [weights.layer], weights.rotary, team)
        self._team, self._library = team, team.library
        self._has_head = weights.predict is not None
        sizes = CGriffinSizes(
            element=ELEMENTS[weights.sizes.dtype],
            hidden=weights.sizes.hidden,
            num_parts=len(weights.parts),
            parts=(ctypes.c_int32 * MOST_PARTS)(*(SOURCES.index(source) for source, _ in weights.parts)),
            expansion=weights.expansion(),
        )
        self._handle: int = self._library.griffin_new(ctypes.byref(sizes))
        weakref.finalize(self, team.retire, self._library.griffin_free, self._handle)
        for role, linear, _ in weights.linears():
            load = functools.partial(self._library.griffin_load, self._handle, ROLES[role])
            load_weight(load, linear.weight, linear.bias)

    def forward(self, groups: list[Rows], features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return predicted and regressed features of all rows, `[num_rows, hidden]` like all inputs.

        Keys and values go to their slots. Raises ValueError for inputs of another shape or dtype.
        """
        shape = (sum(len(group) for group in groups), self._sizes.hidden)
        features = checked("features", features, shape, self._sizes.dtype)
        embeddings = checked("embeddings", embeddings, shape, self._sizes.dtype)
        state = torch.empty(shape)
        with self._team.lock:
            inputs = features.data_ptr(), embeddings.data_ptr()
            self._library.griffin_fuse(self._handle, self._team.handle, shape[0], *inputs, state.data_ptr())
        self._layer.run(groups, range(1), state)
        return self._head(state)

    def _head(self, state: Tensor) -> tuple[Tensor, Tensor]:
        if not self._has_head:
            return state.to(self._sizes.dtype), state.to(self._sizes.dtype)
        predicted, regressed = (torch.empty(state.shape, dtype=self._sizes.dtype) for _ in range(2))
        with self._team.lock:
            outputs = predicted.data_ptr(), regressed.data_ptr()
            self._library.griffin_head(self._handle, self._team.handle, len(state), state.data_ptr(), *outputs)
        return predicted, regressed


def _check(weights: GriffinWeights) -> None:
    if len(weights.parts) > MOST_PARTS or any(source not in SOURCES for source, _ in weights.parts):
        raise ValueError(f"found a fusion of {[source for source, _ in weights.parts]}, expected up to {MOST_PARTS}")
    if weights.expansion() % LANES:
        raise ValueError(f"found an expansion to {weights.expansion()}, expected a multiple of {LANES}")
    if (weights.predict is None) != (weights.regress is None) or bool(weights.parts) != (weights.contract is not None):
        raise ValueError("found a part of a head or of a fusion without the rest of it")
    for role, linear, shape in weights.linears():
        check_weights([(role, linear.weight, shape), (f"bias of {role}", linear.bias, shape[:1])], weights.sizes.dtype)
        if role.startswith("norm") and linear.bias is None:
            raise ValueError(f"found no bias of {role}")


PROBE_REPEATS = 5
PROBE_NODES = 8
PROBE_PARAMS = SamplingParams(max_tokens=1, temperature=1.0, seed=0)


@dataclass(frozen=True)
class Level:
    """The newest nodes of a tree that `follow` began."""

    sequence: Sequence
    tree: DraftTree
    first: int  # index of the first new node; its parent is in the level before


@dataclass
class _Context:
    target_cache: FullKVCache
    room: Room
    start: int = NUM_SINKS  # first position of the window


class DraftForwards(Protocol):
    """A draft model over the target's features."""

    feature_layers: tuple[int, ...]
    """Layers of the target whose outputs are the features; none: the final hidden states are."""

    def start(self, sequence: Sequence, target_cache: FullKVCache) -> None:
        """Make room for a sequence; `target_cache` is its cache in the target."""

    def stop(self, sequence_id: str) -> None:
        """Forget a sequence."""

    def take(self, sequence_id: str, position: int, hidden: torch.Tensor) -> None:
        """Take the target's features `[num_rows, hidden]` for the positions from `position` on."""

    def follow(self, sequences: list[Sequence]) -> list[Candidates]:
        """Take the newly committed tokens; return the candidates to follow each sequence's newest token."""

    def expand(self, levels: list[Level]) -> list[list[Candidates]]:
        """Return the candidates to follow each new node."""


class GriffinForwards:
    def __init__(
        self,
        rows: GriffinRows,
        target: TargetModel,
        sees_all: bool = False,
        projection: FeatureProjection | None = None,
    ) -> None:
        """`sees_all`: the draft model sees the whole text, not its first tokens and a window."""
        self._rows = rows
        self._target = target
        self._sees_all = sees_all
        self._projection = projection
        self.feature_layers = () if projection is None else projection.layers
        self._contexts: dict[str, _Context] = {}

    def start(self, sequence: Sequence, target_cache: FullKVCache) -> None:
        room = self._rows.new_room(sequence, sequence.max_length if self._sees_all else NUM_ENTRIES)
        self._contexts[sequence.sequence_id] = _Context(target_cache, room)

    def stop(self, sequence_id: str) -> None:
        del self._contexts[sequence_id]

    @torch.inference_mode()
    def take(self, sequence_id: str, position: int, hidden: torch.Tensor) -> None:
        features = hidden if self._projection is None else self._projection(hidden)
        self._contexts[sequence_id].room.features.put(position, features)

    def follow(self, sequences: list[Sequence]) -> list[Candidates]:
        for sequence in sequences:
            self._open_window(self._contexts[sequence.sequence_id], len(sequence))
        found: dict[str, Candidates] = {}
        while waiting := [sequence for sequence in sequences if sequence.sequence_id not in found]:
            parts = [self._missing_rows(sequence) for sequence in waiting]
            for sequence, part, candidates in zip(waiting, parts, self._rows.run(parts), strict=True):
                part.room.cache.advance(part.num_known)  # the newest token's row stays a root, like the target's
                if candidates:
                    found[sequence.sequence_id] = candidates[0]
        return [found[sequence.sequence_id] for sequence in sequences]

    def expand(self, levels: list[Level]) -> list[list[Candidates]]:
        return self._rows.run([self._level_rows(level) for level in levels])

    def level_seconds(self) -> float:
        probe = Sequence("probe", [0], PROBE_PARAMS, self._target.vocab_size, self._target.device)
        room = self._rows.new_room(probe)
        room.cache.clear()
        room.cache.advance(NUM_SINKS + WINDOW)
        rows = tree_rows(room.cache, 0, DraftTree([0] * PROBE_NODES, [ROOT] * PROBE_NODES)).part(1, 1 + PROBE_NODES)
        parts = [DraftRows(room, rows, [NOTHING] * PROBE_NODES, [[0]] * PROBE_NODES, 1)]
        forward = functools.partial(self._rows.run, parts)
        return statistics.median(seconds_of(self._target, forward) for _ in range(PROBE_REPEATS))

    def _open_window(self, context: _Context, num_committed: int) -> None:
        start = NUM_SINKS if self._sees_all else window_start(num_committed)
        if start != context.start:
            context.start = start
            context.room.cache.roll_back(min(context.room.cache.length, NUM_SINKS))

    def _missing_rows(self, sequence: Sequence) -> DraftRows:
        """Return the next rows missing in the cache, at most a block; rows for sinks and for the window stay apart."""
        context = self._contexts[sequence.sequence_id]
        room, last = context.room, len(sequence) - 1
        first = position_of(room.cache.length, context.start)
        end = NUM_SINKS if first < NUM_SINKS else len(sequence)
        token_ids = sequence.token_ids[first:end][: BLOCK - room.cache.length % BLOCK].tolist()
        rows = tree_rows(room.cache, token_ids[0], DraftTree.chain(token_ids[1:]))
        is_last = rows.first_entry + len(rows) == entry_of(last, context.start) + 1
        return DraftRows(room, rows, self._known_places(sequence, rows), [[]] if is_last else [])

    def _known_places(self, sequence: Sequence, rows: SequenceRows) -> list[int]:
        context = self._contexts[sequence.sequence_id]
        features, position = context.room.features, position_of(rows.first_entry, context.start)
        start, end = max(0, position - 1), position - 1 + len(rows)
        if not features.holds(start, end):
            last = min(NUM_SINKS, len(sequence)) - 1 if position < NUM_SINKS else len(sequence) - 1
            end_of_replay = min(last, start + NUM_ENTRIES)  # features keep no more
            hidden = replayed(self._target, sequence, context.target_cache, start, end_of_replay, self.feature_layers)
            self.take(sequence.sequence_id, start, hidden)
        return [NOTHING] * (position == 0) + features.places(start, end)

    def _level_rows(self, level: Level) -> DraftRows:
        room, tree = self._contexts[level.sequence.sequence_id].room, level.tree
        rows = tree_rows(room.cache, int(level.sequence.token_ids[-1]), tree).part(1 + level.first, 1 + len(tree))
        places = [regressed_place(1 + parent) for parent in tree.parents[level.first :]]  # ROOT is the row in front
        return DraftRows(room, rows, places, paths_of(tree)[level.first :], 1 + level.first)


def replayed(
    target: TargetModel,
    sequence: Sequence,
    cache: FullKVCache,
    start: int,
    end: int,
    feature_layers: tuple[int, ...] = (),
) -> torch.Tensor:
    """Return the target's hidden states at positions `[start, end)`, `[end - start, hidden]`, or its features."""
    size = target.hidden_size * max(1, len(feature_layers))
    hidden = [torch.zeros(0, size, dtype=target.dtype, device=target.device)]
    with cache.replayed(start, end - start) as before:
        while before.length < end:
            token_ids = sequence.token_ids[before.length : end].tolist()
            hidden.append(target.read(before, token_ids, feature_layers))
    return torch.cat(hidden)


def paths_of(tree: DraftTree) -> list[list[int]]:
    """Return the tokens from below the root to each node."""
    paths: list[list[int]] = []
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append([*([] if parent == ROOT else paths[parent]), token_id])
    return paths


# Rows of sequences through GRIFFIN's draft model and the target's head: by the kernels, or by torch over tiles.


class GriffinRows(Protocol):
    """A draft model for one target; a row's bits do not depend on what shares its forward."""

    def new_room(self, sequence: Sequence, num_entries: int = NUM_ENTRIES) -> Room:
        """Make room for one sequence. Raises KVRoomError if the target's slots are used up."""

    def run(self, parts: list[DraftRows]) -> list[list[Candidates]]:
        """Return the candidates to follow each part's tree rows.

        Writes keys and values to the rows' cache entries, and regressed features to the parts' rooms.
        """


def rows_of(model: GriffinModel, target: TargetModel, num_candidates: int) -> GriffinRows:
    """Return rows run by kernels if these support the target and the draft model, else by torch."""
    try:
        if target.forwards.team is not None:
            return NativeRows(model, target.forwards, num_candidates)
        if target.forwards.arena:
            from swiftbatch.worker.drafters.griffin.cuda_griffin import cuda_rows

            return cuda_rows(model, target.forwards, num_candidates)
    except ValueError:
        pass  # the kernels take other multiples
    return TiledRows(model, target, num_candidates)


class NativeRows:
    """All rows in one forward through the compiled kernels."""

    def __init__(self, model: GriffinModel, forwards: Forwards, num_candidates: int) -> None:
        """Raise ValueError for sizes that the kernels do not take."""
        if forwards.team is None:
            raise ValueError("found a target that no compiled kernels run")
        self._native = NativeGriffin(packed_weights(model, forwards.vocab_size), forwards.team)
        self._forwards = forwards
        self._num_candidates = num_candidates
        self._cache_shape = cache_shape_of(model.config, forwards)

    def new_room(self, sequence: Sequence, num_entries: int = NUM_ENTRIES) -> Room:
        hidden = torch.empty(self._forwards.hidden_size, dtype=self._forwards.dtype)
        return TorchRoom.of(sequence, FullKVCache(self._cache_shape, num_entries), hidden)

    @torch.inference_mode()
    def run(self, parts: list[DraftRows]) -> list[list[Candidates]]:
        embeddings = self._forwards.embed(torch.tensor([token for part in parts for token in part.rows.token_ids]))
        predicted, regressed = self._native.forward([part.rows for part in parts], features_of(parts), embeddings)
        wanted = wanted_rows(parts)
        if not wanted:
            return [[] for _ in parts]
        return keep_and_rank(parts, regressed[wanted], self._forwards.logits(predicted[wanted]), self._num_candidates)


class TiledRows:
    """The reference in torch, over the same row-exact tiles as `transformers` targets."""

    def __init__(self, model: GriffinModel, target: TargetModel, num_candidates: int) -> None:
        model.set_attention(ATTENTION_NAME)
        self._model = model
        self._target = target
        self._num_candidates = num_candidates
        self._cache_shape = cache_shape_of(model.config, target.forwards)

    def new_room(self, sequence: Sequence, num_entries: int = NUM_ENTRIES) -> Room:
        hidden = torch.empty(self._target.hidden_size, dtype=self._target.dtype, device=self._target.device)
        return TorchRoom.of(sequence, FullKVCache(self._cache_shape, num_entries), hidden)

    @torch.inference_mode()
    def run(self, parts: list[DraftRows]) -> list[list[Candidates]]:
        features, regressed, logits = features_of(parts), [], []
        needs_whole = needs_whole_tiles(self._target.device.type, self._target.dtype)
        for tile in pack_tiles([part.rows for part in parts], needs_whole):
            predicted, regress = self._tile(tile, features[: tile.num_rows])
            features = features[tile.num_rows :]
            logits.append(self._model.logits(predicted, self._target)[: tile.num_rows])
            regressed.append(regress[: tile.num_rows])
        wanted = wanted_rows(parts)
        return keep_and_rank(parts, torch.cat(regressed)[wanted], torch.cat(logits)[wanted], self._num_candidates)

    def _tile(self, tile: Tile, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return predicted and regressed features of a tile, padding included: `[num_padded_rows, hidden]`."""
        device = self._target.device
        padded = torch.cat([features, features.new_zeros(tile.num_padded_rows - tile.num_rows, features.shape[1])])
        groups: list[RowGroup] = [BatchInvariantRows.prepare(part, self._target.dtype, device) for part in tile.parts]
        embeddings = self._target.forwards.embed(torch.tensor(tile.token_ids(), device=device))
        positions = torch.tensor([tile.positions()], device=device)
        predicted, regressed = self._model(padded[None], embeddings[None], positions, row_groups=groups)
        return predicted[0], regressed[0]


def cache_shape_of(config: GriffinConfig, forwards: Forwards) -> CacheShape:
    return CacheShape(1, config.num_kv_heads, config.head_dim, forwards.dtype, forwards.device)
