"""The files of one running job that are still to be written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.checkpoint_store import (
    AttemptStart,
    CheckpointStore,
    DrafterEntry,
    LayerStates,
    LayerStatesEntry,
    Segment,
    SegmentEntry,
    State,
    StateManifest,
    TokenIds,
    TokenLog,
)
from swiftbatch.jobs.checkpoints.logprob_files import WrittenSpans
from swiftbatch.jobs.checkpoints.packed_logs import WorkerLogs
from swiftbatch.jobs.checkpoints.timeline import Timeline
from swiftbatch.jobs.logprobs import TokenLogprobs

FileKind = Literal["tokens", "state"]
WriteFile = Callable[[CheckpointStore], int]  # writes one file and returns its bytes


class KVSource(Protocol):
    """The cache of a running sequence. Committed positions never change, so any thread may ask at any time."""

    def kv(self, start: int, end: int) -> NDArray[Any]:
        """Keys and values of committed positions as a `Segment` holds them; may be a view on the cache."""
        ...


@dataclass
class PendingCheckpoint:
    """The newest token log, timeline and state of one job, as far as they are not written.

    A state is written as segments behind those there already, then the states of layers, the drafter's file and a
    manifest. Where more segments follow, each has a manifest behind it. A newer state takes the place of one that is
    half-written: its segments go on where those of the older one are.
    """

    job_id: str
    attempt: int
    engine: str
    source: KVSource | None
    segments: list[SegmentEntry]
    num_rewinds: int = 0  # the rewinds before what is written from now on
    start: AttemptStart | None = None
    is_begun: bool = False  # `start` is written, or there is none
    is_alone: bool = False  # its token log is not to go into its worker's file
    log: TokenLog | None = None
    logprobs: TokenLogprobs | None = None  # of the log's tokens; None where the job asks for none
    written: WrittenSpans = field(default_factory=WrittenSpans)  # of log-probabilities
    timeline: Timeline | None = None
    token_ids: TokenIds = field(default_factory=lambda: np.zeros(0, dtype=np.uint32))  # of all positions of the state
    drafter_state: State = field(default_factory=dict)
    drafter: DrafterEntry | None = None
    layer_states: LayerStates | None = None
    states: LayerStatesEntry | None = None
    is_manifest_due: bool = False
    replaced: list[str] = field(default_factory=list)  # files that no manifest names any more, once it is written

    @property
    def num_written_positions(self) -> int:
        return self.segments[-1].end if self.segments else 0

    def num_written_up_to(self, limit: int) -> int:
        """Positions of the segments that end at `limit` at most."""
        return next((entry.end for entry in reversed(self.segments) if entry.end <= limit), 0)

    @property
    def num_positions(self) -> int:
        return max(self.num_written_positions, len(self.token_ids))

    @property
    def num_positions_of_states(self) -> int:
        """Positions of the newest states of layers, 0 without any."""
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
        """Tell whether states of layers wait that the segments reach."""
        return self.layer_states is not None and self.layer_states.num_positions <= self.num_written_positions

    def rewind(self, log: TokenLog, num_positions: int, logprobs: TokenLogprobs | None = None) -> None:
        """Drop the state from `num_positions` on. The log is written first, then a manifest says so."""
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
        """Return whether a log waits that may go into its worker's file: log-probabilities have files beside logs."""
        return self.log is not None and self.logprobs is None and self.start is not None and not self.is_alone

    def pack(self, logs: WorkerLogs) -> None:
        """Take log and timeline from those that wait, and put them into the worker's file."""
        assert self.log is not None
        assert self.start is not None
        logs.put(self.job_id, self.attempt, self.start, self.log, self.timeline)
        self.log = self.timeline = None

    def begun(self, write: WriteFile) -> WriteFile:
        """Have `write` say first who makes the attempt, where no file does so yet."""

        def write_both(checkpoints: CheckpointStore) -> int:
            if self.start is not None and not self.is_begun:
                checkpoints.begin(self.job_id, self.attempt, self.start)
            self.is_begun = True
            return write(checkpoints)

        return write_both

    def take_tokens(self) -> WriteFile:
        """Take the token log from those that wait, and return a function that writes it. Call it while a log waits.

        The function writes the log-probabilities first: a log is worth as much as it has of them.
        """
        log, self.log = self.log, None
        logprobs, self.logprobs = self.logprobs, None
        assert log is not None
        return partial(self._write_tokens, log, logprobs)

    def take_timeline(self) -> WriteFile:
        """Take the timeline from those that wait, and return a function that writes it. Call it while one waits."""
        timeline, self.timeline = self.timeline, None
        assert timeline is not None
        return lambda checkpoints: checkpoints.write_timeline(self.job_id, self.attempt, timeline)

    def take_state(self, max_positions: int) -> WriteFile:
        """Return a function that writes the next file of the state. Call it while `has_state`, and run it first."""
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
        assert self.source is not None  # `CheckpointWriter.put_state` asks for it
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
        """Have the file of a state deleted behind the next manifest."""
        if entry is not None:
            self.replaced.append(entry.file)


Positioned = TypeVar("Positioned", LayerStates, LayerStatesEntry)


def _up_to(states: Positioned | None, num_positions: int) -> Positioned | None:
    """States of layers that no position behind the first ones has changed."""
    return states if states is not None and states.num_positions <= num_positions else None
