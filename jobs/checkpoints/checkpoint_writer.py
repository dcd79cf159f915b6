"""The background thread that writes checkpoints, and each job's pending files."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.checkpoint_files import (
    AttemptStart,
    DrafterEntry,
    LayerStatesEntry,
    SegmentEntry,
    StateManifest,
    Timeline,
)
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.kv_segments import LayerStates, Segment, State
from swiftbatch.jobs.checkpoints.logprob_files import WrittenSpans
from swiftbatch.jobs.checkpoints.token_log import Rewind, TokenIds, TokenLog, WorkerLogs
from swiftbatch.jobs.logprobs import TokenLogprobs

logger = logging.getLogger(__name__)

CHECKPOINT_TOKENS = 1024  # positions between two states of a job: the default of --checkpoint-tokens
CHECKPOINT_SECONDS = 5.0  # seconds between two token logs
GRACE_SECONDS = 20.0  # seconds to write checkpoints after SIGTERM

FileKind = Literal["tokens", "state"]
WriteFile = Callable[[CheckpointStore], int]  # writes one file and returns its bytes


class KVSource(Protocol):
    """A running sequence's cache; any thread may read committed positions."""

    def kv(self, start: int, end: int) -> NDArray[Any]:
        """Return keys and values of committed positions as in `Segment`, perhaps as a view."""
        ...


@dataclass
class PendingCheckpoint:
    """One job's newest log, timeline and state that are not written yet.

    A state is written as segments, layer states, drafter and manifest. A newer state replaces a half-written one and
    continues its segments.
    """

    job_id: str
    attempt: int
    engine: str
    source: KVSource | None
    segments: list[SegmentEntry]
    num_rewinds: int = 0  # rewinds before the next files
    start: AttemptStart | None = None
    is_begun: bool = False  # `start` is written, or there is none
    is_alone: bool = False  # its log must not go into the worker's file
    log: TokenLog | None = None
    logprobs: TokenLogprobs | None = None  # one per token of `log`; None if the job asks for none
    written: WrittenSpans = field(default_factory=WrittenSpans)  # files of log-probabilities
    timeline: Timeline | None = None
    token_ids: TokenIds = field(default_factory=lambda: np.zeros(0, dtype=np.uint32))  # all positions of the state
    drafter_state: State = field(default_factory=dict)
    drafter: DrafterEntry | None = None
    layer_states: LayerStates | None = None
    states: LayerStatesEntry | None = None
    is_manifest_due: bool = False
    replaced: list[str] = field(default_factory=list)  # files that the next manifest drops

    @property
    def num_written_positions(self) -> int:
        return self.segments[-1].end if self.segments else 0

    def num_written_up_to(self, limit: int) -> int:
        return next((entry.end for entry in reversed(self.segments) if entry.end <= limit), 0)

    @property
    def num_positions(self) -> int:
        return max(self.num_written_positions, len(self.token_ids))

    @property
    def num_positions_of_states(self) -> int:
        newest = self.layer_states or self.states
        return newest.num_positions if newest else 0

    @property
    def is_waiting(self) -> bool:
        return self.log is not None or self.timeline is not None or self.has_state

    @property
    def has_state(self) -> bool:
        return bool(self.is_manifest_due or self._is_behind or self.drafter_state or self._may_write_states)

    @property
    def _is_behind(self) -> bool:
        return self.num_written_positions < len(self.token_ids)

    @property
    def _may_write_states(self) -> bool:
        """Return whether the written segments reach as far as the pending layer states."""
        return self.layer_states is not None and self.layer_states.num_positions <= self.num_written_positions

    def drop_pending_state(self) -> None:
        self.token_ids = self.token_ids[: self.num_written_positions]
        self.drafter_state, self.layer_states = {}, None

    def rewind(self, log: TokenLog, num_positions: int, logprobs: TokenLogprobs | None = None) -> None:
        """Drop the state from `num_positions` on. The log will be written before the manifest."""
        self.log, self.logprobs, self.num_rewinds = log, logprobs, len(log.rewinds)
        self.written.rewind(len(log.token_ids))
        self.segments = [entry for entry in self.segments if entry.end <= num_positions]
        self.token_ids = self.token_ids[: self.num_written_positions]
        self._replace(self.drafter)
        self.drafter_state, self.drafter = {}, None
        self.layer_states = _up_to(self.layer_states, num_positions)
        if _up_to(self.states, num_positions) is None:
            self._replace(self.states)
            self.states = None
        self.is_manifest_due = True

    @property
    def may_be_packed(self) -> bool:
        """Return whether the log may be packed: it has no log-probabilities and no folder of its own."""
        return self.log is not None and self.logprobs is None and self.start is not None and not self.is_alone

    def pack(self, logs: WorkerLogs) -> None:
        assert self.log is not None
        assert self.start is not None
        logs.put(self.job_id, self.attempt, self.start, self.log, self.timeline)
        self.log = self.timeline = None

    def begun(self, write: WriteFile) -> WriteFile:
        """Return a function that writes the attempt's claim first if there is none yet, and then calls `write`."""

        def write_both(checkpoints: CheckpointStore) -> int:
            if self.start is not None and not self.is_begun:
                checkpoints.begin(self.job_id, self.attempt, self.start)
            self.is_begun = True
            return write(checkpoints)

        return write_both

    def take_tokens(self) -> WriteFile:
        log, self.log = self.log, None
        logprobs, self.logprobs = self.logprobs, None
        assert log is not None
        return partial(self._write_tokens, log, logprobs)

    def take_timeline(self) -> WriteFile:
        timeline, self.timeline = self.timeline, None
        assert timeline is not None
        return lambda checkpoints: checkpoints.write_timeline(self.job_id, self.attempt, timeline)

    def take_state(self, max_positions: int) -> WriteFile:
        """Return a function that writes the state's next file; run it before the next call."""
        if self.is_manifest_due and (self._is_behind or not (self._may_write_states or self.drafter_state)):
            return self._write_manifest
        if self._may_write_states:
            states, self.layer_states = self.layer_states, None
            assert states is not None
            return partial(self._write_states, states)
        start = self.num_written_positions
        if self._is_behind:
            return partial(self._write_segment, start, self.token_ids[start : start + max_positions])
        drafter_state, self.drafter_state = self.drafter_state, {}
        return partial(self._write_drafter, len(self.token_ids), drafter_state)

    def _write_tokens(self, log: TokenLog, logprobs: TokenLogprobs | None, checkpoints: CheckpointStore) -> int:
        if logprobs is None:
            return checkpoints.write_tokens(self.job_id, self.attempt, *log)
        return checkpoints.write_with_logprobs(self.job_id, self.attempt, log, logprobs, self.written)

    def _write_segment(self, start: int, token_ids: TokenIds, checkpoints: CheckpointStore) -> int:
        assert self.source is not None  # `CheckpointWriter.put_state` requires it
        segment = Segment(start, token_ids, self.source.kv(start, start + len(token_ids)))
        entry = checkpoints.write_segment(self.job_id, self.attempt, segment)
        self.segments.append(entry)
        self.is_manifest_due = True
        return entry.size

    def _write_drafter(self, num_positions: int, state: State, checkpoints: CheckpointStore) -> int:
        self._replace(self.drafter)
        self.drafter = checkpoints.write_drafter(self.job_id, self.attempt, num_positions, self.engine, state)
        self.is_manifest_due = True
        return self.drafter.size

    def _write_states(self, states: LayerStates, checkpoints: CheckpointStore) -> int:
        self._replace(self.states)
        self.states = checkpoints.write_states(self.job_id, self.attempt, states)
        self.is_manifest_due = True
        return self.states.size

    def _write_manifest(self, checkpoints: CheckpointStore) -> int:
        segments = tuple(self.segments)
        manifest = StateManifest(
            num_rewinds=self.num_rewinds, segments=segments, drafter=self.drafter, states=self.states
        )
        self.is_manifest_due = False
        named = {entry.file for entry in (self.drafter, self.states) if entry is not None}
        replaced, self.replaced = [file for file in self.replaced if file not in named], []
        return checkpoints.write_manifest(self.job_id, self.attempt, manifest, replaced)

    def _replace(self, entry: DrafterEntry | LayerStatesEntry | None) -> None:
        if entry is not None:
            self.replaced.append(entry.file)


Positioned = TypeVar("Positioned", LayerStates, LayerStatesEntry)


def _up_to(states: Positioned | None, num_positions: int) -> Positioned | None:
    """Return the states if they cover at most the first `num_positions` positions, else None."""
    return states if states is not None and states.num_positions <= num_positions else None


# Background writing of checkpoints: one thread, one file at a time, token logs first.


class CheckpointWriter:
    """One background thread that writes the checkpoints of a worker's jobs.

    `put_*` return at once. If the storage is slow, the newest data replaces what is pending.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        segment_positions: int,
        on_written: Callable[[FileKind, int, float], None],
        logs: WorkerLogs | None = None,
    ) -> None:
        """Write segments of at most `segment_positions`; without `logs` nothing is packed.

        The thread calls `on_written(kind, num_bytes, seconds)` after each file.
        """
        self._checkpoints = checkpoints
        self._segment_positions = segment_positions
        self._on_written = on_written
        self._logs = logs
        self._jobs: dict[str, PendingCheckpoint] = {}  # in the order of their turns
        self._changed = threading.Condition()  # guards the jobs and all fields below
        self._writing: str | None = None  # the job whose file is being written, "" for packed logs
        self._kind: FileKind = "tokens"  # the current or last file
        self._failure: Exception | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def open(
        self,
        job_id: str,
        attempt: int,
        engine: str,
        source: KVSource | None = None,
        segments: Sequence[SegmentEntry] = (),
        num_rewinds: int = 0,
        num_logprobs: int = 0,
        start: AttemptStart | None = None,
        is_begun: bool = False,
    ) -> None:
        """Begin a job after the `segments` of its resume; without `source` it has no state.

        Earlier attempts' files have log-probabilities of `num_logprobs` tokens. `start` is written first unless the
        attempt `is_begun`.
        """
        with self._changed:
            if job_id in self._jobs:
                raise ValueError(f"job {job_id} is open already")
            job = PendingCheckpoint(job_id, attempt, engine, source, list(segments), num_rewinds, start, is_begun)
            job.written = WrittenSpans(num_logprobs)
            self._jobs[job_id] = job

    def together(self) -> AbstractContextManager[bool]:
        """Hold back writing until the block ends."""
        return self._changed

    def put_tokens(
        self,
        job_id: str,
        output_ids: TokenIds,
        rewinds: tuple[Rewind, ...] = (),
        logprobs: TokenLogprobs | None = None,
        is_alone: bool = False,
    ) -> None:
        """Queue `output_ids` [num_tokens], all tokens so far, as the job's log; copies them.

        `is_alone` keeps the log unpacked, because the job moves. `logprobs` are not copied and must not change.
        """
        log = TokenLog(np.array(output_ids, dtype=np.uint32), rewinds)
        with self._changed:
            job = self._opened(job_id)
            job.log, job.logprobs = log, logprobs
            job.is_alone |= is_alone
            self._changed.notify_all()

    def rewind(self, job_id: str, log: TokenLog, num_positions: int, logprobs: TokenLogprobs | None = None) -> None:
        """Queue a log with one more rewind; drop the state from `num_positions` on.

        Afterwards nothing reads those positions of the source.
        """
        with self._changed:
            job = self._opened(job_id)
            del self._jobs[job_id]  # so that its next file is not begun
            self._changed.wait_for(lambda: self._writing != job_id)
            job.rewind(log, num_positions, logprobs)
            self._jobs[job_id] = job
            self._changed.notify_all()

    def put_timeline(self, job_id: str, timeline: Timeline) -> None:
        with self._changed:
            self._opened(job_id).timeline = timeline
            self._changed.notify_all()

    def put_state(
        self, job_id: str, token_ids: NDArray[np.integer], drafter: State, layers: LayerStates | None = None
    ) -> None:
        """Queue the state of a cache that holds `token_ids` [num_positions].

        Takes ownership of `drafter` and `layers`; without `layers` the earlier layer states stay. A cache that ends
        before the job's segments is ignored.
        """
        copied = np.array(token_ids, dtype=np.uint32)
        with self._changed:
            job = self._opened(job_id)
            if job.source is None:
                raise ValueError(f"job {job_id} was opened without a source of KV: it has no state")
            if len(copied) >= job.num_positions:
                job.token_ids, job.drafter_state = copied, drafter
                job.layer_states = layers or job.layer_states
                self._changed.notify_all()

    def num_state_positions(self, job_id: str) -> int:
        with self._changed:
            return self._opened(job_id).num_positions

    def num_written_positions(self, job_id: str, limit: int) -> int:
        """Return how many positions, up to `limit`, are in written segments and no longer needed from the source."""
        with self._changed:
            return self._opened(job_id).num_written_up_to(limit)

    def num_positions_of_states(self, job_id: str) -> int:
        with self._changed:
            return self._opened(job_id).num_positions_of_states

    def close(self, job_id: str, has_ended: bool = True) -> bool:
        """Drop a job's pending files after the current write; return whether the attempt has files of its own.

        With `has_ended` its packed log stays until `forget`; otherwise it moves to the job's folder.
        """
        with self._changed:
            closed = self._jobs.pop(job_id, None)
            self._changed.wait_for(lambda: self._writing != job_id)
            if closed is None:
                return False
            closed.source = None
            if self._logs is not None and not has_ended:
                self._logs.leave(job_id, closed.attempt)
                self._changed.notify_all()
            return closed.is_begun

    def forget(self, job_ids: Collection[str]) -> None:
        with self._changed:
            if self._logs is not None and job_ids:
                self._logs.forget(job_ids)
                self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait up to `seconds` until all is written; return whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or self._is_idle(), seconds)
            return self._failure is None and self._is_idle()

    def wait_for_logs(self, job_ids: Collection[str]) -> None:
        """Wait until the jobs' newest logs are in files of their own."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or not self._has_logs_of(job_ids))

    def check(self) -> None:
        """Raise the thread's error, such as a `StoreError`."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _opened(self, job_id: str) -> PendingCheckpoint:
        if job_id not in self._jobs:
            raise ValueError(f"job {job_id} is not open")
        return self._jobs[job_id]

    def _is_over(self) -> bool:
        return self._is_stopped or self._failure is not None

    def _is_idle(self) -> bool:
        is_waiting = any(job.is_waiting for job in self._jobs.values()) or (
            self._logs is not None and self._logs.has_rest
        )
        return self._writing is None and not is_waiting

    def _has_logs_of(self, job_ids: Collection[str]) -> bool:
        is_written = self._writing in job_ids and self._kind == "tokens"
        return is_written or any(self._jobs[job_id].log is not None for job_id in job_ids if job_id in self._jobs)

    def _run(self) -> None:
        while (file := self._next_file()) is not None:
            kind, write = file
            started = time.perf_counter()
            failure: Exception | None = None
            try:
                num_bytes = write(self._checkpoints)
                self._on_written(kind, num_bytes, time.perf_counter() - started)
            except Exception as error:  # any error must reach the engine's thread, see `check`
                failure = error
            with self._changed:
                if kind == "state" and isinstance(failure, MemoryError):  # the job's next state may find room
                    logger.warning("no memory for a copy of the state of job %s: %s", self._writing, failure)
                    failure = None
                    if job := self._jobs.get(self._writing or ""):
                        job.drop_pending_state()
                self._writing, self._failure = None, failure
                self._changed.notify_all()

    def _next_file(self) -> tuple[FileKind, WriteFile] | None:
        """Return the job's next file to write, logs first and states last, or None if nothing is pending."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or not self._is_idle())
            if self._is_over():
                return None
            self._writing, file = self._most_urgent()
            self._kind, _ = file
            return file

    def _most_urgent(self) -> tuple[str, tuple[FileKind, WriteFile]]:
        """Return the next job ("" for packed logs) and its file."""
        jobs = self._jobs.values()
        if self._logs is not None and (packed := [job for job in jobs if job.may_be_packed]):
            for each in packed:
                each.pack(self._logs)
            return "", ("tokens", _apart(self._logs.take()))
        if job := next((job for job in jobs if job.log is not None), None):
            if self._logs is not None:
                self._logs.forget([job.job_id])  # the packed file keeps it until this one is written
            return self._own(job, "tokens", job.take_tokens())
        if (job := next((job for job in jobs if job.timeline is not None), None)) is not None:
            return self._own(job, "tokens", job.take_timeline())
        if self._logs is not None and self._logs.has_rest:
            return "", ("tokens", _apart(self._logs.take_rest()))
        job = next(job for job in jobs if job.has_state)
        return self._own(job, "state", job.take_state(self._segment_positions))

    def _own(self, job: PendingCheckpoint, kind: FileKind, write: WriteFile) -> tuple[str, tuple[FileKind, WriteFile]]:
        """Return the job's file to write, and move the job to the end of the queue."""
        self._jobs[job.job_id] = self._jobs.pop(job.job_id)
        return job.job_id, (kind, job.begun(write))


def _apart(write: Callable[[], int]) -> WriteFile:
    return lambda _: write()
