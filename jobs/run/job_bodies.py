"""The jobs that a driver is to hand out, as JSON in a file on its machine: in any order each is one short read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.job import SentJob
from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.run.job_table_parts import picked
from swiftbatch.jobs.storage.temporary_files import new_spool, told_of_room

if TYPE_CHECKING:
    import pyarrow as pa


class JobBodies:
    """The jobs at some places of a run's tables."""

    def __init__(self, parts: Iterator[pa.Table], places: NDArray[np.int64]) -> None:
        """`parts` are all of the run, with the column `job` alone; `places` are ascending. Raises StoreError."""
        self._places = places
        self._first, last = (int(places[0]), int(places[-1])) if len(places) else (0, -1)
        self._is_gapless = last - self._first + 1 == len(places)  # as of a run that begins
        self._file = new_spool()
        finalize(self, self._file.close)
        with told_of_room():
            sizes = [_write(self._file, part) for part in _at(parts, places)]
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([places[:0], *sizes]))])

    def sent(self, entry: JobEntry) -> SentJob:
        """The whole of a job, for a worker. Raises StoreError."""
        row = entry.place - self._first if self._is_gapless else int(np.searchsorted(self._places, entry.place))
        start, end = self._starts[row : row + 2].tolist()
        with told_of_room():
            self._file.seek(start)
            text = self._file.read(end - start)
        return SentJob(entry.job_id, entry.line_number, entry.num_prompt_tokens, text)


def _at(parts: Iterator[pa.Table], places: NDArray[np.int64]) -> Iterator[pa.Table]:
    num_before = 0
    for part in parts:
        yield picked(part, places - num_before)
        num_before += len(part)


def _write(file: BinaryIO, part: pa.Table) -> NDArray[np.int64]:
    """Write the jobs of a part one behind the other; returns the bytes of each."""
    import pyarrow as pa
    from pyarrow import compute

    jobs = part.column("job").cast(pa.large_string())
    for chunk in jobs.chunks:
        if len(chunk):
            _, offsets, letters = chunk.buffers()
            ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
            file.write(memoryview(letters)[int(ends[0]) : int(ends[-1])])
    return np.asarray(compute.binary_length(jobs).to_numpy(), np.int64)
