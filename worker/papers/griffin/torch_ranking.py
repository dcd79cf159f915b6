"""The ranking in torch of candidates behind a draft's rows, with the penalty and noise that the target will have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from swiftbatch.worker.caches.full_cache import FullKVCache
from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.drawing.sampling import TokenSampler
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.papers.griffin.draft_input import NUM_PLACES, Candidates, DraftRows, Features, Room, of_each

SPREAD = 0.4  # error of the draft model's logits, so that scores are about as likely as they say


@dataclass(frozen=True)
class TorchRoom(Room):
    """A room outside any graph."""

    sampler: TokenSampler  # knows some first tokens of the sequence

    @classmethod
    def of(
        cls, sequence: Sequence, cache: FullKVCache, features_like: torch.Tensor, num_places: int = NUM_PLACES
    ) -> TorchRoom:
        """Make room for features `[hidden]` of this dtype, on this device."""
        buffer = features_like.new_zeros(num_places, len(features_like))
        sampler = TokenSampler(sequence, sequence.vocab_size, buffer.device)
        return cls(sequence, cache, Features(buffer), sampler)

    def rank(self, logits: torch.Tensor, paths: list[list[int]], width: int) -> list[Candidates]:
        """The best `width` tokens behind each path, by guessed logits `[num_rows, vocab] float32`."""
        if not paths:
            return []
        for token_id in self.sequence.token_ids[self.sampler.position :].tolist():
            self.sampler.push(token_id)
        ranker = CandidateRanker(self.sequence, spread=SPREAD)
        return ranker.rank_logits(self.sampler.penalised(logits), [1 + len(path) for path in paths], width)


def keep_and_rank(
    parts: list[DraftRows], regressed: torch.Tensor, logits: torch.Tensor, width: int
) -> list[list[Candidates]]:
    """Keep `regressed [num_wanted, hidden]` of the trees' rows, and rank by their `logits [num_wanted, vocab]`."""
    found: list[Candidates] = []
    start = 0
    for part in parts:
        own = slice(start, start + len(part.paths))
        part.room.features.keep(part.first, regressed[own])
        found += cast(TorchRoom, part.room).rank(logits[own], part.paths, width)
        start = own.stop
    return of_each(parts, found)
