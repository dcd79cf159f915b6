"""Output lines with one file per job; damaged lines count as absent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from swiftbatch.jobs.json_records import dump_line, sealed, unsealed
from swiftbatch.jobs.run.job_table import in_groups
from swiftbatch.jobs.run.output_line import is_plain_result, parse_line
from swiftbatch.jobs.run.run_records import NUM_READ_AHEAD, NUM_READERS, in_parallel
from swiftbatch.jobs.storage.store import Store

DAMAGED = "damaged"
NO_FILE = "found no file, but something else of that name"
SUFFIX = ".json"
NUM_SHORT_AHEAD = 1024  # lines of known length
BYTES_AHEAD = 2**24  # bytes read ahead; files count as equally long


class LinePlace(NamedTuple):
    """The place of a job's line: a file, or part of a segment."""

    job_id: str
    path: str
    start: int = 0
    length: int | None = None  # None for a whole file
    num_tokens: int = 0  # set for results in a segment

    @property
    def name(self) -> str:
        """Return the name in damage reports; it ends with the job's id."""
        return self.path if self.length is None else f"{self.path}/{self.job_id}"


ReadPlace = Callable[[LinePlace], bytes | None]
Found = TypeVar("Found")


class LineFiles:
    """The lines in one folder of a run; `damaged` collects unusable files.

    `fingerprint` is the run's, or None if unknown.
    """

    def __init__(self, store: Store, folder: str, damaged: dict[str, str], fingerprint: str | None) -> None:
        self._store = store
        self._folder = folder
        self._damaged = damaged
        self._fingerprint = fingerprint

    def sizes(self) -> dict[str, int]:
        sizes = {name: size for name, size in self._store.sizes(self._folder).items() if name.endswith(SUFFIX)}
        for name, size in sizes.items():
            if not size:
                self._damaged[f"{self._folder}/{name}"] = NO_FILE if size is None else "found an empty file"
        return {name.removesuffix(SUFFIX): size for name, size in sizes.items() if size}

    def job_ids(self) -> set[str]:
        return set(self.sizes())

    def path(self, job_id: str) -> str:
        return f"{self._folder}/{job_id}{SUFFIX}"

    def place(self, job_id: str) -> LinePlace:
        return LinePlace(job_id, self.path(job_id))

    def write(self, job_id: str, line: dict[str, Any]) -> None:
        self._store.write(self.path(job_id), sealed(dump_line(line)[:-1]))

    def write_all(self, lines: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Write many lines in parallel, because each takes a store's latency."""
        remaining = iter(lines)
        while batch := list(islice(remaining, NUM_READ_AHEAD)):
            in_parallel(lambda pair: self.write(*pair), batch)

    def read(self, job_id: str) -> dict[str, Any] | None:
        """Read a job's line; return None if it is absent or damaged."""
        return self._parsed(self.place(job_id), self._data(self.place(job_id)))

    def read_all(self, job_ids: Iterable[str]) -> Iterator[dict[str, Any] | None]:
        return read_lines(self._data, map(self.place, job_ids), self._parsed)

    def _parsed(self, place: LinePlace, data: bytes | None) -> dict[str, Any] | None:
        return parsed_line(place, data, self._damaged, self._fingerprint)

    def _data(self, place: LinePlace) -> bytes | None:
        return self._store.read(place.path)

    def delete(self, job_id: str) -> None:
        self._store.delete(self.path(job_id))

    def set_damaged_aside(self, job_ids: Iterable[str]) -> list[tuple[str, str, str]]:
        """Move damaged lines away; return old path, problem and new path."""
        names, moved = set(self._store.list(self._folder)), []
        for job_id in job_ids:
            path = self.path(job_id)
            # read again, because a late worker may have replaced the file meanwhile
            if f"{job_id}{SUFFIX}" in names and self.read(job_id) is None:
                aside = self._free_path(job_id)
                if self._store.move(path, aside):
                    moved.append((path, self._damaged.pop(path, NO_FILE), aside))
        return moved

    def _free_path(self, job_id: str) -> str:
        taken, number = set(self._store.list(f"{DAMAGED}/{self._folder}")), 1
        while f"{job_id}.{number}{SUFFIX}" in taken:
            number += 1
        return f"{DAMAGED}/{self._folder}/{job_id}.{number}{SUFFIX}"


def parsed_line(
    place: LinePlace, data: bytes | None, damaged: dict[str, str], fingerprint: str | None
) -> dict[str, Any] | None:
    """Parse a line; return None if it is absent, damaged or another job's, and put the reason into `damaged`."""
    if data is None:
        return None
    try:
        if (text := unsealed(data)) is None:
            raise ValueError("found no checksum")
        return parse_line(text, place.job_id, fingerprint)
    except ValueError as error:
        damaged[place.name] = str(error)
        return None


def written_line(
    place: LinePlace, data: bytes | None, damaged: dict[str, str], fingerprint: str | None
) -> bytes | None:
    try:
        text = unsealed(data) if data else None
    except ValueError:
        text = None  # `parsed_line` reports the problem
    if text is not None and is_plain_result(text, place.job_id, fingerprint):
        return text + b"\n"
    line = parsed_line(place, data, damaged, fingerprint)
    return None if line is None else dump_line(line)


def read_lines(
    read: ReadPlace,
    places: Iterable[LinePlace | None],
    line_of_data: Callable[[LinePlace, bytes | None], Found | None],
    elsewhere: Callable[[LinePlace], Iterable[LinePlace]] = lambda place: (),
) -> Iterator[Found | None]:
    """Yield `line_of_data` for places in order, with bounded read-ahead.

    An intact line from `elsewhere` replaces a damaged line.
    """

    def line_of(place: LinePlace) -> Found | None:
        line = line_of_data(place, read(place))
        if line is not None:
            return line
        found = (line_of_data(each, read(each)) for each in elsewhere(place))
        return next((line for line in found if line is not None), None)

    def lines_of(some: list[LinePlace | None]) -> list[Found | None]:
        return [None if place is None else line_of(place) for place in some]

    with ThreadPoolExecutor(NUM_READERS) as pool:
        for batch in in_groups(places, NUM_SHORT_AHEAD, BYTES_AHEAD, _num_bytes):
            each = math.ceil(len(batch) / NUM_READERS)  # each thread takes several, because handing over costs time
            for lines in pool.map(lines_of, (batch[start : start + each] for start in range(0, len(batch), each))):
                yield from lines


def _num_bytes(place: LinePlace | None) -> int:
    return 0 if place is None else place.length or BYTES_AHEAD // NUM_READ_AHEAD
