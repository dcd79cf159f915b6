"""Decides when a running job's checkpoints are due, and what goes into them; the writing is in the background."""

from __future__ import annotations

import time
from collections.abc import Collection
from collections.abc import Sequence as Items

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.checkpoint_writer import CheckpointWriter
from swiftbatch.jobs.checkpoints.token_log import TokenLog, WorkerLogs
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.engine.stopping import rewind_distance
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.session.running_job import RunningJob

MAX_SEGMENT_BYTES = 1 << 26  # what one segment may take of the memory
REPLAYED_SHARE = 1 / 16  # of an old job's positions, which are read again at most where its worker was lost


class Checkpointing:
    """Keeps the checkpoints of one worker's jobs. `check` and `flush` raise StoreError when the store has failed."""

    def __init__(self, checkpoints: CheckpointStore, logs: WorkerLogs, config: EngineConfig, engine: Engine) -> None:
        self._config = config
        self._drafter = engine.drafter
        most = MAX_SEGMENT_BYTES // engine.target.cache_shape.bytes_per_position()
        if engine.target.cache_shape.windows:  # there it waits for them
            most = min(config.checkpoint_tokens, most)
        self._writer = CheckpointWriter(checkpoints, max(1, most), engine.counters.count_checkpoint, logs)

    def open(self, job: RunningJob) -> None:
        """Begin with a job, whose new manifests go on from the segments that its resume found whole.

        A resume has said already who makes the attempt, see `WorkerSession`.
        """
        segments = job.recovery.segments if job.recovery else ()
        num_rewinds = len(job.sequence.rewinds)
        self._writer.open(
            *(job.job_id, job.assignment.attempt, self._config.engine, job.cache, segments, num_rewinds),
            num_logprobs=job.sequence.num_generated_tokens,
            start=job.start,
            is_begun=job.recovery is not None,
        )
        self._expect_reads(job)

    def rewind(self, job: RunningJob, again: Sequence) -> None:
        """Have kept that the job goes on with `again`; when this returns, its cache may be rolled back."""
        num_positions = min(job.cache.length, len(again) - 1)
        log = TokenLog(again.output_ids.astype("uint32"), again.rewinds)
        self._writer.rewind(job.job_id, log, num_positions, again.kept_logprobs)
        job.logged, job.num_logged_tokens = time.monotonic(), again.num_generated_tokens
        self._expect_reads(job)

    def put_due(self, jobs: Collection[RunningJob]) -> None:
        """Hand over what should be kept by now; returns at once.

        Once the token log of one job is due, those of all go with it: they are one write.
        """
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
            kept_end = job.cache.length - rewind_distance(job.sequence)  # a rewind drops the segment that it falls into
            job.cache.release(self._writer.num_written_positions(job.job_id, kept_end))

    def catch_up(self, jobs: Collection[RunningJob], seconds: float) -> bool:
        """Write what caches hold for that alone, for at most `seconds`; returns whether all is written.

        A rewind may then read tokens again, whose segments it would else have found.
        """
        for job in jobs:
            if self._config.checkpoint == "state" and self._num_new_positions(job) > 0:
                self._put_state(job)
        is_written = self._writer.flush(seconds)
        self._writer.check()
        for job in jobs:
            job.cache.release(self._writer.num_written_positions(job.job_id, job.cache.length))
        return is_written

    def flush(self, jobs: Items[RunningJob], seconds: float) -> None:
        """Write all token logs, then as much state as `seconds` allow: these jobs are to go on elsewhere.

        The logs are waited for in any case: whoever goes on with the jobs looks for them in the jobs' own folders.
        """
        for job in jobs:
            self._put_tokens(job, is_released=True)
            if self._config.checkpoint == "state" and self._num_new_positions(job) > 0:
                self._put_state(job, is_released=True)
        self._writer.flush(seconds)
        self._writer.wait_for_logs([job.job_id for job in jobs])
        self._writer.check()

    def keep(self, job: RunningJob, seconds: float) -> None:
        """Write all that there is of a job that has ended, as far as `seconds` allow: it may go on some day."""
        self._put_tokens(job, is_released=True)
        if self._num_new_positions(job) > 0:
            self._put_state(job, is_released=True)
        self._writer.flush(seconds)
        self._writer.check()

    def close(self, job: RunningJob) -> None:
        """Write no more of a job: no file of its own is under way when this returns.

        The token log of one that has ended stays until `forget`, that of another, as far as it was written, goes into
        the job's own folder.
        """
        has_ended = job.sequence.finish_reason is not None and job.sequence.error is None
        job.has_files = self._writer.close(job.job_id, has_ended)

    def forget(self, job_ids: Collection[str]) -> None:
        """Note that jobs that have ended are no longer to be resumed by anybody."""
        self._writer.forget(job_ids)

    def check(self) -> None:
        """Raise the StoreError of a write that failed for good."""
        self._writer.check()

    def _expect_reads(self, job: RunningJob) -> None:
        """Have the cache keep what segments are still to be written of."""
        if self._config.checkpoint == "state" or self._config.keep_state:
            job.cache.retain(self._writer.num_written_positions(job.job_id, len(job.sequence)))

    def _num_new_positions(self, job: RunningJob) -> int:
        """Count the positions behind the last state. Copied ones do not count: whoever read them keeps them, too."""
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
        layers = job.cache.states() if self._are_states_due(job, is_released) else None
        self._writer.put_state(job.job_id, token_ids, self._drafter.state(job.sequence), layers)

    def _are_states_due(self, job: RunningJob, is_released: bool) -> bool:
        """Tell whether the states of layers, all of which are written each time, are due.

        They wait for as many bytes of keys and values, so that they double the bytes of a checkpoint at most.
        """
        num_new = job.cache.boundary - self._writer.num_positions_of_states(job.job_id)
        shape = job.cache.shape
        return num_new > 0 and (is_released or num_new * shape.bytes_per_position() >= shape.checkpointed_state_bytes())


def state_interval(job: RunningJob, num_tokens: int) -> int:
    """New positions of a job that make a state due, `num_tokens` at least: the more the older the job is.

    Each state costs requests. A cache that forgets keeps what is still to be written, and room is left for no more.
    """
    return num_tokens if job.cache.shape.windows else max(num_tokens, int(REPLAYED_SHARE * job.cache.length))
