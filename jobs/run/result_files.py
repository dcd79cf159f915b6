"""The results of a run, in segment files of many results each."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from secrets import token_hex
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Annotated, Any
from weakref import finalize

from pydantic import Field

from swiftbatch.jobs.json_records import Strict, dump_line, parse_record, sealed, unsealed
from swiftbatch.jobs.run.error_files import DAMAGED, NO_FILE, LinePlace, parsed_line, read_lines
from swiftbatch.jobs.run.output_line import LINE_ID, line_id, num_completion_tokens, parse_line
from swiftbatch.jobs.run.run_records import in_parallel
from swiftbatch.jobs.storage.store import Store, told_of_room

SEGMENTS = "results/segments"
SUFFIX = ".seg"
TAIL_BYTES = 2**17  # holds the last line and the index of a thousand results

ReadPart = Callable[[int, int], bytes]
"""Reads so many bytes of a segment from a place on."""

Number = Annotated[int, Field(ge=0, lt=2**63)]  # an array's integers


Row = tuple[str, int, int, int]
"""A result in the index of its segment: the job's id, the start and the length of its line, and its tokens."""

LENGTH, NUM_TOKENS = 1, 2  # columns of a row after the id


class ResultSegment:
    """The results of a segment that is not written yet, as sealed lines."""

    def __init__(self, results: Iterable[tuple[str, dict[str, Any]]] = ()) -> None:
        self.index: list[Row] = []
        self.num_bytes = 0
        self._lines: list[bytes] = []
        for job_id, line in results:
            self.add(job_id, line)

    def add(self, job_id: str, line: dict[str, Any]) -> None:
        self.add_sealed(job_id, sealed(dump_line(line)[:-1]), num_completion_tokens(line))

    def add_sealed(self, job_id: str, line: bytes, num_tokens: int) -> None:
        self.index.append((job_id, self.num_bytes, len(line), num_tokens))
        self._lines.append(line)
        self.num_bytes += len(line)

    def encoded(self, fingerprint: str) -> bytes:
        """Return the segment's bytes for the run with this fingerprint."""
        index = dump_line({"index": self.index})
        digest = hashlib.sha256(index).hexdigest()
        last = _LastLine(fingerprint=fingerprint, index_start=self.num_bytes, index_sha256=digest)
        return b"".join([*self._lines, index, sealed(last.model_dump_json().encode())])


@dataclass(frozen=True)
class SegmentIndex:
    """A segment's index in little memory, three `numbers` per job."""

    path: str
    job_ids: list[str]
    numbers: array[int]

    @classmethod
    def of(cls, path: str, index: Iterable[Row]) -> SegmentIndex:
        rows = list(index)
        return cls(path, [row[0] for row in rows], array("q", [number for row in rows for number in row[1:]]))

    def place(self, row: int) -> LinePlace:
        return LinePlace(self.job_ids[row], self.path, *self.numbers[3 * row : 3 * row + 3])

    def places(self) -> Iterator[LinePlace]:
        return map(self.place, range(len(self.job_ids)))


class _LastLine(Strict):
    fingerprint: str  # the run's
    index_start: Number
    index_sha256: str


class _Index(Strict):
    index: list[tuple[str, Number, Number, Number]]


def read_index(read: ReadPart, size: int, fingerprint: str | None) -> Iterable[Row]:
    """Return the rows of all results, reading only a segment's end.

    Raises ValueError if the index is damaged or of another run.
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
    return parse_record(index, _Index).index


def _last_line(data: bytes) -> _LastLine:
    text = unsealed(data)
    if text is None:
        raise ValueError("found no last line that says where its index is")
    return parse_record(text, _LastLine)


def found_lines(data: bytes, fingerprint: str | None) -> Iterator[Row]:
    """Find the whole results in a segment with an unusable index."""
    start = 0
    for line in data.splitlines(keepends=True):
        try:
            if (text := unsealed(line)) is not None:
                job_id = _job_of(text)
                num_tokens = num_completion_tokens(parse_line(text, job_id, fingerprint))
                yield job_id, start, len(line), num_tokens
        except (ValueError, RecursionError):
            pass
        start += len(line)


def is_whole(data: bytes, place: LinePlace) -> bool:
    """Return whether a result is intact and belongs to the job that the index names."""
    try:
        text = unsealed(_line_at(data, place))
        if text is None:
            return False
        begins_as_expected = text.startswith(f'{{"id": "{line_id(place.job_id)}"'.encode())  # parsing costs far more
        return begins_as_expected or _job_of(text) == place.job_id
    except (ValueError, RecursionError):
        return False


def _line_at(data: bytes, place: LinePlace) -> bytes:
    return data[place.start : place.start + (place.length or 0)]


def _job_of(text: bytes) -> str:
    return str(json.loads(text).get("id", "")).removeprefix(LINE_ID)


# Results of a run in segments.


ROWS = 2**40  # more than any segment has
NOT_WHOLE = "found content that does not match its checksum, or its index"


class ResultFiles:
    """The results of one run; thread-safe. `damaged` collects unusable files.

    Segments never change, so each index is read once.
    """

    def __init__(self, store: Store, damaged: dict[str, str], fingerprint: str | None) -> None:
        self._store, self._damaged, self._fingerprint = store, damaged, fingerprint
        self._copies = _Copies(store)
        self._segments: dict[str, SegmentIndex] = {}  # by path
        self._paths: list[str] = []  # paths of all segments, also of removed ones
        self._broken: dict[str, str] = {}  # problems by path
        self._places: dict[str, int] = {}  # path number * ROWS + row in its index
        self._looking = Lock()

    def write_segment(self, name: str, segment: ResultSegment) -> None:
        assert self._fingerprint is not None  # writers know the run
        self._store.write_new(f"{SEGMENTS}/{name}{SUFFIX}", segment.encoded(self._fingerprint))

    def sizes(self) -> dict[str, int]:
        self._look()
        return self._numbers(LENGTH)

    def job_ids(self) -> Container[str]:
        """Return a live view of the jobs with a result."""
        self._look()
        return self._places

    def read(self, job_id: str) -> dict[str, Any] | None:
        """Read a job's line; return None if it is absent or damaged."""
        if job_id not in self._places:
            self._look()
        [line] = read_lines(self._read, [self.place(job_id)], self._parsed, self.elsewhere)
        return line

    def read_all(self, job_ids: Iterable[str]) -> Iterator[dict[str, Any] | None]:
        self._look()
        return read_lines(self.data, map(self.place, job_ids), self._parsed, self.elsewhere)

    def place(self, job_id: str) -> LinePlace | None:
        number, row = divmod(self._places.get(job_id, -1), ROWS)
        index = None if number < 0 else self._segments.get(self._paths[number])
        return None if index is None else index.place(row)

    def elsewhere(self, place: LinePlace) -> Iterator[LinePlace]:
        """Yield the places of the job's results in other segments, to replace a damaged line."""
        if place.length is None:
            return
        for path, index in list(self._segments.items()):
            if path != place.path and place.job_id in index.job_ids:
                yield index.place(index.job_ids.index(place.job_id))

    def data(self, place: LinePlace) -> bytes | None:
        """Return the bytes at a place; fast for many places in any order."""
        is_far = place.length is not None and not self._store.is_local
        return self._copies.part(place) if is_far else self._read(place)

    def whole(self) -> dict[str, int]:
        """Read all segments; return the tokens of intact results and drop the others."""
        self._look()
        paths = list(self._segments)
        for path, rows in zip(paths, in_parallel(self._whole_of, paths), strict=True):
            if rows is None:
                continue
            lost = set(self._segments[path].job_ids).difference(job_id for job_id, *_ in rows)
            for name in [f"{path}/{job_id}" for job_id in lost] or [path]:
                self._damaged[name] = self._broken[path] = NOT_WHOLE
            self._segments[path] = SegmentIndex.of(path, rows)
            self._place_all()
        return self._numbers(NUM_TOKENS)

    def set_damaged_aside(self) -> list[tuple[str, str, str]]:
        """Move damaged segments away and keep intact results; return old path, problem and new path."""
        moved = []
        for path, problem in self._broken.items():
            name = path.rpartition("/")[2].removesuffix(SUFFIX)
            aside = f"{DAMAGED}/results/{name}.{token_hex(4)}{SUFFIX}"
            data, intact = self._store.read(path) or b"", ResultSegment()
            for at in self._segments[path].places():
                intact.add_sealed(at.job_id, _line_at(data, at), at.num_tokens)
            if intact.index:
                self.write_segment(f"kept-{token_hex(8)}", intact)
            if self._store.move(path, aside):
                moved.append((path, problem, aside))
            for told in [told for told in self._damaged if told == path or told.startswith(f"{path}/")]:
                del self._damaged[told]
        self._broken = {}
        self._look()
        return moved

    def _look(self) -> None:
        with self._looking:
            found = self._store.sizes(SEGMENTS).items()
            sizes = {f"{SEGMENTS}/{name}": size for name, size in found if name.endswith(SUFFIX)}
            gone, new = self._segments.keys() - sizes.keys(), [path for path in sizes if path not in self._segments]
            for path in gone:
                del self._segments[path]
            if gone:
                self._place_all()
            for path, index in zip(new, in_parallel(lambda path: self._index(path, sizes[path]), new), strict=True):
                self._segments[path] = index
                self._place_some(path, self._places)

    def _place_all(self) -> None:
        places: dict[str, int] = {}
        for path in self._segments:
            self._place_some(path, places)
        self._places = places

    def _place_some(self, path: str, places: dict[str, int]) -> None:
        first = len(self._paths) * ROWS
        self._paths.append(path)
        for row, job_id in enumerate(self._segments[path].job_ids):
            places.setdefault(job_id, first + row)

    def _numbers(self, column: int) -> dict[str, int]:
        indexes = list(self._segments.values())
        pairs = (zip(each.job_ids, each.numbers[column::3], strict=True) for each in indexes)
        return dict(chain.from_iterable(pairs))

    def _index(self, path: str, size: int | None) -> SegmentIndex:
        try:
            if not size:
                raise ValueError(NO_FILE if size is None else "found an empty file")
            rows = read_index(lambda start, n: self._store.read_part(path, start, n) or b"", size, self._fingerprint)
        except ValueError as error:
            self._damaged[path] = self._broken[path] = " ".join(str(error).split())
            rows = found_lines(self._store.read(path) or b"", self._fingerprint)
        return SegmentIndex.of(path, rows)

    def _whole_of(self, path: str) -> list[Row] | None:
        """Return the intact results of a segment, or None if all results agree with the index."""
        data = self._store.read(path) or b""
        is_as_said = all(is_whole(data, place) for place in self._segments[path].places())
        return None if is_as_said else list(found_lines(data, self._fingerprint))

    def _parsed(self, place: LinePlace, data: bytes | None) -> dict[str, Any] | None:
        return parsed_line(place, data, self._damaged, self._fingerprint)

    def _read(self, place: LinePlace) -> bytes | None:
        if place.length is None:
            return self._store.read(place.path)
        return self._store.read_part(place.path, place.start, place.length)


class _Copies:
    """Local copies of an object store's segments."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._copying: defaultdict[str, Lock] = defaultdict(Lock)  # by path
        self._starts: dict[str, int] = {}
        self._file: IO[bytes] | None = None  # holds all copies
        self._writing = Lock()

    def part(self, place: LinePlace) -> bytes | None:
        """Return the bytes at a place, or None if the segment is gone.

        Raises `StoreError`.
        """
        with self._copying[place.path]:
            if place.path not in self._starts:
                data = self._store.read(place.path)
                if data is None:
                    return None
                self._starts[place.path] = self._keep(data)
        assert self._file is not None
        return os.pread(self._file.fileno(), place.length or 0, self._starts[place.path] + place.start)

    def _keep(self, data: bytes) -> int:
        with self._writing, told_of_room():
            if self._file is None:  # positions in `_starts` need the file first
                self._file = TemporaryFile()  # noqa: SIM115, it goes with this object
                finalize(self, self._file.close)
            start = self._file.seek(0, os.SEEK_END)
            self._file.write(data)
            self._file.flush()
            return start
