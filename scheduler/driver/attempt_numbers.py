"""Numbers the attempts at jobs, and keeps how many each job has had.

An attempt's number is its driver's epoch, which nobody else has, and behind that how often this driver has handed the
job out. So no two attempts ever write below one number, and no file says which are taken.

attempts/<epoch:04d>.json    attempts of each job that was handed out and has no result, of all drivers so far, and how
                             many of them were lost in a row without progress
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from pydantic import Field, ValidationError

from swiftbatch.jobs.checkpoints.checkpoint_files import NUMBERS_PER_EPOCH
from swiftbatch.jobs.input.validation_errors import reasons
from swiftbatch.jobs.json_records import Strict, sealed, unsealed
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.driver.waiting_jobs import Strikes

FOLDER = "attempts"

logger = logging.getLogger(__name__)


class AttemptCounts(Strict):
    """The content of a file."""

    attempts: dict[str, int]  # by job
    strikes: dict[str, Strikes] = Field(default_factory=dict)  # of jobs that have some


class Attempts:
    """The attempts at a run's jobs. What takes a store's time is done in a thread, which nobody waits for.

    The file is a beat behind at most: after a driver was killed, an attempt that it had just begun and that has left no
    file is not counted. Its number is never taken again in any case.
    """

    def __init__(
        self, store: Store, epoch: int, counts: dict[str, int], strikes: dict[str, Strikes] | None = None
    ) -> None:
        """`epoch` is the driver's, `counts` and `strikes` are those of earlier ones."""
        self._store, self._epoch, self._counts = store, epoch, counts
        self._strikes = strikes or {}
        self._newest: dict[str, int] = {}  # the number of each job's newest attempt
        self._has_changed = False
        self._pool = ThreadPoolExecutor(1, "attempts")
        self._write: Future[None] | None = None

    @classmethod
    def read(cls, store: Store, epoch: int) -> Self:
        """Go on from what earlier drivers have counted. Raises StoreError."""
        found = _read_counts(store)
        return cls(store, epoch, dict(found.attempts), dict(found.strikes))

    def counted(self) -> Collection[str]:
        """The jobs that have had attempts, and no result so far as this driver knows."""
        return self._counts.keys()

    def note_found(self, job_id: str, numbers: Collection[int]) -> None:
        """Note the attempts at a job that have left files: these may be more than were counted."""
        newest = max(numbers, default=0)
        self._newest[job_id] = self._base(newest)
        self._counts[job_id] = max(len(numbers), self.count(job_id))

    def begin(self, job_id: str) -> tuple[int, int]:
        """Begin the next attempt at a job: returns its number, and how many the job has had with it."""
        number, _ = self.number(job_id)
        return number, self.note_begun(job_id)

    def number(self, job_id: str) -> tuple[int, int]:
        """Number the next attempt at a job as `begin` does; it counts once it has begun."""
        self._newest[job_id] = number = self.newest(job_id) + 1
        return number, self.count(job_id) + 1

    def note_begun(self, job_id: str) -> int:
        """Count the attempt at a job that was reserved; returns how many the job has had with it."""
        self._counts[job_id] = num_attempts = self.count(job_id) + 1
        self._has_changed = True
        return num_attempts

    def give_back(self, job_id: str) -> None:
        """Take back the newest attempt, which never begins: whoever had it has said so."""
        self._newest[job_id] -= 1

    def newest(self, job_id: str) -> int:
        """The number of the newest attempt at a job, or one in front of the first."""
        return self._newest.get(job_id, self._base(0))

    def count(self, job_id: str) -> int:
        """The number of attempts that a job has had, those of earlier drivers included."""
        return self._counts.get(job_id, 0)

    def strikes(self, job_id: str) -> Strikes | None:
        """The attempts at a job that were lost without progress, as earlier drivers and this one have noted."""
        return self._strikes.get(job_id)

    def note_strikes(self, job_id: str, strikes: Strikes | None) -> None:
        """Note such attempts; None where the next ones count anew."""
        if strikes is None:
            self._has_changed |= self._strikes.pop(job_id, None) is not None
        else:
            self._strikes[job_id], self._has_changed = strikes, True

    def finish(self, job_id: str) -> None:
        """Forget a job that has a result. One that failed is kept: it may be tried again some day."""
        self._newest.pop(job_id, None)
        self._strikes.pop(job_id, None)
        self._has_changed |= self._counts.pop(job_id, None) is not None

    def keep(self) -> None:
        """Begin to write the counts if they have changed; call it with every beat. Raises StoreError."""
        if self._write is not None and self._write.done():
            self._write.result()
            self._write = None
        if self._has_changed and self._write is None:
            self._has_changed = False
            self._write = self._pool.submit(_write_counts, self._store, self._epoch, self._content())

    def end(self) -> None:
        """Write the counts, and wait for that: no attempt begins any more. Raises StoreError."""
        self._pool.submit(_write_counts, self._store, self._epoch, self._content()).result()

    def stop(self) -> None:
        """Write nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _content(self) -> AttemptCounts:
        """The content that the file is to have; nobody changes it."""
        return AttemptCounts.model_construct(attempts=self._counts.copy(), strikes=self._strikes.copy())

    def _base(self, newest: int) -> int:
        """The number in front of this driver's first attempt at a job, whose newest one there has the number `newest`.

        Where that is of no earlier epoch, the files come from elsewhere, or somebody has deleted `drivers/`. A later
        driver finds it, or a greater one, and adds more to it: no two have the same base.
        """
        epoch_there = newest // NUMBERS_PER_EPOCH
        epoch = self._epoch if epoch_there < self._epoch else epoch_there + self._epoch
        return epoch * NUMBERS_PER_EPOCH


def forget_strikes(store: Store, epoch: int, job_ids: Collection[str]) -> None:
    """Have jobs that are tried again after an error get all their attempts; for a driver of this epoch, before others.

    The driver that gave a job up may have been killed before it forgot its strikes itself. Raises StoreError.
    """
    found = _read_counts(store)
    if forgotten := found.strikes.keys() & job_ids:
        strikes = {job_id: each for job_id, each in found.strikes.items() if job_id not in forgotten}
        _write_counts(store, epoch, AttemptCounts(attempts=found.attempts, strikes=strikes))


def _write_counts(store: Store, epoch: int, content: AttemptCounts) -> None:
    """Write a driver's file, then delete those of earlier ones, which it holds as well. Without counts none is left."""
    if content.attempts:
        store.write(f"{FOLDER}/{epoch:04d}.json", sealed(content.model_dump_json().encode()))
    for name in store.list(FOLDER):
        if _epoch_of(name) < epoch or (_epoch_of(name) == epoch and not content.attempts):
            store.delete(f"{FOLDER}/{name}")


def _read_counts(store: Store) -> AttemptCounts:
    """The counts of the newest driver that has written some; a damaged file is named and passed over."""
    for name in sorted(store.list(FOLDER), key=_epoch_of, reverse=True):
        data = store.read(f"{FOLDER}/{name}")
        try:
            if (text := unsealed(data or b"")) is not None:
                return AttemptCounts.model_validate_json(text)
            problem = "found no checksum"
        except ValidationError as error:
            problem = reasons(error, AttemptCounts)
        except ValueError as error:
            problem = str(error)
        where = f"{FOLDER}/{name} in {store.shown_uri}"
        logger.warning("skipped %s: %s; earlier attempts at some jobs are not counted", where, problem)
    return AttemptCounts(attempts={})


def _epoch_of(name: str) -> int:
    number = name.removesuffix(".json")
    return int(number) if number.isdecimal() else 0
