"""Writes a run's shards in a thread beside the driver's loop."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.shards import MAX_SHARD_BYTES, Shards, WrittenShard, shard_settings
from swiftbatch.scheduler.display.display import Display
from swiftbatch.scheduler.display.events import ShardWritten
from swiftbatch.scheduler.driver.run_lease import LeaseEpoch

TOKENS_PER_CHECK = MAX_SHARD_BYTES // 4  # roughly a shard's bytes in tokens; the look measures the results


class ShardWriter:
    """The shards of a held run, if any. Methods raise StoreError, RunError, RunTakenError."""

    def __init__(self, run: Run, epoch: LeaseEpoch, display: Display) -> None:
        self._run = Run(run.store, run.manifest)  # a separate object, since its thread records damaged files
        self._epoch, self._display = epoch, display
        self._settings = shard_settings(run.store)
        self._shards: Shards | None = None
        self._pool = ThreadPoolExecutor(1, "shards")
        self._writing: Future[tuple[list[WrittenShard], int]] | None = None
        self._num_seen = 0  # finished jobs at the last look
        self._due_jobs = self._due_tokens = 0  # counts that trigger the next look; the first is immediate

    def look(self, num_finished: int, num_tokens: int) -> None:
        """Start writing if enough jobs may have ended, and report written shards."""
        if self._settings is None or (self._writing is not None and not self._writing.done()):
            return
        if self._writing is not None:
            num_waiting = self._told()
            self._due_jobs = self._num_seen + max(1, self._settings.rows_per_shard - num_waiting)
        if num_finished >= self._due_jobs or num_tokens >= self._due_tokens:
            self._num_seen, self._due_jobs = num_finished, num_finished + 1
            self._due_tokens = num_tokens + TOKENS_PER_CHECK
            self._writing = self._pool.submit(self._catch_up, False)

    def finish(self, is_end: bool) -> None:
        """Write the remaining shards; with `is_end`, also the last incomplete shard."""
        if self._settings is not None:
            self._told()
            self._writing = self._pool.submit(self._catch_up, is_end)
            self._told()

    def stop(self) -> None:
        self._pool.shutdown()

    def _catch_up(self, is_end: bool) -> tuple[list[WrittenShard], int]:
        self._shards = self._shards or Shards.of(self._run, self._epoch.number, self._epoch.check)
        return self._shards.catch_up(is_end) if self._shards is not None else ([], 0)

    def _told(self) -> int:
        """Wait for the current write; return the leftover rows."""
        if self._writing is None:
            return 0
        (written, num_waiting), self._writing = self._writing.result(), None
        for shard in written:
            self._display.note(ShardWritten(shard.path, shard.num_rows))
        return num_waiting


def finish_shards(run: Run, epoch: LeaseEpoch, is_end: bool) -> list[WrittenShard]:
    """Write the remaining shards of a run without workers."""
    shards = Shards.of(run, epoch.number, epoch.check)
    return [] if shards is None else shards.catch_up(is_end)[0]
