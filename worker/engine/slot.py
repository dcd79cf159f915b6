"""A running sequence with its cache on the device."""

from __future__ import annotations

from dataclasses import dataclass

from swiftbatch.worker.constraints.constrained_tree import Constraints
from swiftbatch.worker.engine.stopping import StopRule
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.batch_sampler import Sampler
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import Walk


@dataclass
class Slot:
    """A sequence and its cache of every token but the last, which the next step's root row adds."""

    sequence: Sequence
    cache: FullKVCache
    sampler: Sampler
    stop_rule: StopRule
    constraints: Constraints
    num_shared_tokens: int = 0  # first ones known to be shared with other, perhaps later, sequences

    @property
    def num_to_prefill(self) -> int:
        """Return how many tokens before the last one the cache lacks."""
        return len(self.sequence) - 1 - self.cache.length

    def up_to_its_end(self, walk: Walk) -> Walk:
        """Cut a walk off at the sequence's end, and set the sequence's finish reason."""
        for num_tokens, token_id in enumerate(walk.drawn, 1):
            self.sequence.finish_reason = self.stop_rule.after(token_id)
            if self.sequence.finish_reason is not None:
                return walk.until(num_tokens)
        return walk
