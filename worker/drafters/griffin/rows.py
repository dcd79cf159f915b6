"""Rows of sequences through GRIFFIN's draft model and the target's head: by the kernels, or by torch over tiles."""

from __future__ import annotations

from typing import Protocol

import torch

from worker.caches.full import CacheShape
from worker.drafters.griffin.model import GriffinConfig, GriffinModel
from worker.drafters.griffin.weights import packed_weights
from worker.kernels.griffin import NativeGriffin
from worker.target.attention import ATTENTION_NAME, ExactRows, RowGroup
from worker.target.forwards import Forwards
from worker.target.native_forwards import NativeForwards
from worker.target.target import TargetModel
from worker.target.tiles import SequenceRows, Tile, needs_whole_tiles, pack_tiles


class GriffinRows(Protocol):
    """A draft model for one target; a row's bits do not depend on what shares its forward."""

    cache_shape: CacheShape  # of its one layer

    def run(self, groups: list[SequenceRows], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Regressed features `[num_rows, hidden]` and logits `[num_rows, vocab] float32` of all groups' rows.

        `features [num_rows, hidden]` stand in front of the rows. Keys and values go to the rows' entries.
        """


def rows_of(model: GriffinModel, target: TargetModel) -> GriffinRows:
    """The kernels where the target runs on them and they take the draft model's sizes, else torch."""
    if isinstance(target.forwards, NativeForwards):
        try:
            return NativeRows(model, target.forwards)
        except ValueError:
            pass  # no multiple of what they take at a time
    return TiledRows(model, target)


class NativeRows:
    """All rows in one forward through the compiled kernels, on the target's threads."""

    def __init__(self, model: GriffinModel, forwards: NativeForwards) -> None:
        """Raises ValueError for sizes that the kernels do not take."""
        self._native = NativeGriffin(packed_weights(model, forwards.vocab_size), forwards.team)
        self._forwards = forwards
        self.cache_shape = _cache_shape(model.config, forwards)

    @torch.inference_mode()
    def run(self, groups: list[SequenceRows], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids = torch.tensor([token_id for group in groups for token_id in group.token_ids])
        predicted, regressed = self._native.forward(groups, features, self._forwards.embed(token_ids))
        return regressed, self._forwards.logits(predicted)


class TiledRows:
    """The definition in torch, over the same row-exact tiles as `transformers` targets."""

    def __init__(self, model: GriffinModel, target: TargetModel) -> None:
        model.set_attention(ATTENTION_NAME)
        self._model = model
        self._target = target
        self.cache_shape = _cache_shape(model.config, target.forwards)

    @torch.inference_mode()
    def run(self, groups: list[SequenceRows], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        regressed, logits = [], []
        for tile in pack_tiles(groups, needs_whole_tiles(self._target.device.type, self._target.dtype)):
            predicted, regress = self._tile(tile, features[: tile.num_rows])
            features = features[tile.num_rows :]
            logits.append(self._target.logits(predicted)[: tile.num_rows])
            regressed.append(regress[: tile.num_rows])
        return torch.cat(regressed), torch.cat(logits)

    def _tile(self, tile: Tile, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict and regress features of a tile's rows, padding included: `[num_padded_rows, hidden]`."""
        device = self._target.device
        padded = torch.cat([features, features.new_zeros(tile.num_padded_rows - tile.num_rows, features.shape[1])])
        groups: list[RowGroup] = [ExactRows.prepare(part, self._target.dtype, device) for part in tile.parts]
        embeddings = self._target.forwards.embed(torch.tensor(tile.token_ids(), device=device))
        positions = torch.tensor([tile.positions()], device=device)
        predicted, regressed = self._model(padded[None], embeddings[None], positions, row_groups=groups)
        return predicted[0], regressed[0]


def _cache_shape(config: GriffinConfig, forwards: Forwards) -> CacheShape:
    return CacheShape(1, config.num_kv_heads, config.head_dim, forwards.dtype, forwards.device)
