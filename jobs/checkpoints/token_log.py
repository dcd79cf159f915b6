"""A job's token log as bytes, and a worker's packed file of logs."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from swiftbatch.jobs.checkpoints.checkpoint_files import (
    AttemptRecord,
    AttemptStart,
    CheckedFiles,
    Timeline,
    dump_file,
    parse_file,
)
from swiftbatch.jobs.file_owner import DamagedFileError, Identity, take_identity
from swiftbatch.jobs.json_records import Strict, parse_sealed, sealed
from swiftbatch.jobs.run.run_records import in_parallel
from swiftbatch.jobs.storage.store import Store

if TYPE_CHECKING:
    from swiftbatch.jobs.run.run import Run

TokenIds = NDArray[np.uint32]

MAGIC = b"SWTOKENS"
HEADER = struct.Struct("<8sII")  # magic, number of tokens, CRC-32 of what follows
NUM_REWINDS = struct.Struct("<I")
REWIND = struct.Struct("<II")


class Rewind(NamedTuple):
    """A removed loop: of `num_tokens` generated tokens, the first `num_kept` stayed."""

    num_tokens: int
    num_kept: int


class TokenLog(NamedTuple):
    """A job's output so far: `token_ids` [num_tokens], and all rewinds, oldest first."""

    token_ids: TokenIds
    rewinds: tuple[Rewind, ...] = ()

    @property
    def progress(self) -> tuple[int, int]:
        """Return a sort key that grows with progress, even when a rewind drops tokens."""
        return len(self.rewinds), len(self.token_ids)

    def until(self, num_tokens: int) -> TokenLog:
        """Return the log when it last had exactly `num_tokens` tokens."""
        if num_tokens >= len(self.token_ids):
            return self
        numbers = (number for number, rewind in enumerate(self.rewinds, 1) if rewind.num_kept <= num_tokens)
        return TokenLog(self.token_ids[:num_tokens], self.rewinds[: max(numbers, default=0)])


def encode_log(log: TokenLog, identity: Identity) -> bytes:
    """Encode a job's log. Raises `TypeError` for token ids of another dtype or shape."""
    token_ids, rewinds = log
    if token_ids.dtype != np.uint32 or token_ids.ndim != 1:
        raise TypeError(f"found token ids of {token_ids.dtype} {token_ids.shape}, expected uint32 [num_tokens]")
    head = identity.pack() + NUM_REWINDS.pack(len(rewinds)) + b"".join(REWIND.pack(*each) for each in rewinds)
    payload = head + token_ids.astype("<u4", copy=False).tobytes()
    return HEADER.pack(MAGIC, len(token_ids), zlib.crc32(payload)) + payload


def decode_log(data: bytes, identity: Identity) -> TokenLog:
    """Decode a job's log into new memory. Raises `DamagedFileError`."""
    if len(data) < HEADER.size:
        raise DamagedFileError(f"found {len(data)} bytes, expected a header of {HEADER.size}")
    magic, num_tokens, checksum = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedFileError("found no token log: expected it to start with its magic word")
    payload = data[HEADER.size :]
    if zlib.crc32(payload) != checksum:
        raise DamagedFileError(f"found {len(payload)} bytes that do not match their checksum")
    payload = payload[take_identity(payload, identity) :]
    start = _size_of_rewinds(payload)
    if len(payload) != start + 4 * num_tokens:
        raise DamagedFileError(f"found {len(payload) - start} bytes of tokens, expected {4 * num_tokens}")
    rewinds = tuple(Rewind(*each) for each in REWIND.iter_unpack(payload[NUM_REWINDS.size : start]))
    return TokenLog(np.frombuffer(payload[start:], dtype="<u4").astype(np.uint32), rewinds)


def _size_of_rewinds(payload: bytes) -> int:
    if len(payload) < NUM_REWINDS.size:
        raise DamagedFileError(f"found {len(payload)} bytes behind the header, expected the number of rewinds")
    (num_rewinds,) = NUM_REWINDS.unpack_from(payload)
    size = NUM_REWINDS.size + int(num_rewinds) * REWIND.size
    if size > len(payload):
        raise DamagedFileError(f"found {len(payload)} bytes behind the header, expected {size} of rewinds first")
    return size


# The logs of all jobs of a worker in one file, so that an interval costs one write.


CHECKPOINTS, WORKERS, WORKER_LOG_SUFFIX = "checkpoints", "workers", ".logs"
WORKER_LOGS_FOLDER = f"{CHECKPOINTS}/{WORKERS}"
ENTRY_HEAD = b'{"entry":'  # every entry begins with it
NUM_LISTINGS = 3  # a listing may miss a file that was just replaced


class PackedLog(NamedTuple):
    """The files of one attempt as bytes; the timeline may be empty."""

    job_id: str
    attempt: int
    claim: bytes
    timeline: bytes
    log: bytes

    @property
    def files(self) -> dict[str, bytes]:
        """Return the files by name; the log comes last, as a sign that the others are complete."""
        return {"claim.json": self.claim, "timeline.json": self.timeline, "tokens.bin": self.log}


class FoundLogs(NamedTuple):
    """The names of packed files, and their entries."""

    names: list[str]
    entries: list[PackedLog]

    def without(self, job_ids: Collection[str]) -> FoundLogs:
        return FoundLogs(self.names, [entry for entry in self.entries if entry.job_id not in job_ids])


class RunningAttempt(NamedTuple):
    """An attempt in a worker's packed file."""

    record: AttemptRecord
    log: TokenLog


class _Head(Strict):
    entry: Literal[1] = 1  # `ENTRY_HEAD` matches it, to find the next entry after damage
    job_id: str
    attempt: int
    sizes: tuple[int, int, int] = Field(description="of the files in bytes")


def pack(entries: Iterable[PackedLog]) -> bytes:
    parts: list[bytes] = []
    for entry in entries:
        files = list(entry.files.values())
        head = _Head(job_id=entry.job_id, attempt=entry.attempt, sizes=(len(files[0]), len(files[1]), len(files[2])))
        parts += [sealed(head.model_dump_json().encode()), *files]
    return b"".join(parts)


def unpack(data: bytes) -> tuple[list[PackedLog], int]:
    """Return a file's readable entries, and its number of damaged bytes."""
    entries, num_lost, start = [], 0, 0
    while start < len(data):
        behind = data.find(b"\n", start) + 1
        head = _head(data[start:behind])
        if head is None or behind + sum(head.sizes) > len(data):
            following = data.find(ENTRY_HEAD, start + 1)
            following = len(data) if following < 0 else following
            num_lost += following - start
            start = following
            continue
        parts = []
        for size in head.sizes:
            parts.append(data[behind : behind + size])
            behind += size
        entries.append(PackedLog(head.job_id, head.attempt, *parts))
        start = _next_entry(data, behind - sum(head.sizes), behind)
    return entries, num_lost


def _next_entry(data: bytes, files: int, end: int) -> int:
    """Return the offset of the next entry: `end`, or an earlier offset if the previous entry lost bytes."""
    if end == len(data) or data.startswith(ENTRY_HEAD, end):
        return end
    sooner = data.find(ENTRY_HEAD, files, end + len(ENTRY_HEAD) - 1)
    return end if sooner < 0 else sooner


def _head(line: bytes) -> _Head | None:
    try:
        return parse_sealed(line, _Head)
    except ValueError:
        return None


class PackedLogs:
    """The packed files of a run's workers. Methods raise `StoreError`."""

    def __init__(self, store: Store, fingerprint: str) -> None:
        self._store, self._fingerprint = store, fingerprint
        self._files = CheckedFiles(store)
        self._known: dict[str, dict[str, RunningAttempt]] = {}  # by file name; files never change

    @classmethod
    def of(cls, run: Run) -> Self:
        return cls(run.store, run.manifest.fingerprint)

    def entry(
        self, job_id: str, attempt: int, start: AttemptStart, log: TokenLog, timeline: Timeline | None
    ) -> PackedLog:
        identity = Identity(job_id=job_id, fingerprint=self._fingerprint)
        claim = dump_file(start, identity)
        kept = b"" if timeline is None else dump_file(timeline, identity)
        return PackedLog(job_id, attempt, claim, kept, encode_log(log, identity))

    def write(self, name: str, entries: Iterable[PackedLog]) -> int:
        data = pack(entries)
        self._store.write(f"{WORKER_LOGS_FOLDER}/{name}", data)
        return len(data)

    def delete(self, name: str) -> int:
        self._store.delete(f"{WORKER_LOGS_FOLDER}/{name}")
        return 0

    def names(self, worker_ids: Collection[str] | None = None) -> list[str]:
        """Return the files of some workers, or of all, oldest first."""
        names = [name for name in self._store.list(WORKER_LOGS_FOLDER) if name.endswith(WORKER_LOG_SUFFIX)]
        return [name for name in names if worker_ids is None or name.rsplit("-", 2)[0] in worker_ids]

    def read(self, worker_ids: Collection[str] | None = None) -> dict[str, RunningAttempt]:
        """Return the furthest attempts in the files of some workers, or of all, by job."""
        for _ in range(NUM_LISTINGS):
            read = {name: self._known.get(name) or self._attempts(name) for name in self.names(worker_ids)}
            self._known = {name: attempts for name, attempts in read.items() if attempts is not None}
            if len(read) == len(self._known):  # otherwise a file was replaced meanwhile
                break
        found: dict[str, RunningAttempt] = {}
        for attempts in self._known.values():
            for job_id, attempt in attempts.items():
                if job_id not in found or attempt.log.progress > found[job_id].log.progress:
                    found[job_id] = attempt
        return found

    def entries(self, name: str) -> list[PackedLog] | None:
        """Read a file's entries, or return None if the file is gone; damage is logged."""
        if (data := self._store.read(f"{WORKER_LOGS_FOLDER}/{name}")) is None:
            return None
        found, num_lost = unpack(data)
        if num_lost:
            self._files.name(f"{WORKER_LOGS_FOLDER}/{name}", f"found {num_lost} bytes that are no whole entry")
        return found

    def found(self, worker_ids: Collection[str] | None = None) -> FoundLogs:
        names = self.names(worker_ids)
        return FoundLogs(names, [entry for name in names for entry in self.entries(name) or ()])

    def put_in_place(self, found: FoundLogs) -> None:
        """Write entries as the attempts' own files, then delete the packed ones.

        The call may be repeated. A worker wrongly thought dead does no harm, because its attempts are superseded.
        """
        by_attempt: dict[tuple[str, int], list[PackedLog]] = {}
        for entry in found.entries:
            by_attempt.setdefault((entry.job_id, entry.attempt), []).append(entry)
        in_parallel(lambda alike: [self.place(entry) for entry in alike], by_attempt.values())
        in_parallel(self.delete, found.names)

    def place(self, entry: PackedLog) -> int:
        """Write an entry as the attempt's own files unless they are as far along. Returns bytes written."""
        log = self._files.decoded(_place(entry), entry.log, partial(self._decoded, entry))
        folder = f"{CHECKPOINTS}/{entry.job_id}/{entry.attempt:04d}"
        if log is None:
            return 0
        if (there := self._store.read(f"{folder}/tokens.bin")) is not None:
            own = self._files.decoded(f"{folder}/tokens.bin", there, partial(self._decoded, entry))
            if own is not None and own.progress >= log.progress:
                return 0
        files = {name: data for name, data in entry.files.items() if data}
        for name, data in files.items():
            self._store.write(f"{folder}/{name}", data)
        return sum(map(len, files.values()))

    def _attempts(self, name: str) -> dict[str, RunningAttempt] | None:
        """Return None if the file is gone."""
        if (entries := self.entries(name)) is None:
            return None
        found = {}
        for entry in entries:
            decode = partial(self._attempt, entry)
            if (attempt := self._files.decoded(_place(entry), entry.log, decode)) is not None:
                found[entry.job_id] = attempt
        return found

    def _attempt(self, entry: PackedLog, data: bytes) -> RunningAttempt:
        identity = Identity(job_id=entry.job_id, fingerprint=self._fingerprint)
        start = parse_file(entry.claim, AttemptStart, identity).model_dump()
        timeline = parse_file(entry.timeline, Timeline, identity) if entry.timeline else None
        record = AttemptRecord.model_validate({**start, "number": entry.attempt, "timeline": timeline})
        return RunningAttempt(record, self._decoded(entry, data))

    def _decoded(self, entry: PackedLog, data: bytes) -> TokenLog:
        return decode_log(data, Identity(job_id=entry.job_id, fingerprint=self._fingerprint))


def _place(entry: PackedLog) -> str:
    return f"{WORKER_LOGS_FOLDER}, {entry.job_id}, attempt {entry.attempt}"


class WorkerLogs:
    """One worker's packed file of logs.

    The functions that `take` and `take_rest` return run one at a time; everything else runs under one lock.
    """

    def __init__(self, packed: PackedLogs, worker_id: str) -> None:
        self._packed = packed
        self._name, self._numbers = f"{worker_id}-{token_hex(8)}", count(1)  # no other worker ever has this name
        self._entries: dict[tuple[str, int], PackedLog] = {}
        self._leaving: list[tuple[str, int]] = []
        self._written: str | None = None  # the newest file

    @property
    def has_rest(self) -> bool:
        """Return whether an entry must move to its own folder, or the file is no longer needed."""
        return bool(self._leaving or (self._written is not None and not self._entries))

    def put(self, job_id: str, attempt: int, start: AttemptStart, log: TokenLog, timeline: Timeline | None) -> None:
        """Put a log into the next file; if `timeline` is None, keep the older timeline."""
        older = self._entries.get((job_id, attempt))
        entry = self._packed.entry(job_id, attempt, start, log, timeline)
        if timeline is None and older is not None:
            entry = entry._replace(timeline=older.timeline)
        self._entries[job_id, attempt] = entry

    def leave(self, job_id: str, attempt: int) -> None:
        """Move an entry to its own folder."""
        if (job_id, attempt) in self._entries:
            self._leaving.append((job_id, attempt))

    def forget(self, job_ids: Collection[str]) -> None:
        for key in [key for key in self._entries if key[0] in job_ids and key not in self._leaving]:
            del self._entries[key]

    def take(self) -> Callable[[], int]:
        """Return a function that replaces the file and returns the bytes written."""
        before, entries = self._written, list(self._entries.values())
        self._written = name = f"{self._name}-{next(self._numbers):06d}{WORKER_LOG_SUFFIX}"

        def write() -> int:
            num_bytes = self._packed.write(name, entries)
            if before is not None:
                self._packed.delete(before)
            return num_bytes

        return write

    def take_rest(self) -> Callable[[], int]:
        """Return a function for the next step that `has_rest` reports."""
        if self._leaving:
            entry = self._entries.pop(self._leaving.pop(0))
            return lambda: self._packed.place(entry)
        written, self._written = self._written, None
        return lambda: 0 if written is None else self._packed.delete(written)
