"""Writes results of ended jobs, many in one segment, then clears their checkpoints."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from secrets import token_hex

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.result_files import SealedResult
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import NUM_READERS
from swiftbatch.worker.session.work_messages import JobOutcome

MOST_RESULTS, MOST_BYTES, MOST_SECONDS = 1000, 16 * 2**20, 30.0  # waiting results reach a segment at any of these


class Sealing:
    """Results of one worker. `sealed` and `flush` raise StoreError when the store has failed for good."""

    def __init__(self, run: Run, worker_id: str, seconds: float, num_tokens: int) -> None:
        """Results that are older than `seconds`, or of a job of `num_tokens`, do not wait for others."""
        self._run, self._checkpoints = run, CheckpointStore.of(run)
        self._seconds, self._num_tokens = seconds, num_tokens
        self._name, self._numbers = f"{worker_id}-{token_hex(8)}", count(1)  # no other worker has this name
        self._waiting: list[tuple[SealedResult, bool]] = []
        self._num_bytes, self._since, self._has_long = 0, 0.0, False
        self._pool = ThreadPoolExecutor(1, "seals")
        self._under_way: deque[Future[list[JobOutcome]]] = deque()

    def add(self, result: SealedResult, *, clears: bool) -> None:
        """Add an ended job's result; with `clears`, delete the job's checkpoints once the result is written."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append((result, clears))
        self._num_bytes += len(result.line)
        self._has_long |= result.num_tokens >= self._num_tokens

    def seal_due(self) -> None:
        """Start to write if the waiting results are many, are old, or include a long job's."""
        is_much = len(self._waiting) >= MOST_RESULTS or self._num_bytes >= MOST_BYTES or self._has_long
        if self._waiting and (is_much or time.monotonic() - self._since >= min(MOST_SECONDS, self._seconds)):
            self.seal()

    def seal(self) -> None:
        if self._waiting:
            name = f"{self._name}-{next(self._numbers):04d}"
            self._under_way.append(self._pool.submit(self._write, name, self._waiting))
            self._waiting, self._num_bytes, self._has_long = [], 0, False

    def sealed(self) -> list[JobOutcome]:
        """Return the jobs that finished since the last call."""
        found: list[JobOutcome] = []
        while self._under_way and self._under_way[0].done():
            found += self._under_way.popleft().result()
        return found

    def flush(self) -> list[JobOutcome]:
        """Write the waiting results; return the finished jobs."""
        self.seal()
        under_way, self._under_way = self._under_way, deque()
        return [outcome for seal in under_way for outcome in seal.result()]

    def _write(self, name: str, results: list[tuple[SealedResult, bool]]) -> list[JobOutcome]:
        self._run.write_segment(name, [result for result, _ in results])
        with ThreadPoolExecutor(NUM_READERS) as pool:
            list(pool.map(self._checkpoints.clear, [result.job_id for result, clears in results if clears]))
        return [JobOutcome("finished", result.job_id, result.num_tokens) for result, _ in results]
