"""Token logs of ended jobs, which `extend` continues.

tokens/<job_id>.bin         a job that ended at max_tokens, or in a thought without room to close it;
                            written before its result
tokens/<job_id>.logprobs    its log-probabilities if it asked for them; written before both
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_files import (
    AttemptRecord,
    AttemptStart,
    DrafterEntry,
    LayerStatesEntry,
    SegmentEntry,
    dump_file,
)
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.logprob_files import decode_span, encode_span, span_name
from swiftbatch.jobs.checkpoints.token_log import TokenLog, decode_log, encode_log
from swiftbatch.jobs.file_owner import DamagedFileError, Identity
from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.storage.store import Store

if TYPE_CHECKING:
    from swiftbatch.jobs.run.run import Run

FOLDER = "tokens"
SUFFIX, LOGPROBS = ".bin", ".logprobs"


class KeptLogs:
    """The kept token logs of one run. Methods raise `StoreError`."""

    def __init__(self, store: Store, fingerprint: str) -> None:
        self._store = store
        self._fingerprint = fingerprint

    @classmethod
    def of(cls, run: Run) -> Self:
        return cls(run.store, run.manifest.fingerprint)

    def write(self, job_id: str, log: TokenLog, logprobs: TokenLogprobs | None = None) -> None:
        identity = self._identity(job_id)
        if logprobs is not None:
            self._store.write(_path(job_id, LOGPROBS), encode_span(log.token_ids, logprobs, identity))
        self._store.write(_path(job_id), encode_log(log, identity))

    def read(self, job_id: str) -> TokenLog:
        """Read a job's log. Raises `DamagedFileError` if the log is absent, damaged or belongs to another job."""
        data = self._store.read(_path(job_id))
        if data is None:
            raise DamagedFileError("found no token log")
        return decode_log(data, self._identity(job_id))

    def read_logprobs(self, job_id: str, log: TokenLog) -> TokenLogprobs:
        """Read a log's log-probabilities. Raises `DamagedFileError`."""
        data = self._store.read(_path(job_id, LOGPROBS))
        if data is None:
            raise DamagedFileError("found no log-probabilities")
        span = decode_span(data, self._identity(job_id))
        if span.num_agreeing(log.token_ids) < len(log.token_ids):
            raise DamagedFileError("found log-probabilities of other tokens")
        return span.logprobs

    def sizes(self) -> dict[str, int]:
        found = {name: size for name, size in self._store.sizes(FOLDER).items() if size is not None}
        names = (name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX))
        return {name: found[f"{name}{SUFFIX}"] + found.get(f"{name}{LOGPROBS}", 0) for name in names}

    def delete(self, job_id: str) -> None:
        for suffix in (SUFFIX, LOGPROBS):
            self._store.delete(_path(job_id, suffix))

    def clear(self) -> None:
        self._store.delete_folder(FOLDER)

    def _identity(self, job_id: str) -> Identity:
        return Identity(job_id=job_id, fingerprint=self._fingerprint)


def _path(job_id: str, suffix: str = SUFFIX) -> str:
    return f"{FOLDER}/{job_id}{suffix}"


CHECKPOINTS = "checkpoints"


def inherit(
    store: Store,
    identity: Identity,
    earlier_id: str,
    attempts: Sequence[AttemptRecord],
    log: TokenLog,
    logprobs: TokenLogprobs | None = None,
) -> None:
    """Write the start of `identity`'s job: kept state of `earlier_id`, attempts and `log`.

    Call it before the run knows the job; it may be repeated.
    """
    _State(CheckpointStore(store, identity.fingerprint), identity.job_id, earlier_id).take()
    for record in attempts:
        is_last = record is attempts[-1]
        folder = f"{CHECKPOINTS}/{identity.job_id}/{record.number:04d}"
        claim = AttemptStart(
            worker_id=record.worker_id, claimed=record.claimed, numerics=record.numerics, attempt=record.attempt
        )
        store.write(f"{folder}/claim.json", dump_file(claim, identity))
        if record.resume is not None:
            store.write(f"{folder}/resume.json", dump_file(record.resume, identity))
        if record.timeline is not None:
            # its log has all its tokens
            timeline = record.timeline.model_copy(update={"is_released": is_last or record.timeline.is_released})
            store.write(f"{folder}/timeline.json", dump_file(timeline, identity))
        its_log = log if is_last else TokenLog(np.zeros(0, dtype=np.uint32))
        if is_last and logprobs is not None:
            span = encode_span(log.token_ids, logprobs, identity)
            store.write(f"{folder}/{span_name(0, *reversed(log.progress))}", span)
        store.write(f"{folder}/tokens.bin", encode_log(its_log, identity))


class _State:
    def __init__(self, checkpoints: CheckpointStore, job_id: str, earlier_id: str) -> None:
        self._checkpoints = checkpoints
        self._job_id, self._earlier_id = job_id, earlier_id
        self._segments: dict[str, SegmentEntry | None] = {}  # by the earlier job's file; None if unreadable

    def take(self) -> None:
        for attempt in self._checkpoints.attempts(self._earlier_id):
            if (manifest := self._checkpoints.read_manifest(self._earlier_id, attempt)) is not None:
                own = {
                    "segments": tuple(self._taken(manifest.segments)),
                    "drafter": self._drafter(manifest.drafter),
                    "states": self._states(manifest.states),
                }
                self._checkpoints.write_manifest(self._job_id, attempt, manifest.model_copy(update=own))

    def _taken(self, segments: Sequence[SegmentEntry]) -> Iterator[SegmentEntry]:
        """Yield the segments before the first unreadable one."""
        for entry in segments:
            if entry.file not in self._segments:
                self._segments[entry.file] = self._segment(entry)
            if (own := self._segments[entry.file]) is None:
                return
            yield own

    def _segment(self, entry: SegmentEntry) -> SegmentEntry | None:
        segment = self._checkpoints.read_segment(self._earlier_id, entry)
        if segment is None:
            return None
        return self._checkpoints.write_segment(self._job_id, entry.attempt, segment)

    def _drafter(self, entry: DrafterEntry | None) -> DrafterEntry | None:
        state = None if entry is None else self._checkpoints.read_drafter(self._earlier_id, entry)
        if entry is None or state is None:
            return None
        place = (self._job_id, entry.attempt, entry.num_positions)
        return self._checkpoints.write_drafter(*place, entry.engine, state)

    def _states(self, entry: LayerStatesEntry | None) -> LayerStatesEntry | None:
        states = None if entry is None else self._checkpoints.read_states(self._earlier_id, entry)
        if entry is None or states is None:
            return None
        return self._checkpoints.write_states(self._job_id, entry.attempt, states)
