"""Due times and contents of a running job's checkpoints; a background thread writes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.checkpoint_writer import CheckpointWriter
from swiftbatch.jobs.checkpoints.token_log import TokenLog, WorkerLogs
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.drafters.catalogue import engine_entry
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.engine.stopping import rewind_distance
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.session.running_job import RunningJob

MAX_SEGMENT_BYTES = 1 << 26  # limits a segment's memory
REPLAYED_SHARE = 1 / 16  # at most this share of an old job's positions is read again after a lost worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _CopiedCache:
    """A cache as the writer's `KVSource`."""

    cache: FullKVCache

    def kv(self, start: int, end: int) -> NDArray[Any]:
        try:
            return self.cache.kv(start, end)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error


class Checkpointing:
    """Checkpoints of one worker's jobs. `check` and `flush` raise StoreError when the store has failed."""

    def __init__(self, checkpoints: CheckpointStore, logs: WorkerLogs, config: EngineConfig, engine: Engine) -> None:
        self._config = config
        self._drafter = engine.drafter
        most = MAX_SEGMENT_BYTES // engine.target.cache_shape.bytes_per_position()
        if engine.target.cache_shape.windows:  # caches keep positions until they are written
            most = min(config.checkpoint_tokens, most)
        self._writer = CheckpointWriter(checkpoints, max(1, most), engine.counters.count_checkpoint, logs)

    def open(self, job: RunningJob) -> None:
        """Start a job's checkpoints after the segments that its resume loaded."""
        segments = job.recovery.segments if job.recovery else ()
        num_rewinds = len(job.sequence.rewinds)
        self._writer.open(
            *(job.job_id, job.assignment.attempt, self._config.engine, _CopiedCache(job.cache), segments, num_rewinds),
            num_logprobs=job.sequence.num_generated_tokens,
            start=job.start,
            is_begun=job.recovery is not None,
        )
        self._expect_reads(job)

    def rewind(self, job: RunningJob, again: Sequence) -> None:
        """Record that the job continues with `again`; afterwards its cache may be rolled back."""
        num_positions = min(job.cache.length, len(again) - 1)
        log = TokenLog(again.output_ids.astype("uint32"), again.rewinds)
        self._writer.rewind(job.job_id, log, num_positions, again.kept_logprobs)
        job.logged, job.num_logged_tokens = time.monotonic(), again.num_generated_tokens
        self._expect_reads(job)

    def put_due(self, jobs: Collection[RunningJob]) -> None:
        """Queue all due writes; as soon as one job's token log is due, the logs of all jobs are queued."""
        config = self._config
        if any(job.is_log_due(config.checkpoint_seconds, config.checkpoint_tokens) for job in jobs):
            with self._writer.together():
                for job in jobs:
                    if job.is_log_due(0.0, 1):
                        self._put_tokens(job)
        for job in jobs:
            if config.checkpoint == "state" and self._num_new_positions(job) >= state_interval(
                job, config.checkpoint_tokens
            ):
                self._put_state(job)
            kept_end = job.cache.length - rewind_distance(job.sequence)  # a rewind drops its segment
            job.cache.release(self._writer.num_written_positions(job.job_id, kept_end))

    def catch_up(self, jobs: Collection[RunningJob], seconds: float) -> bool:
        """Write positions that caches retain for checkpoints, for at most `seconds`; return whether all are written."""
        for job in jobs:
            if self._config.checkpoint == "state" and self._num_new_positions(job) > 0:
                self._put_state(job)
        is_written = self._writer.flush(seconds)
        self._writer.check()
        for job in jobs:
            job.cache.release(self._writer.num_written_positions(job.job_id, job.cache.length))
        return is_written

    def flush(self, jobs: Items[RunningJob], seconds: float) -> None:
        """Write all token logs, then as much state as `seconds` allow, before the jobs move to another worker."""
        for job in jobs:
            self._put_tokens(job, is_released=True)
            if self._config.checkpoint == "state" and self._num_new_positions(job) > 0:
                self._put_state(job, is_released=True)
        self._writer.flush(seconds)
        self._writer.wait_for_logs([job.job_id for job in jobs])
        self._writer.check()

    def keep(self, job: RunningJob, seconds: float) -> None:
        """Write log and state of an ended job that may be extended, for at most `seconds`."""
        self._put_tokens(job, is_released=True)
        if self._num_new_positions(job) > 0:
            self._put_state(job, is_released=True)
        self._writer.flush(seconds)
        self._writer.check()

    def close(self, job: RunningJob) -> None:
        """Stop writing a job's files.

        An ended job's token log stays until `forget`; an unfinished job's log moves to the job's own folder.
        """
        has_ended = job.sequence.finish_reason is not None and job.sequence.error is None
        job.has_files = self._writer.close(job.job_id, has_ended)

    def forget(self, job_ids: Collection[str]) -> None:
        """Note that these ended jobs will never be resumed."""
        self._writer.forget(job_ids)

    def check(self) -> None:
        self._writer.check()

    def _expect_reads(self, job: RunningJob) -> None:
        if self._config.checkpoint == "state" or self._config.keep_state:
            job.cache.retain(self._writer.num_written_positions(job.job_id, len(job.sequence)))

    def _num_new_positions(self, job: RunningJob) -> int:
        """Return the number of positions after the last state, without positions copied from other caches."""
        return job.cache.length - max(self._writer.num_state_positions(job.job_id), job.cache.num_copied)

    def _put_tokens(self, job: RunningJob, is_released: bool = False) -> None:
        sequence = job.sequence
        token_ids = sequence.output_ids.astype("uint32")
        self._writer.put_tokens(job.job_id, token_ids, sequence.rewinds, sequence.kept_logprobs, is_released)
        if (is_released or job.recorder.has_news) and (timeline := job.recorder.take(is_released)):
            self._writer.put_timeline(job.job_id, timeline)
        job.logged, job.num_logged_tokens = time.monotonic(), job.sequence.num_generated_tokens

    def _put_state(self, job: RunningJob, is_released: bool = False) -> None:
        token_ids = job.sequence.token_ids[: job.cache.length]
        try:
            layers = job.cache.states() if self._are_states_due(job, is_released) else None
            drafter = self._drafter.state(job.sequence)
        except torch.OutOfMemoryError as error:  # the token log is enough to go on; a later state may find room
            logger.warning("no memory for a copy of the state of job %s: %s", job.job_id, error)
            return
        self._writer.put_state(job.job_id, token_ids, drafter, layers)

    def _are_states_due(self, job: RunningJob, is_released: bool) -> bool:
        """Return whether recurrent states are due: not before they are at most as large as the rest of a checkpoint."""
        num_new = job.cache.boundary - self._writer.num_positions_of_states(job.job_id)
        shape = job.cache.shape
        return num_new > 0 and (is_released or num_new * shape.bytes_per_position() >= shape.checkpointed_state_bytes())


def state_interval(job: RunningJob, num_tokens: int) -> int:
    """Return how many new positions make a state due: more for longer texts, because each state costs requests."""
    return num_tokens if job.cache.shape.windows else max(num_tokens, int(REPLAYED_SHARE * job.cache.length))


def num_unwritten(config: EngineConfig) -> int | None:
    """Return by how many positions checkpoints may lag, or None if caches forget nothing."""
    are_written = config.checkpoint == "state"
    if engine_entry(config.engine).reads_caches or (config.keep_state and not are_written):
        return None
    return config.checkpoint_tokens if are_written else 0
