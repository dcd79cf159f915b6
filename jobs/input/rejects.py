"""Rejected lines of job files, any number in little memory."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import BinaryIO, overload
from weakref import finalize

from pydantic import TypeAdapter

from swiftbatch.jobs.errors import LineCode
from swiftbatch.jobs.storage.store import new_spool, told_of_room


@dataclass(frozen=True, slots=True)
class Reject:
    """A rejected line with its number from 1, and OpenAI's code; `file` is set if there are several."""

    line_number: int
    custom_id: str | None
    reason: str
    file: str | None = None
    code: LineCode = "invalid_value"

    @property
    def place(self) -> str:
        """Return the place as `line 7` or `part-2.jsonl:7`."""
        return f"line {self.line_number}" if self.file is None else f"{self.file}:{self.line_number}"


NUM_AT_ONCE = 1000
REJECT = TypeAdapter(Reject)


class Rejects(Sequence[Reject]):
    """Rejects in a file, in memory while short. Methods may raise StoreError."""

    def __init__(self, some: Iterable[Reject] = ()) -> None:
        self._file = new_spool()
        self._is_at_end = True
        self._starts = array("Q", [0])  # byte offset of each line, and the end
        finalize(self, self._file.close)
        for reject in some:
            self.add(reject)

    @classmethod
    def read(cls, file: BinaryIO) -> Rejects:
        """Parse JSON lines. Raises ValueError."""
        return cls(REJECT.validate_python(json.loads(line)) for line in file)  # pydantic parses no lone surrogates

    def add(self, reject: Reject) -> None:
        line = json.dumps(astuple(reject)).encode() + b"\n"
        with told_of_room():
            if not self._is_at_end:  # a seek flushes pending writes
                self._file.seek(self._starts[-1])
            self._file.write(line)
        self._is_at_end = True
        self._starts.append(self._starts[-1] + len(line))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, place: int) -> Reject: ...
    @overload
    def __getitem__(self, place: slice) -> list[Reject]: ...
    def __getitem__(self, place: int | slice) -> Reject | list[Reject]:
        numbers = range(len(self))[place]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        [reject] = self._some(numbers, numbers + 1)
        return reject

    def __iter__(self) -> Iterator[Reject]:
        for start in range(0, len(self), NUM_AT_ONCE):
            yield from self._some(start, min(start + NUM_AT_ONCE, len(self)))

    def _some(self, start: int, end: int) -> list[Reject]:
        self._is_at_end = False
        with told_of_room():
            self._file.seek(self._starts[start])
            lines = self._file.read(self._starts[end] - self._starts[start])
        return [Reject(*json.loads(line)) for line in lines.splitlines()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)
