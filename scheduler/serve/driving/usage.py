"""The usage of owners: the tokens of their batches, as if each batch had brought its own evenly over its time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import exp2, log

from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.serve.batch_status import is_submitted
from swiftbatch.scheduler.serve.batches import Batch
from swiftbatch.scheduler.serve.driving.queue import Standing
from swiftbatch.scheduler.serve.keys.api_key import Rights

DAY = 86400.0
HALF_LIFE = 3600.0  # in which tokens come to weigh half as much between owners
BEGUN_TOKENS = 10_000  # the least weight of a running batch: else an owner who had none yet would begin many at once


@dataclass(frozen=True)
class Usage:
    """Tokens that were generated from one moment to another, both in seconds since the epoch."""

    num_tokens: int
    begun: float
    ended: float

    def since(self, moment: float) -> float:
        """The number of tokens that came after a moment."""
        if self.begun >= moment:
            return self.num_tokens
        if self.ended <= moment:
            return 0.0
        return self.num_tokens * (self.ended - moment) / (self.ended - self.begun)

    def decayed(self, now: float) -> float:
        """The tokens, of which those of an hour ago weigh half, and those of two hours ago a quarter."""
        at_end = exp2((self.ended - now) / HALF_LIFE)
        at_begin = exp2((self.begun - now) / HALF_LIFE)
        num_half_lives = (self.ended - self.begun) / HALF_LIFE
        if num_half_lives < 1e-6:
            return self.num_tokens * at_end
        return self.num_tokens * (at_end - at_begin) / (num_half_lives * log(2))


def standing_of(rights: Rights, at_rest: Collection[Usage], running: Collection[Usage], now: float) -> Standing:
    """The standing of an owner by the usage of batches that run and of those that do not. `now` since the epoch."""
    return Standing(
        recent_tokens=sum(each.decayed(now) for each in at_rest)
        + sum(max(BEGUN_TOKENS, each.decayed(now)) for each in running),
        tokens_of_day=sum(each.since(now - DAY) for each in (*at_rest, *running)),
        max_tokens_per_day=rights.max_tokens_per_day,
        max_running=rights.max_running,
    )


def usage_so_far(batch: Batch) -> Usage | None:
    """The usage of a batch that has not ended, as its folder says. Raises RunError, StoreError."""
    if not is_submitted(batch.store):
        return None
    run = Run.open(batch.store.uri)
    progress, created = run.progress(), run.manifest.created
    return None if progress is None else Usage(progress.num_total_tokens, created, max(created, progress.updated))


def usage_of_ended(batch: Batch) -> Usage | None:
    """The usage of a batch in all; None for one that never ran, or has not ended."""
    ended = batch.ended
    if ended is None or ended.in_progress is None:
        return None
    return Usage(ended.num_total_tokens, min(ended.in_progress, ended.ended), ended.ended)
