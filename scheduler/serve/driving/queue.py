"""Chooses the batch to run next: between owners by what they had lately, then by priority and age."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swiftbatch.scheduler.serve.batches import Batch

MAX_EXPIRED = 1  # beside the others: they are read to name their lines, and run nothing


@dataclass(frozen=True)
class Standing:
    """The standing of an owner. `recent_tokens` weigh less the longer ago they were generated; None is no limit."""

    recent_tokens: float = 0.0
    tokens_of_day: float = 0.0
    max_tokens_per_day: int | None = None
    max_running: int | None = None

    def hindrance(self, num_running: int) -> str | None:
        """The reason why no batch of the owner may begin while so many run, for people; None if one may."""
        if self.max_running is not None and num_running >= self.max_running:
            return f"{num_running} of at most {self.max_running} batches of its key are running"
        if self.max_tokens_per_day is not None and self.tokens_of_day >= self.max_tokens_per_day:
            return (
                f"its key has generated {int(self.tokens_of_day):,} tokens in 24 hours, and a batch begins below "
                f"{self.max_tokens_per_day:,}"
            )
        return None


def next_batch(
    waiting: Sequence[Batch],
    running: Sequence[Batch],
    max_running: int,
    now: float,
    standing_of: Callable[[str | None], Standing],
) -> Batch | None:
    """The batch to begin, if another one may run: of the owner with the fewest recent tokens, by priority and age.

    One whose time is up need not wait for others to end. `now` in seconds since the epoch; `standing_of` is asked of
    the owners of waiting batches once there is room.
    """
    expired = [batch for batch in waiting if batch.has_expired(now)]
    num_expired = sum(batch.has_expired(now) for batch in running)
    if expired and num_expired < MAX_EXPIRED:
        return min(expired, key=_age)
    if len(running) - num_expired >= max_running:
        return None
    num_running = Counter(batch.owner for batch in running)
    in_time = [batch for batch in waiting if not batch.has_expired(now)]
    standings = {owner: standing_of(owner) for owner in {batch.owner for batch in in_time}}
    may_begin = {owner for owner, each in standings.items() if each.hindrance(num_running[owner]) is None}

    def rank(batch: Batch) -> tuple[float, int, int, float, str]:
        recent_tokens = standings[batch.owner].recent_tokens
        return recent_tokens, num_running[batch.owner], batch.record.priority, *_age(batch)

    return min((batch for batch in in_time if batch.owner in may_begin), key=rank, default=None)


def _age(batch: Batch) -> tuple[float, str]:
    return batch.created, batch.id
