"""Writes results of ended jobs, many in one segment, then clears their checkpoints."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from secrets import token_hex
from typing import Any

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.output_line import num_completion_tokens
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import in_parallel
from swiftbatch.worker.session.work_messages import JobOutcome

MOST_RESULTS, MOST_BYTES, MOST_SECONDS = 1000, 16 * 2**20, 30.0  # waiting results reach a segment at any of these


class Sealing:
    """Results of one worker. `sealed` and `flush` raise StoreError when the store has failed for good."""

    def __init__(self, run: Run, worker_id: str, seconds: float, num_tokens: int) -> None:
        """Results that are older than `seconds`, or of a job of `num_tokens`, do not wait for others."""
        self._run, self._checkpoints = run, CheckpointStore.of(run)
        self._seconds, self._num_tokens = seconds, num_tokens
        self._name, self._numbers = f"{worker_id}-{token_hex(8)}", count(1)  # no other worker has this name
        self._begin_segment()
        self._pool = ThreadPoolExecutor(1, "seals")
        self._under_way: deque[Future[list[JobOutcome]]] = deque()

    def add(self, job_id: str, line: dict[str, Any], *, clears: bool) -> None:
        """Add an ended job's output line; with `clears`, delete the job's checkpoints once the line is written."""
        if not self._waiting.index:
            self._since = time.monotonic()
        self._waiting.add(job_id, line)
        self._cleared += [job_id] if clears else []
        self._has_long |= num_completion_tokens(line) >= self._num_tokens

    def seal_due(self) -> None:
        """Start to write if the waiting results are many, are old, or include a long job's."""
        num_results, num_bytes = len(self._waiting.index), self._waiting.num_bytes
        is_much = num_results >= MOST_RESULTS or num_bytes >= MOST_BYTES or self._has_long
        if num_results and (is_much or time.monotonic() - self._since >= min(MOST_SECONDS, self._seconds)):
            self.seal()

    def seal(self) -> None:
        if self._waiting.index:
            name = f"{self._name}-{next(self._numbers):04d}"
            self._under_way.append(self._pool.submit(self._write, name, self._waiting, self._cleared))
            self._begin_segment()

    def _begin_segment(self) -> None:
        self._waiting, self._cleared = ResultSegment(), list[str]()  # the jobs to clear
        self._since, self._has_long = 0.0, False

    def sealed(self) -> list[JobOutcome]:
        found: list[JobOutcome] = []
        while self._under_way and self._under_way[0].done():
            found += self._under_way.popleft().result()
        return found

    def flush(self) -> list[JobOutcome]:
        """Write the waiting results; return the finished jobs."""
        self.seal()
        under_way, self._under_way = self._under_way, deque()
        return [outcome for seal in under_way for outcome in seal.result()]

    def _write(self, name: str, segment: ResultSegment, cleared: list[str]) -> list[JobOutcome]:
        self._run.write_segment(name, segment)
        in_parallel(self._checkpoints.clear, cleared)
        return [JobOutcome("finished", job_id, num_tokens) for job_id, _, _, num_tokens in segment.index]
