"""Claims attempts at jobs beside the driver's loop, many at a time: a store takes its time for each.

An attempt is claimed as ever, by a file of its own that no two claims can both have made. Only who waits has changed:
the loop goes on with reports and heartbeats, and a worker hears of a job once its claim is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore

NUM_CLAIMERS = 32
PATIENCE_SECONDS = 0.05  # of the loop: a local disk is done by then, so that a worker need not wait for another turn


class Claims:
    """The attempts that were asked for, and those that are made."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = checkpoints
        self._pool = ThreadPoolExecutor(NUM_CLAIMERS, "claims")
        self._asked: defaultdict[str, dict[str, Future[int]]] = defaultdict(dict)  # by worker and job
        self._under_way: dict[str, Future[int]] = {}  # the newest of each job

    def ask(self, job_id: str, worker_id: str, numerics: str) -> None:
        """Begin to claim the next attempt at a job for a worker."""
        claim = self._pool.submit(self._claim, self._under_way.get(job_id), job_id, worker_id, numerics)
        self._asked[worker_id][job_id] = self._under_way[job_id] = claim

    def wait(self) -> None:
        """Wait a moment for what is under way."""
        if self._under_way:
            wait(self._under_way.values(), PATIENCE_SECONDS)
            self._under_way = {job_id: claim for job_id, claim in self._under_way.items() if not claim.done()}

    def under_way(self, worker_id: str) -> Collection[str]:
        """The ids of the jobs whose attempts are still to be claimed for a worker."""
        return self._asked.get(worker_id, {}).keys()

    def made(self, worker_id: str) -> dict[str, int]:
        """The attempts at jobs that were claimed for a worker since the last call. Raises StoreError."""
        asked = self._asked.pop(worker_id, {})
        if waiting := {job_id: claim for job_id, claim in asked.items() if not claim.done()}:
            self._asked[worker_id] = waiting
        return {job_id: claim.result() for job_id, claim in asked.items() if job_id not in waiting}

    def stop(self) -> None:
        """Claim nothing more; what is under way is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _claim(self, before: Future[int] | None, job_id: str, worker_id: str, numerics: str) -> int:
        if before is not None:  # of a worker that was lost: an object store may give two at once the same number
            wait([before])
        return self._checkpoints.claim(job_id, worker_id, numerics)
