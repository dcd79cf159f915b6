"""Checkpoints of running jobs: a token log, which is the truth, and a state, which saves work.

checkpoints/<job_id>/<attempt>/claim.json            worker, time and numerics; written first
                               tokens.bin            all tokens so far and the rewinds
                               logprobs-<start>-<end>-<num_rewinds>.bin    written before the token log
                               kv-<start>-<end>.arrow        keys and values, never changed
                               drafter-<num_positions>.arrow
                               states-<num_positions>.arrow  layer states in place of keys and values
                               manifest.json         segments, also of earlier attempts, and states with
                                                     checksums, written last
                               resume.json           how it began, unless it was the first
                               timeline.json         its tokens over time, for reports

Each file names its owner; damaged and foreign files are skipped. An ended job has no folder.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_files import (
    AttemptRecord,
    AttemptStart,
    CheckedFiles,
    Content,
    Decode,
    DrafterEntry,
    LayerStatesEntry,
    ResumeRecord,
    SegmentEntry,
    StateEntry,
    StateManifest,
    Timeline,
    digest,
    drafter_name,
    dump_file,
    parse_file,
    read_attempt,
    segment_name,
    states_name,
)
from swiftbatch.jobs.checkpoints.kv_segments import (
    LayerStates,
    Segment,
    State,
    decode_segment,
    decode_state,
    encode_segment,
    encode_state,
    identity_of_segment,
    identity_of_state,
)
from swiftbatch.jobs.checkpoints.logprob_files import LogprobFiles, WrittenSpans
from swiftbatch.jobs.checkpoints.token_log import Rewind, TokenIds, TokenLog, decode_log, encode_log
from swiftbatch.jobs.file_owner import DamagedFileError, Identity
from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.storage.store import Store

if TYPE_CHECKING:
    from swiftbatch.jobs.run.run import Run


_EMPTY = TokenLog(np.zeros(0, dtype=np.uint32))


class CheckpointStore:
    """The checkpoints of one run. Methods raise `StoreError`; bad files are skipped with one warning.

    Each attempt writes only to the folder of its own number, so a worker wrongly thought dead can't harm its successor.
    """

    def __init__(self, store: Store, fingerprint: str) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._files = CheckedFiles(store)
        self._logprobs = LogprobFiles(store, self._files)

    @classmethod
    def of(cls, run: Run) -> Self:
        return cls(run.store, run.manifest.fingerprint)

    def begin(self, job_id: str, attempt: int, start: AttemptStart) -> None:
        """Write an attempt's claim before its other files."""
        self._write(job_id, attempt, "claim.json", dump_file(start, self._identity(job_id)))

    def attempts(self, job_id: str) -> list[int]:
        """Return all attempts with files, ascending."""
        return sorted(int(name) for name in self._store.list(f"checkpoints/{job_id}") if name.isdecimal())

    def history(self, job_id: str) -> list[AttemptRecord]:
        numbers, identity = self.attempts(job_id), self._identity(job_id)
        return [
            read_attempt(self._store, self._files, _folder(job_id, number), numbers, index, identity)
            for index, number in enumerate(numbers)
        ]

    def numerics(self, job_id: str, attempt: int) -> str | None:
        """Return an attempt's numerics: "" if its claim names none, None if the claim is unreadable."""
        path, identity = _path(job_id, attempt, "claim.json"), self._identity(job_id)
        claim = self._files.decoded(path, self._store.read(path), lambda data: parse_file(data, AttemptStart, identity))
        return None if claim is None else claim.numerics

    def write_resume(self, job_id: str, attempt: int, record: ResumeRecord) -> None:
        self._write(job_id, attempt, "resume.json", dump_file(record, self._identity(job_id)))

    def write_timeline(self, job_id: str, attempt: int, timeline: Timeline) -> int:
        return self._write(job_id, attempt, "timeline.json", dump_file(timeline, self._identity(job_id)))

    def write_tokens(self, job_id: str, attempt: int, token_ids: TokenIds, rewinds: tuple[Rewind, ...] = ()) -> int:
        log = TokenLog(token_ids, rewinds)
        return self._write(job_id, attempt, "tokens.bin", encode_log(log, self._identity(job_id)))

    def read_log(self, job_id: str) -> TokenLog:
        return self._logs(job_id, self.attempts(job_id))[0]

    def read_attempts(self, job_id: str) -> tuple[list[int], TokenLog]:
        numbers = self.attempts(job_id)
        return numbers, self._logs(job_id, numbers)[0]

    def write_with_logprobs(
        self, job_id: str, attempt: int, log: TokenLog, logprobs: TokenLogprobs, written: WrittenSpans
    ) -> int:
        """Write the log-probabilities not yet `written`, then the tokens. Returns bytes written."""
        num_bytes = self._logprobs.write(_folder(job_id, attempt), written, log, logprobs, self._identity(job_id))
        num_bytes += self.write_tokens(job_id, attempt, *log)
        self._logprobs.drop_replaced(_folder(job_id, attempt), written)
        return num_bytes

    def read_log_with_logprobs(self, job_id: str, num_top: int) -> tuple[TokenLog, TokenLogprobs]:
        """Return the furthest log, cut after the last token with log-probabilities, and the log-probabilities."""
        attempts = self.attempts(job_id)
        folders = [_folder(job_id, attempt) for attempt in reversed(attempts)]
        furthest, its_logprobs = _EMPTY, TokenLogprobs.empty(0, num_top)
        for log in self._logs(job_id, attempts):
            if log.progress <= furthest.progress:
                break
            logprobs = self._logprobs.read(folders, log.token_ids, num_top, self._identity(job_id))
            known = log.until(len(logprobs))
            if known.progress > furthest.progress:
                furthest, its_logprobs = known, logprobs
        return furthest, its_logprobs

    def _logs(self, job_id: str, attempts: Sequence[int]) -> list[TokenLog]:
        """Return the attempts' logs, the furthest first, and at the end an empty log."""
        logs, decode = [_EMPTY], partial(decode_log, identity=self._identity(job_id))
        for attempt in attempts:
            path = _path(job_id, attempt, "tokens.bin")
            data = self._store.read(path)
            if data is None and (attempt == attempts[-1] or not self._has_state(job_id, attempt)):
                continue  # it wrote none, or its worker kept it in a packed file
            if (log := self._files.decoded(path, data, decode)) is not None:
                logs.append(log)
        return sorted(logs, key=lambda log: log.progress, reverse=True)

    def _has_state(self, job_id: str, attempt: int) -> bool:
        return any(name.endswith(".arrow") for name in self._store.list(_folder(job_id, attempt)))

    def write_segment(self, job_id: str, attempt: int, segment: Segment) -> SegmentEntry:
        """Write a segment; return its manifest entry. Raises `TypeError` for arrays of another dtype or shape."""
        name, data = segment_name(segment.start, segment.end), encode_segment(segment, self._identity(job_id))
        written = self._write_listed(job_id, attempt, name, data)
        return SegmentEntry(start=segment.start, end=segment.end, **written)

    def read_segment(self, job_id: str, entry: SegmentEntry) -> Segment | None:
        """Return None if damaged or absent."""

        def decode(data: bytes) -> Segment:
            segment = decode_segment(data)
            if (segment.start, segment.end) != (entry.start, entry.end):
                raise DamagedFileError(f"found the positions {segment.start} to {segment.end} in it")
            return segment

        return self._read_listed(job_id, entry, identity_of_segment, decode)

    def write_drafter(self, job_id: str, attempt: int, num_positions: int, engine: str, state: State) -> DrafterEntry:
        """Write a drafter's state after `num_positions` positions and return its manifest entry."""
        name, data = drafter_name(num_positions), encode_state(state, self._identity(job_id))
        written = self._write_listed(job_id, attempt, name, data)
        return DrafterEntry(num_positions=num_positions, engine=engine, **written)

    def read_drafter(self, job_id: str, entry: DrafterEntry) -> State | None:
        """Return None if damaged or absent."""
        return self._read_listed(job_id, entry, identity_of_state, decode_state)

    def write_states(self, job_id: str, attempt: int, states: LayerStates) -> LayerStatesEntry:
        name, data = states_name(states.num_positions), encode_state(states.arrays, self._identity(job_id))
        written = self._write_listed(job_id, attempt, name, data)
        return LayerStatesEntry(num_positions=states.num_positions, **written)

    def read_states(self, job_id: str, entry: LayerStatesEntry) -> LayerStates | None:
        """Read layer states; return None if the file is damaged or absent."""
        arrays = self._read_listed(job_id, entry, identity_of_state, decode_state)
        return None if arrays is None else LayerStates(entry.num_positions, arrays)

    def write_manifest(self, job_id: str, attempt: int, manifest: StateManifest, replaced: Collection[str] = ()) -> int:
        """Write a manifest, then delete the files it `replaced`. Returns bytes written."""
        num_bytes = self._write(job_id, attempt, "manifest.json", dump_file(manifest, self._identity(job_id)))
        for file in replaced:
            self._store.delete(f"checkpoints/{job_id}/{file}")
        return num_bytes

    def read_manifest(self, job_id: str, attempt: int) -> StateManifest | None:
        """Return None if absent or damaged."""
        path = _path(job_id, attempt, "manifest.json")
        data = self._store.read(path)
        # without a manifest there must be no state files
        if data is None and not self._has_state(job_id, attempt):
            return None
        identity = self._identity(job_id)
        return self._files.decoded(path, data, lambda data: parse_file(data, StateManifest, identity))

    def read_manifests(self, job_id: str) -> list[StateManifest]:
        """Return all attempts' manifests: most positions first, newest attempt first among equals."""
        manifests = [(attempt, self.read_manifest(job_id, attempt)) for attempt in self.attempts(job_id)]
        found = [(manifest.num_positions, attempt, manifest) for attempt, manifest in manifests if manifest is not None]
        return [manifest for *_, manifest in sorted(found, key=lambda entry: entry[:2], reverse=True)]

    def clear(self, job_id: str) -> None:
        self._store.delete_folder(f"checkpoints/{job_id}")

    def _write(self, job_id: str, attempt: int, name: str, data: bytes | memoryview) -> int:
        """Write a file of an attempt. Returns bytes written."""
        self._store.write(_path(job_id, attempt, name), data)
        return len(data)

    def _write_listed(self, job_id: str, attempt: int, name: str, data: bytes | memoryview) -> dict[str, Any]:
        """Write a file of an attempt; return the fields that each entry of a manifest has."""
        size = self._write(job_id, attempt, name, data)
        return {"file": f"{attempt:04d}/{name}", "size": size, "sha256": digest(data)}

    def _read_listed(
        self, job_id: str, entry: StateEntry, whose: Decode[Identity | None], decode: Decode[Content]
    ) -> Content | None:
        path = f"checkpoints/{job_id}/{entry.file}"
        return self._files.read_verified(path, entry, self._identity(job_id), whose, decode)

    def _identity(self, job_id: str) -> Identity:
        return Identity(job_id=job_id, fingerprint=self._fingerprint)


def _folder(job_id: str, attempt: int) -> str:
    return f"checkpoints/{job_id}/{attempt:04d}"


def _path(job_id: str, attempt: int, name: str) -> str:
    return f"{_folder(job_id, attempt)}/{name}"
