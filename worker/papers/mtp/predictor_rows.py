"""Rows of sequences through an MTP layer and the target's head: by the kernels that run the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.caches.full import CacheShape, FullKVCache
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.layers import NativeLayers
from swiftbatch.worker.kernels.team import Team
from swiftbatch.worker.papers.griffin.draft_input import Candidates, DraftRows, Room, features_of, wanted_rows
from swiftbatch.worker.papers.griffin.torch_ranking import TorchRoom, keep_and_rank
from swiftbatch.worker.papers.mtp.predictor import PredictorWeights
from swiftbatch.worker.papers.mtp.track import NUM_ENTRIES, NUM_PLACES
from swiftbatch.worker.target.forwards import Forwards
from swiftbatch.worker.target.target import TargetModel

if TYPE_CHECKING:
    from swiftbatch.worker.papers.griffin.draft_rows import GriffinRows


def rows_of(weights: PredictorWeights, target: TargetModel, num_candidates: int) -> GriffinRows:
    """Raises ModelError where the target runs elsewhere than in our kernels, which have the layer, or it is damaged."""
    forwards = target.forwards
    try:
        if forwards.team is not None:
            return NativePredictorRows(weights, forwards, forwards.team, num_candidates)
        if forwards.arena is not None:
            from swiftbatch.worker.papers.mtp.cuda_predictor import cuda_predictor_rows

            return cuda_predictor_rows(weights, forwards, num_candidates)
    except (ValueError, IndexError) as error:
        raise ModelError(f"engine mtp: the layer of {target.files.name} is damaged: {error}") from None
    raise ModelError("engine mtp: its layer runs in our kernels, and the model does not run there")


class NativePredictorRows:
    """All rows in one forward through the compiled kernels, on the target's threads."""

    def __init__(self, weights: PredictorWeights, forwards: Forwards, team: Team, num_candidates: int) -> None:
        """Raises ValueError or IndexError for weights that do not fit together."""
        self._weights, self._forwards, self._num_candidates = weights, forwards, num_candidates
        self._layer = NativeLayers(weights.sizes, [weights.layer], weights.rotary, team)
        self._cache_shape = cache_shape_of(weights.sizes, forwards.device)

    def new_room(self, sequence: Sequence) -> Room:
        hidden = torch.empty(self._forwards.hidden_size, dtype=self._forwards.dtype)
        return TorchRoom.of(sequence, FullKVCache(self._cache_shape, NUM_ENTRIES), hidden, NUM_PLACES)

    @torch.inference_mode()
    def run(self, parts: list[DraftRows]) -> list[list[Candidates]]:
        weights = self._weights
        token_ids = torch.tensor([token_id for part in parts for token_id in part.rows.token_ids])
        state = weights.joined(self._forwards.embed(token_ids), features_of(parts)).contiguous()
        self._layer.run([part.rows for part in parts], range(1), state)
        wanted = wanted_rows(parts)
        if not wanted:
            return [[] for _ in parts]
        normed = weights.normed(state[wanted])
        features = normed if weights.feeds_normed else state[wanted].to(normed.dtype)
        return keep_and_rank(parts, features, self._forwards.logits(normed), self._num_candidates)


def cache_shape_of(sizes: DecoderSizes, device: torch.device) -> CacheShape:
    """The shape of the layer's cache."""
    num_parts = 2 if sizes.latent is None else 1
    return CacheShape(1, sizes.num_kv_heads, sizes.head_dim, sizes.dtype, device, num_parts=num_parts)
