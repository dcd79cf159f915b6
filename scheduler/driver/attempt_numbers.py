"""Numbers the attempts at jobs and counts them.

An attempt's number is its driver's unique epoch x 1,000,000 + a count, so no two attempts share files.

attempts/<epoch:04d>.json    attempts of each handed-out job without a result, over all drivers,
                             and its losses in a row without progress
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from pydantic import Field

from swiftbatch.jobs.checkpoints.checkpoint_files import NUMBERS_PER_EPOCH
from swiftbatch.jobs.json_records import Strict, parse_sealed, sealed
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.driver.queued_job import Strikes

FOLDER = "attempts"

logger = logging.getLogger(__name__)


class AttemptCounts(Strict):
    attempts: dict[str, int]  # by job
    strikes: dict[str, Strikes] = Field(default_factory=dict)  # jobs without strikes are omitted


class Attempts:
    """The attempts at a run's jobs; a thread does the slow writes.

    After a kill, an attempt that left no file may go uncounted, but its number is never reused.
    """

    def __init__(
        self, store: Store, epoch: int, counts: dict[str, int], strikes: dict[str, Strikes] | None = None
    ) -> None:
        """Begin with the `counts` and `strikes` that earlier drivers wrote."""
        self._store, self._epoch, self._counts = store, epoch, counts
        self._strikes = strikes or {}
        self._newest: dict[str, int] = {}  # by job
        self._has_changed = False
        self._pool = ThreadPoolExecutor(1, "attempts")
        self._write: Future[None] | None = None

    @classmethod
    def read(cls, store: Store, epoch: int) -> Self:
        """Continue earlier drivers' counts. Raises StoreError."""
        found = _read_counts(store)
        return cls(store, epoch, dict(found.attempts), dict(found.strikes))

    def counted(self) -> Collection[str]:
        """Return the jobs with attempts and no known result."""
        return self._counts.keys()

    def note_found(self, job_id: str, numbers: Collection[int]) -> None:
        """Record the attempts that left files."""
        newest = max(numbers, default=0)
        self._newest[job_id] = self._base(newest)
        self._counts[job_id] = max(len(numbers), self.count(job_id))

    def begin(self, job_id: str) -> tuple[int, int]:
        """Begin a job's next attempt; return its number and the count of attempts."""
        number, _ = self.number(job_id)
        return number, self.note_begun(job_id)

    def number(self, job_id: str) -> tuple[int, int]:
        """Reserve a number as `begin` does; the attempt counts once it begins."""
        self._newest[job_id] = number = self.newest(job_id) + 1
        return number, self.count(job_id) + 1

    def note_begun(self, job_id: str) -> int:
        """Count a reserved attempt; return the count."""
        self._counts[job_id] = num_attempts = self.count(job_id) + 1
        self._has_changed = True
        return num_attempts

    def give_back(self, job_id: str) -> None:
        """Take back an attempt that never begins."""
        self._newest[job_id] -= 1

    def newest(self, job_id: str) -> int:
        """Return the newest attempt's number, or the number before the first attempt's."""
        return self._newest.get(job_id, self._base(0))

    def count(self, job_id: str) -> int:
        return self._counts.get(job_id, 0)

    def strikes(self, job_id: str) -> Strikes | None:
        """Return a job's losses without progress."""
        return self._strikes.get(job_id)

    def note_strikes(self, job_id: str, strikes: Strikes | None) -> None:
        """Set a job's losses without progress; `strikes` of None resets the losses."""
        if strikes is None:
            self._has_changed |= self._strikes.pop(job_id, None) is not None
        else:
            self._strikes[job_id], self._has_changed = strikes, True

    def finish(self, job_id: str) -> None:
        """Forget a job with a result; a failed one may be retried."""
        self._newest.pop(job_id, None)
        self._strikes.pop(job_id, None)
        self._has_changed |= self._counts.pop(job_id, None) is not None

    def keep(self) -> None:
        """Start writing changed counts; call it with every heartbeat. Raises StoreError."""
        if self._write is not None and self._write.done():
            self._write.result()
            self._write = None
        if self._has_changed and self._write is None:
            self._has_changed = False
            self._write = self._pool.submit(_write_counts, self._store, self._epoch, self._content())

    def end(self) -> None:
        """Write the counts and wait; no attempt begins any more. Raises StoreError."""
        self._pool.submit(_write_counts, self._store, self._epoch, self._content()).result()

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _content(self) -> AttemptCounts:
        return AttemptCounts.model_construct(attempts=self._counts.copy(), strikes=self._strikes.copy())

    def _base(self, newest: int) -> int:
        """Return the number before the first attempt.

        `newest` belongs to an earlier epoch, unless files were copied or `drivers/` was deleted. In that case the sum
        of both epochs keeps new numbers above `newest`.
        """
        epoch_there = newest // NUMBERS_PER_EPOCH
        epoch = self._epoch if epoch_there < self._epoch else epoch_there + self._epoch
        return epoch * NUMBERS_PER_EPOCH


def forget_strikes(store: Store, epoch: int, job_ids: Collection[str]) -> None:
    """Reset the strikes of retried jobs. Raises StoreError.

    The driver that gave the jobs up may have been killed before it reset their strikes.
    """
    found = _read_counts(store)
    if forgotten := found.strikes.keys() & job_ids:
        strikes = {job_id: each for job_id, each in found.strikes.items() if job_id not in forgotten}
        _write_counts(store, epoch, AttemptCounts(attempts=found.attempts, strikes=strikes))


def _write_counts(store: Store, epoch: int, content: AttemptCounts) -> None:
    """Write a driver's file and delete older files; if there are no counts, delete all files."""
    if content.attempts:
        store.write(f"{FOLDER}/{epoch:04d}.json", sealed(content.model_dump_json().encode()))
    for name in store.list(FOLDER):
        if _epoch_of(name) < epoch or (_epoch_of(name) == epoch and not content.attempts):
            store.delete(f"{FOLDER}/{name}")


def _read_counts(store: Store) -> AttemptCounts:
    """Read the newest driver's counts; damaged files are logged and skipped."""
    for name in sorted(store.list(FOLDER), key=_epoch_of, reverse=True):
        data = store.read(f"{FOLDER}/{name}")
        try:
            return parse_sealed(data or b"", AttemptCounts)
        except ValueError as error:
            where = f"{FOLDER}/{name} in {store.shown_uri}"
            logger.warning("skipped %s: %s; earlier attempts at some jobs are not counted", where, error)
    return AttemptCounts(attempts={})


def _epoch_of(name: str) -> int:
    number = name.removesuffix(".json")
    return int(number) if number.isdecimal() else 0
