"""Chooses the next batch by its owner's recent tokens, then priority and age."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import exp2, log
from typing import Literal

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.scheduler.serve.batches.batch_driver import DriverProcess
from swiftbatch.scheduler.serve.records.api_keys import Rights
from swiftbatch.scheduler.serve.records.batch_status import is_submitted
from swiftbatch.scheduler.serve.records.stored_objects import Batch

MAX_EXPIRED = 1  # extra batches at a time that only read their lines and run nothing
DAY = 86400.0
HALF_LIFE = 3600.0  # seconds after which an owner's tokens weigh half
BEGUN_TOKENS = 10_000  # least weight of a running batch, so that a new owner can't begin many at once


@dataclass(frozen=True)
class Standing:
    """An owner's usage and limits; None is no limit."""

    recent_tokens: float = 0.0
    tokens_of_day: float = 0.0
    max_tokens_per_day: int | None = None
    max_running: int | None = None

    def hindrance(self, num_running: int) -> str | None:
        """Explain why no batch of the owner may begin; None if one may."""
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
    standing_of: Callable[[str | None], Standing],
) -> Batch | None:
    """Return the batch to begin; expired ones need not wait."""
    expired = [batch for batch in waiting if batch.has_expired()]
    num_expired = sum(batch.has_expired() for batch in running)
    if expired and num_expired < MAX_EXPIRED:
        return min(expired, key=_age)
    if len(running) - num_expired >= max_running:
        return None
    num_running = Counter(batch.owner for batch in running)
    in_time = [batch for batch in waiting if not batch.has_expired()]
    standings = {owner: standing_of(owner) for owner in {batch.owner for batch in in_time}}
    may_begin = {owner for owner, each in standings.items() if each.hindrance(num_running[owner]) is None}

    def rank(batch: Batch) -> tuple[float, int, int, float, str]:
        recent_tokens = standings[batch.owner].recent_tokens
        return recent_tokens, num_running[batch.owner], batch.record.priority, *_age(batch)

    return min((batch for batch in in_time if batch.owner in may_begin), key=rank, default=None)


def _age(batch: Batch) -> tuple[float, str]:
    return batch.created, batch.id


@dataclass(frozen=True)
class Usage:
    """Tokens, worker time and cost of a batch between two times in seconds since the epoch; None is no price."""

    num_tokens: int  # generated, those of lines that were given up included
    begun: float
    ended: float
    worker_seconds: float = 0.0
    cost: float | None = None
    num_input_tokens: int = 0  # of lines in the output file, like the next
    num_output_tokens: int = 0

    def since(self, moment: float) -> float:
        if self.begun >= moment:
            return self.num_tokens
        if self.ended <= moment:
            return 0.0
        return self.num_tokens * (self.ended - moment) / (self.ended - self.begun)

    def decayed(self, now: float) -> float:
        """Return the tokens, halved per hour of age."""
        at_end = exp2((self.ended - now) / HALF_LIFE)
        at_begin = exp2((self.begun - now) / HALF_LIFE)
        num_half_lives = (self.ended - self.begun) / HALF_LIFE
        if num_half_lives < 1e-6:
            return self.num_tokens * at_end
        return self.num_tokens * (at_end - at_begin) / (num_half_lives * log(2))


def standing_of(rights: Rights, at_rest: Collection[Usage], running: Collection[Usage], now: float) -> Standing:
    """Return an owner's standing; `now` in seconds since the epoch."""
    return Standing(
        recent_tokens=sum(each.decayed(now) for each in at_rest)
        + sum(max(BEGUN_TOKENS, each.decayed(now)) for each in running),
        tokens_of_day=sum(each.since(now - DAY) for each in (*at_rest, *running)),
        max_tokens_per_day=rights.max_tokens_per_day,
        max_running=rights.max_running,
    )


def usage_so_far(batch: Batch) -> Usage | None:
    """Read an unfinished batch's usage from its folder. Raises RunError, StoreError."""
    if not is_submitted(batch.store):
        return None
    run = Run.open(batch.store.uri)
    progress, created = run.progress(), run.manifest.created
    if progress is None:
        return None
    last = max(created, progress.updated)
    return Usage(progress.num_total_tokens, created, last, progress.worker_seconds, progress.cost)


def usage_of_ended(batch: Batch) -> Usage | None:
    ended = batch.ended
    if ended is None:
        return None
    return Usage(
        num_tokens=ended.num_total_tokens,
        begun=min(ended.in_progress or ended.ended, ended.ended),
        ended=ended.ended,
        worker_seconds=ended.worker_seconds,
        cost=ended.cost,
        num_input_tokens=ended.num_input_tokens or 0,
        num_output_tokens=ended.num_generated_tokens,
    )


def usage_of(batch: Batch) -> Usage | None:
    """Return a batch's usage as its folder says; None before it begins or if its run is damaged. Raises StoreError."""
    if batch.ended is not None:
        return usage_of_ended(batch)
    try:
        return usage_so_far(batch)
    except RunError:
        return None


Stage = Literal["to_settle", "settling", "waiting", "running", "ended"]


@dataclass
class Course:
    """The state of a batch in this server."""

    batch: Batch
    stage: Stage = "to_settle"
    driver: DriverProcess | None = None  # the newest one, even after its end
    settling: Future[bool] | None = None
    is_asked_to_cancel: bool = False
    num_failures: int = 0  # in a row
    not_before: float = 0.0  # in `time.monotonic()` seconds
    problem: str = ""  # why the last attempt failed
    usage: Usage | None = None

    def begin(self, driver: DriverProcess) -> None:
        self.driver, self.stage = driver, "running"
        self.usage = self.usage_now(time.time())

    def usage_now(self, now: float) -> Usage:
        before = self.usage or Usage(0, now, now)
        if self.driver is None or self.stage == "waiting":
            return before
        num_tokens = max(before.num_tokens, self.driver.num_total_tokens)
        return replace(before, num_tokens=num_tokens, ended=max(before.ended, now))

    def is_due(self) -> bool:
        return self.stage == "waiting" and time.monotonic() >= self.not_before


FRESH_SECONDS = 1.0  # standings are computed at most once in this time


class Standings:
    """The usage of batches that ended within a day, and owners' standings."""

    def __init__(self, batches: Iterable[Batch], rights: Callable[[str | None], Rights]) -> None:
        self._rights = rights
        self._ended: defaultdict[str | None, list[Usage]] = defaultdict(list)
        self._known: dict[str | None, tuple[float, Standing]] = {}
        for batch in batches:
            if (usage := usage_of_ended(batch)) is not None:
                self._ended[batch.owner].append(usage)
        for owner, usages in self._ended.items():
            self._ended[owner] = _of_a_day(usages)

    def add_ended(self, batch: Batch) -> None:
        if (usage := usage_of_ended(batch)) is not None:
            self._ended[batch.owner] = _of_a_day([*self._ended[batch.owner], usage])

    def forget(self) -> None:
        self._known.clear()

    def of(self, owner: str | None, courses: Iterable[Course]) -> Standing:
        """Return an owner's standing, including its batches in `courses`."""
        now = time.time()
        computed, standing = self._known.get(owner, (-FRESH_SECONDS, Standing()))
        if not 0 <= now - computed < FRESH_SECONDS:
            own = [course for course in courses if course.batch.owner == owner]
            running = [course.usage_now(now) for course in own if course.stage == "running"]
            at_rest = [course.usage_now(now) for course in own if course.stage != "running"]
            standing = standing_of(self._rights(owner), [*self._ended[owner], *at_rest], running, now)
            self._known[owner] = now, standing
        return standing


def _of_a_day(usages: Iterable[Usage]) -> list[Usage]:
    now = time.time()
    return [each for each in usages if now - each.ended < DAY]
