"""The form of a result segment: the results of many jobs in one file, which is written as a whole and never changes.

All of it is lines of JSON, for people and programs that read text:

{"id": ..., "checksum": ...}    the results, each as `json_lines.sealed` writes it
{"index": [[job_id, start, length, num_tokens], ...]}    where each of them lies, in bytes, and its generated tokens
{"fingerprint": ..., "index_start": ..., "index_sha256": ..., "checksum": ...}

Where index or last line are damaged, the results are still found: each line names its job and has its checksum.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, ValidationError

from swiftbatch.jobs.frozen_records import Strict
from swiftbatch.jobs.input.validation_errors import reasons
from swiftbatch.jobs.json_lines import dump_line, sealed, unsealed
from swiftbatch.jobs.run.output_line_fields import LINE_ID, line_id, num_completion_tokens, parse_line

SEGMENTS = "results/segments"
SUFFIX = ".seg"
TAIL_BYTES = 2**17  # has the last line, and the index of a thousand results

ReadPart = Callable[[int, int], bytes]
"""Reads so many bytes of a segment from a place on."""

Part = TypeVar("Part", bound=Strict)
Number = Annotated[int, Field(ge=0, lt=2**63)]  # as an array keeps it


class SealedResult(NamedTuple):
    """A job's output line with its checksum and newline, and the tokens that it generated."""

    job_id: str
    num_tokens: int
    line: bytes

    @classmethod
    def of(cls, job_id: str, line: dict[str, Any]) -> SealedResult:
        return cls(job_id, num_completion_tokens(line), sealed(dump_line(line)[:-1]))


class ResultEntry(NamedTuple):
    """The place of a result in its segment."""

    job_id: str
    start: int
    length: int
    num_tokens: int


@dataclass(frozen=True)
class SegmentIndex:
    """The index of a segment in few bytes: three `numbers` a job, which are its `ResultEntry` without the id."""

    job_ids: list[str]
    numbers: array[int]

    @classmethod
    def of(cls, entries: Iterable[ResultEntry]) -> SegmentIndex:
        rows = list(entries)
        return cls([row[0] for row in rows], array("q", [number for row in rows for number in row[1:]]))

    def entry(self, row: int) -> ResultEntry:
        return ResultEntry(self.job_ids[row], *self.numbers[3 * row : 3 * row + 3])

    def place(self, row: int) -> tuple[int, int]:
        """The start and the length of an entry, without the rest: a million are looked up."""
        return self.numbers[3 * row], self.numbers[3 * row + 1]

    def entries(self) -> Iterator[ResultEntry]:
        return (self.entry(row) for row in range(len(self.job_ids)))


class _LastLine(Strict):
    fingerprint: str  # the run's
    index_start: Number
    index_sha256: str


class _Index(Strict):
    index: list[tuple[str, Number, Number, Number]]  # as `ResultEntry`


def encode_segment(results: Iterable[SealedResult], fingerprint: str) -> bytes:
    """The file of some results, of a run with this fingerprint."""
    entries, lines, start = [], [], 0
    for result in results:
        entries.append(ResultEntry(result.job_id, start, len(result.line), result.num_tokens))
        lines.append(result.line)
        start += len(result.line)
    index = dump_line({"index": entries})
    last = _LastLine(fingerprint=fingerprint, index_start=start, index_sha256=hashlib.sha256(index).hexdigest())
    return b"".join([*lines, index, sealed(last.model_dump_json().encode())])


def read_index(read: ReadPart, size: int, fingerprint: str | None) -> SegmentIndex:
    """Find the places of all results of a segment of so many bytes; only its end is read.

    Raises ValueError where they can't be found so, and for a segment of another run; `fingerprint` None fits all.
    """
    tail_start = max(0, size - TAIL_BYTES)
    tail = read(tail_start, size - tail_start)
    end = tail[:-1].rfind(b"\n") + 1
    last = _last_line(tail[end:])
    if fingerprint not in (None, last.fingerprint):
        raise ValueError(f"found a file of a run with the fingerprint {last.fingerprint}, expected {fingerprint}")
    missing = tail_start - last.index_start
    index = tail[-missing:end] if missing <= 0 else read(last.index_start, missing) + tail[:end]
    if hashlib.sha256(index).hexdigest() != last.index_sha256:
        raise ValueError("found an index that does not match its checksum")
    return SegmentIndex.of(ResultEntry(*row) for row in _parsed(_Index, index).index)


def _last_line(data: bytes) -> _LastLine:
    text = unsealed(data)
    if text is None:
        raise ValueError("found no last line that says where its index is")
    return _parsed(_LastLine, text)


def _parsed(model: type[Part], text: bytes) -> Part:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(reasons(error, model)) from None


def found_lines(data: bytes, fingerprint: str | None) -> Iterator[ResultEntry]:
    """The places of all whole results in a segment whose index can't be used."""
    start = 0
    for line in data.splitlines(keepends=True):
        try:
            if (text := unsealed(line)) is not None:
                job_id = _job_of(text)
                num_tokens = num_completion_tokens(parse_line(text, job_id, fingerprint))
                yield ResultEntry(job_id, start, len(line), num_tokens)
        except (ValueError, RecursionError):
            pass
        start += len(line)


def is_whole(data: bytes, entry: ResultEntry) -> bool:
    """Tell whether a result in a segment is as it was written, and of the job that the index names."""
    try:
        text = unsealed(data[entry.start : entry.start + entry.length])
        if text is None:
            return False
        begins_as_expected = text.startswith(f'{{"id": "{line_id(entry.job_id)}"'.encode())  # parsing costs far more
        return begins_as_expected or _job_of(text) == entry.job_id
    except (ValueError, RecursionError):
        return False


def _job_of(text: bytes) -> str:
    """The id of the job whose output line it is. Raises ValueError, RecursionError."""
    return str(json.loads(text).get("id", "")).removeprefix(LINE_ID)
