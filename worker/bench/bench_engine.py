"""The engine as benchmarks run it: a sequence that can't go on ends the benchmark."""

from __future__ import annotations

import hashlib

import numpy as np

from swiftbatch.jobs.errors import UserError
from swiftbatch.worker.caches.full import FullKVCache
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.verification import Verification
from swiftbatch.worker.engine.engine import Engine


class BenchError(UserError):
    """A benchmark that cannot be run as asked."""


class BenchEngine(Engine):
    """An engine that has no use for sequences that failed."""

    def step(self) -> list[tuple[Sequence, Verification]]:
        """Step as `Engine.step` does. Raises BenchError where a sequence can't go on."""
        results = super().step()
        for sequence in self.sequences:
            if sequence.error is not None:
                raise BenchError(sequence.error)
        return results


class OwnPositions:
    """Positions of one generation, behind the prompt, in a cache that other generations use as well.

    Nothing moves in a cache with states: each generation has one of its own.
    """

    def __init__(self, cache: FullKVCache) -> None:
        self.cache = cache
        self._first = cache.length
        self._kv = cache.kv(0, 0).copy()

    def emptied(self) -> OwnPositions:
        """Return the same place in the cache, for a generation that begins there; the cache ends at it."""
        self.cache.roll_back(min(self.cache.length, self._first))
        return OwnPositions(self.cache)

    def put_back(self) -> None:
        """Put the positions back into the cache, before the generation goes on."""
        if not self.cache.is_by_position:
            return
        self.cache.roll_back(self._first)
        self.cache.load(self._kv)

    def take_away(self) -> None:
        """Take the positions out of the cache, before another generation goes on."""
        if not self.cache.is_by_position:
            return
        self._kv = self.cache.kv(self._first, self.cache.length).copy()


def digest(*token_ids: np.ndarray) -> str:
    """SHA-256 over token ids as little-endian uint32, sequence behind sequence."""
    return hashlib.sha256(np.concatenate(token_ids).astype("<u4").tobytes()).hexdigest()
