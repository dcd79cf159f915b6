"""Writes the results of a worker's ended jobs, many in one segment. A job has finished once its segment is there.

Its checkpoints go after that: until then it would be resumed from them if the worker were lost.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from secrets import token_hex

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.result_files import SealedResult
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import NUM_READERS
from swiftbatch.worker.session.work_messages import JobOutcome

MOST_RESULTS, MOST_BYTES, MOST_SECONDS = 1000, 16 * 2**20, 30.0  # of results that wait to be sealed


@dataclass(frozen=True)
class SealingRule:
    """The most that a lost worker may cost beside its running jobs: work of so many seconds, and no job so long."""

    seconds: float
    num_tokens: int


class Sealing:
    """The results of one worker. Segments are written in a thread, one after the other.

    `sealed` and `flush` raise StoreError when the store has failed for good.
    """

    def __init__(self, run: Run, worker_id: str, rule: SealingRule) -> None:
        self._run, self._checkpoints = run, CheckpointStore.of(run)
        self._rule = rule
        self._name, self._numbers = f"{worker_id}-{token_hex(8)}", count(1)  # no other worker has the name, ever
        self._waiting: list[tuple[SealedResult, bool]] = []
        self._num_bytes, self._since, self._has_long = 0, 0.0, False
        self._pool = ThreadPoolExecutor(1, "seals")
        self._under_way: deque[Future[list[JobOutcome]]] = deque()

    def add(self, result: SealedResult, *, clears: bool) -> None:
        """Take the result of a job that has just ended; with `clears` its checkpoints go once it is there."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append((result, clears))
        self._num_bytes += len(result.line)
        self._has_long |= result.num_tokens >= self._rule.num_tokens

    def seal_due(self) -> None:
        """Begin to write what waits if it is much, old, or has a long job that would be dear to do again."""
        is_much = len(self._waiting) >= MOST_RESULTS or self._num_bytes >= MOST_BYTES or self._has_long
        if self._waiting and (is_much or time.monotonic() - self._since >= min(MOST_SECONDS, self._rule.seconds)):
            self.seal()

    def seal(self) -> None:
        """Begin to write all that waits."""
        if self._waiting:
            name = f"{self._name}-{next(self._numbers):04d}"
            self._under_way.append(self._pool.submit(self._write, name, self._waiting))
            self._waiting, self._num_bytes, self._has_long = [], 0, False

    def sealed(self) -> list[JobOutcome]:
        """The jobs that have finished since the last call."""
        found: list[JobOutcome] = []
        while self._under_way and self._under_way[0].done():
            found += self._under_way.popleft().result()
        return found

    def flush(self) -> list[JobOutcome]:
        """Write all that waits; returns the jobs that have finished since the last call of `sealed`."""
        self.seal()
        under_way, self._under_way = self._under_way, deque()
        return [outcome for seal in under_way for outcome in seal.result()]

    def _write(self, name: str, results: list[tuple[SealedResult, bool]]) -> list[JobOutcome]:
        self._run.write_segment(name, [result for result, _ in results])
        with ThreadPoolExecutor(NUM_READERS) as pool:
            list(pool.map(self._checkpoints.clear, [result.job_id for result, clears in results if clears]))
        return [JobOutcome("finished", result.job_id, result.num_tokens) for result, _ in results]
