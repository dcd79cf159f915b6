"""Rows of sequences through GRIFFIN's draft model and the target's head: by the kernels, or by torch over tiles."""

from __future__ import annotations

from typing import Protocol

import torch

from swiftbatch.worker.caches.full_cache import CacheShape, FullKVCache
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.papers.griffin.draft_input import (
    NUM_ENTRIES,
    Candidates,
    DraftRows,
    Room,
    features_of,
    wanted_rows,
)
from swiftbatch.worker.papers.griffin.griffin_weights import packed_weights
from swiftbatch.worker.papers.griffin.model import GriffinConfig, GriffinModel
from swiftbatch.worker.papers.griffin.native_griffin import NativeGriffin
from swiftbatch.worker.papers.griffin.torch_ranking import TorchRoom, keep_and_rank
from swiftbatch.worker.target.forwards import Forwards
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.target.tiles import Tile, needs_whole_tiles, pack_tiles
from swiftbatch.worker.target.transformers_attention import ATTENTION_NAME, ExactRows, RowGroup


class GriffinRows(Protocol):
    """A draft model for one target; a row's bits do not depend on what shares its forward."""

    def new_room(self, sequence: Sequence) -> Room:
        """Make room for one sequence. Raises KVRoomError where more are there than the target has slots for."""

    def run(self, parts: list[DraftRows]) -> list[list[Candidates]]:
        """Return candidates behind the trees' rows of each part, at most as many for a row as this was made for.

        Keys and values go to the rows' entries. What is regressed at the trees' rows goes to their rooms' features.
        """


def rows_of(model: GriffinModel, target: TargetModel, num_candidates: int) -> GriffinRows:
    """The kernels where the target runs on them and they take the draft model's sizes, else torch."""
    try:
        if target.forwards.team is not None:
            return NativeRows(model, target.forwards, num_candidates)
        if target.forwards.arena:
            from swiftbatch.worker.papers.griffin.cuda_griffin import cuda_rows

            return cuda_rows(model, target.forwards, num_candidates)
    except ValueError:
        pass  # no multiple of what they take at a time
    return TiledRows(model, target, num_candidates)


class NativeRows:
    """All rows in one forward through the compiled kernels, on the target's threads."""

    def __init__(self, model: GriffinModel, forwards: Forwards, num_candidates: int) -> None:
        """Raises ValueError for sizes that the kernels do not take."""
        if forwards.team is None:
            raise ValueError("found a target that no compiled kernels run")
        self._native = NativeGriffin(packed_weights(model, forwards.vocab_size), forwards.team)
        self._forwards = forwards
        self._num_candidates = num_candidates
        self._cache_shape = cache_shape_of(model.config, forwards)

    def new_room(self, sequence: Sequence) -> Room:
        hidden = torch.empty(self._forwards.hidden_size, dtype=self._forwards.dtype)
        return TorchRoom.of(sequence, FullKVCache(self._cache_shape, NUM_ENTRIES), hidden)

    @torch.inference_mode()
    def run(self, parts: list[DraftRows]) -> list[list[Candidates]]:
        embeddings = self._forwards.embed(torch.tensor([token for part in parts for token in part.rows.token_ids]))
        predicted, regressed = self._native.forward([part.rows for part in parts], features_of(parts), embeddings)
        wanted = wanted_rows(parts)
        if not wanted:
            return [[] for _ in parts]
        return keep_and_rank(parts, regressed[wanted], self._forwards.logits(predicted[wanted]), self._num_candidates)


class TiledRows:
    """The definition in torch, over the same row-exact tiles as `transformers` targets."""

    def __init__(self, model: GriffinModel, target: TargetModel, num_candidates: int) -> None:
        model.set_attention(ATTENTION_NAME)
        self._model = model
        self._target = target
        self._num_candidates = num_candidates
        self._cache_shape = cache_shape_of(model.config, target.forwards)

    def new_room(self, sequence: Sequence) -> Room:
        hidden = torch.empty(self._target.hidden_size, dtype=self._target.dtype, device=self._target.device)
        return TorchRoom.of(sequence, FullKVCache(self._cache_shape, NUM_ENTRIES), hidden)

    @torch.inference_mode()
    def run(self, parts: list[DraftRows]) -> list[list[Candidates]]:
        features, regressed, logits = features_of(parts), [], []
        needs_whole = needs_whole_tiles(self._target.device.type, self._target.dtype)
        for tile in pack_tiles([part.rows for part in parts], needs_whole):
            predicted, regress = self._tile(tile, features[: tile.num_rows])
            features = features[tile.num_rows :]
            logits.append(self._target.logits(predicted)[: tile.num_rows])
            regressed.append(regress[: tile.num_rows])
        wanted = wanted_rows(parts)
        return keep_and_rank(parts, torch.cat(regressed)[wanted], torch.cat(logits)[wanted], self._num_candidates)

    def _tile(self, tile: Tile, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict and regress features of a tile's rows, padding included: `[num_padded_rows, hidden]`."""
        device = self._target.device
        padded = torch.cat([features, features.new_zeros(tile.num_padded_rows - tile.num_rows, features.shape[1])])
        groups: list[RowGroup] = [ExactRows.prepare(part, self._target.dtype, device) for part in tile.parts]
        embeddings = self._target.forwards.embed(torch.tensor(tile.token_ids(), device=device))
        positions = torch.tensor([tile.positions()], device=device)
        predicted, regressed = self._model(padded[None], embeddings[None], positions, row_groups=groups)
        return predicted[0], regressed[0]


def cache_shape_of(config: GriffinConfig, forwards: Forwards) -> CacheShape:
    """Return the cache shape of the draft model's one layer."""
    return CacheShape(1, config.num_kv_heads, config.head_dim, forwards.dtype, forwards.device)
