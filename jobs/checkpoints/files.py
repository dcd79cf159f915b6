"""What the JSON files of a checkpoint say: who claimed an attempt, how it began, which state it has written."""

from __future__ import annotations

import json
from typing import Final, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from jobs.checkpoints.checked_files import digest
from jobs.checkpoints.timeline import Moment, Timeline
from jobs.checkpoints.token_log import DamagedFileError
from jobs.frozen import Strict
from jobs.input.reasons import reasons, shown

VERSION: Final = 2
SEAL = b',"checksum":"'


class SegmentEntry(Strict):
    """A KV segment with the positions `[start, end)`; `file` is relative to the job's folder, `size` in bytes."""

    file: str = Field(pattern=r"^[0-9]{4,}/kv-[0-9]+-[0-9]+\.arrow$")
    start: int = Field(ge=0)
    end: int = Field(gt=0)
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _is_named_after_its_positions(self) -> Self:
        _check_name(self.file, segment_name(self.start, self.end))
        return self


class DrafterEntry(Strict):
    """The state of `engine`'s drafter after `num_positions` positions; `file` and `size` as in a `SegmentEntry`."""

    file: str = Field(pattern=r"^[0-9]{4,}/drafter-[0-9]+\.arrow$")
    num_positions: int = Field(ge=0)
    engine: str
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _is_named_after_its_positions(self) -> Self:
        _check_name(self.file, drafter_name(self.num_positions))
        return self


class StateManifest(Strict):
    """`manifest.json`: the segments of a sequence from position 0 on, without a gap, and the newest drafter state.

    They are of the tokens that stood there after `num_rewinds` rewinds.
    """

    version: Literal[2] = VERSION
    num_rewinds: int = Field(default=0, ge=0)
    segments: tuple[SegmentEntry, ...] = ()
    drafter: DrafterEntry | None = None

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


class ResumeRecord(Strict):
    """How an attempt began: what it took over, what it had to compute again, and how long that took.

    `num_recomputed_tokens` were generated once more, `num_loaded_positions` came from KV segments; `resumed` is the
    time (seconds since the epoch) when the job went on.
    """

    kind: Literal["kv", "replay"]
    num_recovered_tokens: int = Field(ge=0)
    num_recomputed_tokens: int = Field(ge=0)
    num_loaded_positions: int = Field(ge=0)
    seconds: float = Field(ge=0)
    resumed: Moment


class AttemptRecord(Strict):
    """One attempt of a job; `worker_id` and `numerics` are empty and `claimed` is 0 where its claim is damaged."""

    attempt: int
    worker_id: str = ""
    claimed: Moment = 0.0
    numerics: str = ""  # names what makes KV the same bits; attempts that differ in it can't share segments
    resume: ResumeRecord | None = None
    timeline: Timeline | None = None  # None where it never drew a token


class ClaimFile(Strict):
    """`claim.json`"""

    version: Literal[2] = VERSION
    worker_id: str
    claimed: Moment
    numerics: str


class ResumeFile(ResumeRecord):
    """`resume.json`"""

    version: Literal[2] = VERSION


class TimelineFile(Timeline):
    """`timeline.json`"""

    version: Literal[2] = VERSION


FileModel = TypeVar("FileModel", StateManifest, ClaimFile, ResumeFile, TimelineFile)


def dump_file(content: StateManifest | ClaimFile | ResumeFile | TimelineFile) -> bytes:
    """One line of JSON that ends with a checksum of itself."""
    return _sealed(content.model_dump_json().encode())


def parse_file(data: bytes, model: type[FileModel]) -> FileModel:
    """The content of a JSON file. Raises `DamagedFileError` for a damaged one or one of another version."""
    try:
        version = json.loads(data).get("version")
    except (ValueError, AttributeError, RecursionError):
        raise DamagedFileError(f"found {len(data)} bytes that are no JSON object") from None
    # a newer version may be sealed in another way
    if version != VERSION:
        raise DamagedFileError(f"found version {shown(version)}, expected {VERSION}")
    text = data.rpartition(SEAL)[0] + b"}"
    if data != _sealed(text):
        raise DamagedFileError("found content that does not match its checksum")
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise DamagedFileError(reasons(error, model)) from None


def segment_name(start: int, end: int) -> str:
    return f"kv-{start}-{end}.arrow"


def drafter_name(num_positions: int) -> str:
    return f"drafter-{num_positions}.arrow"


def _check_name(file: str, expected: str) -> None:
    if file.partition("/")[2] != expected:
        raise ValueError(f"found the file name {shown(file)}, expected it to end in {expected}")


def _sealed(text: bytes) -> bytes:
    return text[:-1] + SEAL + digest(text).encode() + b'"}\n'
