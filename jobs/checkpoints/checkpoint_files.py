"""The JSON files of a checkpoint, with an attempt's timeline; readers skip and report damaged and foreign files."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

from pydantic import Field, model_validator

from swiftbatch.jobs.file_owner import DamagedFileError, Identity, refuse_other
from swiftbatch.jobs.json_records import Strict, parse_sealed, sealed, shown
from swiftbatch.jobs.storage.store import Store

Moment = Annotated[float, Field(ge=0, lt=253_402_300_800)]  # seconds since the epoch, up to the year 9999

MAX_MARKS = 64
MIN_STRIDE_SECONDS = 1.0


class OwnedFile(Strict):
    """Base of the contents of checkpoint files; `identity` is the owner, which `dump_file` adds to the file alone."""

    identity: Identity | None = Field(default=None, exclude=True)


class Timeline(OwnedFile):
    """Columns `[num_marks]` of an attempt's progress; the first mark is at its first verified step.

    `num_tokens` includes tokens recovered from earlier attempts; the other counts cover this attempt alone.
    """

    started: Moment  # time of the first mark
    seconds: tuple[float, ...]  # time since `started`
    num_tokens: tuple[int, ...]
    num_drafts: tuple[int, ...]
    num_accepted_tokens: tuple[int, ...]
    is_released: bool = False  # the attempt ended at its last mark with all its tokens in the log

    @model_validator(mode="after")
    def _has_equal_columns(self) -> Self:
        lengths = {len(c) for c in (self.seconds, self.num_tokens, self.num_drafts, self.num_accepted_tokens)}
        if len(lengths) != 1 or lengths == {0}:
            raise ValueError(f"found columns of {sorted(lengths)} marks, expected the same number, at least one")
        return self


class TimelineRecorder:
    """Records at most `MAX_MARKS` marks.

    When they are full, every second one is dropped and the interval doubles.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[float, int, int, int]] = []
        self._stride = MIN_STRIDE_SECONDS
        self._started = 0.0
        self._newest: tuple[float, int, int, int] | None = None
        self.has_news = False  # some marks are not in a taken timeline

    def note(self, now: float, wall: float, num_tokens: int, num_drafts: int, num_accepted_tokens: int) -> None:
        """Record progress; `now` is `time.monotonic()`, `wall` seconds since the epoch."""
        mark = (now, num_tokens, num_drafts, num_accepted_tokens)
        if not self._marks:
            self._started = wall
        self._newest = mark
        if self._marks and now - self._marks[-1][0] < self._stride:
            return
        self._marks.append(mark)
        self.has_news = True
        if len(self._marks) > MAX_MARKS - 1:  # the newest one is added to these
            del self._marks[1::2]
            self._stride *= 2

    def take(self, is_released: bool = False) -> Timeline | None:
        """Return the timeline so far, or None before the first step."""
        if self._newest is None:
            return None
        self.has_news = False
        marks = self._marks if self._marks[-1] == self._newest else [*self._marks, self._newest]
        first = marks[0][0]
        return Timeline(
            started=round(self._started, 3),
            seconds=tuple(round(now - first, 3) for now, *_ in marks),
            num_tokens=tuple(mark[1] for mark in marks),
            num_drafts=tuple(mark[2] for mark in marks),
            num_accepted_tokens=tuple(mark[3] for mark in marks),
            is_released=is_released,
        )


NUMBERS_PER_EPOCH: Final = 1_000_000  # attempt numbers per driver


class StateEntry(Strict):
    """A file of a job's state, in the folder of an attempt; `size` is in bytes."""

    file: str = Field(pattern=r"^[0-9]{4,}/")
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @property
    def attempt(self) -> int:
        return int(self.file.partition("/")[0])

    @property
    def name(self) -> str:
        """Return the file's name, which tells its positions."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _is_named_after_its_positions(self) -> Self:
        if self.file.partition("/")[2] != self.name:
            raise ValueError(f"found the file name {shown(self.file)}, expected it to end in {self.name}")
        return self


class SegmentEntry(StateEntry):
    """A KV segment of positions `[start, end)`."""

    start: int = Field(ge=0)
    end: int = Field(gt=0)

    @property
    def name(self) -> str:
        return segment_name(self.start, self.end)


class DrafterEntry(StateEntry):
    """The state of `engine`'s drafter after `num_positions` positions."""

    num_positions: int = Field(ge=0)
    engine: str

    @property
    def name(self) -> str:
        return drafter_name(self.num_positions)


class LayerStatesEntry(StateEntry):
    """Layer states after the first `num_positions` positions."""

    num_positions: int = Field(gt=0)

    @property
    def name(self) -> str:
        return states_name(self.num_positions)


class StateManifest(OwnedFile):
    """`manifest.json`: segments from position 0 and newest states, after `num_rewinds` rewinds."""

    num_rewinds: int = Field(default=0, ge=0)
    segments: tuple[SegmentEntry, ...] = ()
    drafter: DrafterEntry | None = None
    states: LayerStatesEntry | None = None

    @property
    def num_positions(self) -> int:
        return self.segments[-1].end if self.segments else 0

    @model_validator(mode="after")
    def _has_no_gap(self) -> Self:
        expected = 0
        for segment in self.segments:
            if segment.start != expected or segment.end <= expected:
                raise ValueError(f"found the segment {segment.file}, expected one that starts at {expected}")
            expected = segment.end
        return self


class ResumeRecord(OwnedFile):
    """Record of a resumed attempt.

    `num_recomputed_tokens` were generated again, `num_loaded_positions` came from segments.
    """

    kind: Literal["kv", "replay"]
    num_recovered_tokens: int = Field(ge=0)
    num_recomputed_tokens: int = Field(ge=0)
    num_loaded_positions: int = Field(ge=0)
    seconds: float = Field(ge=0)
    resumed: Moment


class AttemptStart(OwnedFile):
    """The worker, start and numerics of an attempt, written before its other files; `attempt` counts from 1."""

    worker_id: str
    claimed: Moment
    numerics: str  # equal numerics give equal KV bits, so only such attempts share segments
    attempt: int = Field(ge=1)


class AttemptRecord(Strict):
    """One attempt of a job; `attempt` counts from 1, `number` is the number in its folder's name.

    The other fields are empty if their files are damaged.
    """

    attempt: int
    worker_id: str = ""
    claimed: Moment = 0.0
    numerics: str = ""
    resume: ResumeRecord | None = None
    timeline: Timeline | None = None  # None if it drew no token
    number: int


FileModel = TypeVar("FileModel", bound=OwnedFile)


def dump_file(content: OwnedFile, identity: Identity) -> bytes:
    owner = f'{{"identity":{identity.model_dump_json()},'
    return sealed(f"{owner}{content.model_dump_json()[1:]}".encode())


def parse_file(data: bytes, model: type[FileModel], identity: Identity) -> FileModel:
    """Parse a job's JSON file. Raises `DamagedFileError`, also for another job's file."""
    try:
        found = parse_sealed(data, model)
    except ValueError as error:
        raise DamagedFileError(str(error)) from None
    if found.identity is None:
        raise DamagedFileError("found no job's name")
    refuse_other(found.identity, identity)
    return found.model_copy(update={"identity": None})  # as it was given to `dump_file`


def segment_name(start: int, end: int) -> str:
    return f"kv-{start}-{end}.arrow"


def drafter_name(num_positions: int) -> str:
    return f"drafter-{num_positions}.arrow"


def states_name(num_positions: int) -> str:
    return f"states-{num_positions}.arrow"


# Readers that log damaged or foreign files once and skip them.


Content = TypeVar("Content")
Decode: TypeAlias = Callable[[bytes], Content]

logger = logging.getLogger(__name__)


def digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


class CheckedFiles:
    """Reads and decodes files of a store. `decode` functions raise `DamagedFileError`, methods only `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._named: set[tuple[str, str]] = set()

    def read_verified(
        self, path: str, entry: StateEntry, identity: Identity, whose: Decode[Identity | None], decode: Decode[Content]
    ) -> Content | None:
        """Check and decode a file of a manifest; return None if the file is unusable.

        `whose` reads the owner before the checksum is compared: another job's file is no damaged file.
        """

        def verified(data: bytes) -> Content:
            if (owner := whose(data)) is not None:  # without an owner the file is damaged
                refuse_other(owner, identity)
            if len(data) != entry.size:
                raise DamagedFileError(f"found {len(data)} bytes, expected {entry.size}")
            if digest(data) != entry.sha256:
                raise DamagedFileError("found content that does not match its checksum")
            return decode(data)

        return self.decoded(path, self._store.read(path), verified)

    def decoded(self, path: str, data: bytes | None, decode: Decode[Content]) -> Content | None:
        """Return the decoded file, or None if the file is absent, damaged or another job's."""
        try:
            if data is None:
                raise DamagedFileError("found no file")
            return decode(data)
        except DamagedFileError as error:
            self.name(path, str(error))
            return None

    def name(self, path: str, problem: str) -> None:
        if (path, problem) not in self._named:
            self._named.add((path, problem))
            where = self._store.shown_uri
            logger.warning("skipped %s in %s: %s; the job goes on from what is left", path, where, problem)


def read_attempt(
    store: Store, files: CheckedFiles, folder: str, numbers: Sequence[int], index: int, identity: Identity
) -> AttemptRecord:
    """Read the attempt at `index` of a job's attempt `numbers`."""

    def read(name: str, model: type[FileModel], is_due: bool) -> dict[str, Any] | None:
        path = f"{folder}/{name}"
        data = store.read(path)
        if data is None and not is_due:
            return None
        found = files.decoded(path, data, lambda data: parse_file(data, model, identity))
        return found.model_dump() if found else None

    number, is_newest = numbers[index], index == len(numbers) - 1
    start = read("claim.json", AttemptStart, is_due=True) or {}
    # the first attempt has no such file, and the newest attempt may have just begun
    resume = read("resume.json", ResumeRecord, is_due=index > 0 and not is_newest)
    # an attempt without a token has none
    timeline = read("timeline.json", Timeline, is_due=False)
    known = {"attempt": index + 1} | start | {"number": number, "resume": resume, "timeline": timeline}
    return AttemptRecord.model_validate(known)
