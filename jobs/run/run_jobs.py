"""The jobs of a run in its tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO
from weakref import finalize

from swiftbatch.jobs.job import LINE_END, JobRecord
from swiftbatch.jobs.run import job_table
from swiftbatch.jobs.run.job_table import lineages, longest_job, picked, read_parts, read_records
from swiftbatch.jobs.run.run_records import RunManifest
from swiftbatch.jobs.storage.store import Store, new_spool, spool, told_of_room

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from swiftbatch.jobs.run.job_index import JobIndex


BODY = ("job", "last_marker", "prompt_token_ids")


class JobBodies:
    """The bodies of a driver's jobs in a local file."""

    def __init__(self, parts: Iterator[pa.Table], places: NDArray[np.int64]) -> None:
        """`places` are ascending. Raises StoreError."""
        import numpy as np

        self._places = places
        self._first, last = (int(places[0]), int(places[-1])) if len(places) else (0, -1)
        self._is_gapless = last - self._first + 1 == len(places)  # holds for a new run
        self._file = new_spool()
        finalize(self, self._file.close)
        with told_of_room():
            sizes = [_write(self._file, part) for part in _at(parts, places)]
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([places[:0], *sizes]))])

    def at(self, place: int) -> bytes:
        """Read the body of the job at a place. Raises StoreError."""
        row = place - self._first if self._is_gapless else int(self._places.searchsorted(place))
        start, end = self._starts[row : row + 2].tolist()
        with told_of_room():
            self._file.seek(start)
            return self._file.read(end - start)


def _at(parts: Iterator[pa.Table], places: NDArray[np.int64]) -> Iterator[pa.Table]:
    num_before = 0
    for part in parts:
        yield picked(part, places - num_before)
        num_before += len(part)


def _write(file: BinaryIO, part: pa.Table) -> NDArray[np.int64]:
    """Return the bytes of each body."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute

    columns = [part.column(name).cast(pa.large_binary()) for name in BODY]
    line_end = pa.scalar(LINE_END, pa.large_binary())
    bodies = compute.binary_join_element_wise(*columns, line_end, null_handling="replace", null_replacement=b"")
    for chunk in bodies.chunks:
        if len(chunk):
            _, offsets, letters = chunk.buffers()
            ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
            file.write(memoryview(letters)[int(ends[0]) : int(ends[-1])])
    return np.asarray(compute.binary_length(bodies).to_numpy(), np.int64)


class RunJobs:
    """The jobs of a run. Methods raise `StoreError`, and `RunError` for a damaged table."""

    def __init__(self, store: Store, manifest: RunManifest | None) -> None:
        """`manifest` is None if damaged."""
        self.store = store
        self.manifest = RunManifest.model_construct() if manifest is None else manifest
        self._run_id = None if manifest is None else manifest.run_id

    def add_jobs(self, records: Iterable[JobRecord]) -> None:
        """Append the jobs that the run lacks, in order."""
        known = {job_id for lineage in self.lineages() for job_id in lineage}

        def new() -> Iterator[JobRecord]:
            for record in records:
                if record.job_id not in known:
                    known.add(record.job_id)
                    yield record

        with spool() as table:
            if job_table.write_records(table, new(), self.manifest.run_id):
                self.add_table(table)

    def add_table(self, table: BinaryIO) -> None:
        """Append a table of jobs that the run lacks."""
        table.seek(0)
        job_table.add(self.store, table)

    def parts(self, *names: str) -> Iterator[pa.Table]:
        return read_parts(self.store, names, self._run_id)

    def records(self) -> Iterator[JobRecord]:
        """Yield the latest version of every job, holding only one part of the tables in memory at a time."""
        import numpy as np

        places = self.job_index().places
        is_moved = places > np.minimum.accumulate(places[::-1])[::-1]  # moved to an earlier job's place
        moved = np.sort(places[is_moved])
        found = dict(zip(moved.tolist(), read_records(self.store, moved, self._run_id), strict=True))
        rest = read_records(self.store, places[~is_moved], self._run_id)
        return (found[place] if place in found else next(rest) for place in places.tolist())

    def jobs(self) -> list[JobRecord]:
        return list(self.records())

    def records_at(self, places: NDArray[np.int64]) -> Iterator[JobRecord]:
        return read_records(self.store, places, self._run_id)

    def job_index(self) -> JobIndex:
        from swiftbatch.jobs.run.job_index import COLUMNS, JobIndex

        return JobIndex.of(self.parts(*COLUMNS))

    def job_bodies(self, places: NDArray[np.int64]) -> JobBodies:
        return JobBodies(self.parts(*BODY), places)

    def longest_job(self) -> int:
        """Read the longest job's positions from metadata."""
        return longest_job(self.store, self._run_id)

    def all_jobs(self) -> dict[str, JobRecord]:
        """Return all jobs by id, also superseded jobs."""
        import numpy as np

        num_rows = sum(map(len, self.parts("job_id")))
        places = np.arange(num_rows, dtype=np.int64)
        return {record.job_id: record for record in read_records(self.store, places, self._run_id)}

    def job_ids(self) -> list[str]:
        """Return the ids of the latest version of every job, in input order."""
        from swiftbatch.jobs.run.job_index import JobIndex

        names = ("job_id", "supersedes")
        return list(JobIndex.of(self.parts(*names), names).job_ids())

    def all_job_ids(self) -> pa.ChunkedArray:
        """Return all ids, also those of superseded jobs."""
        import pyarrow as pa

        parts = self.parts("job_id")
        return pa.chunked_array([chunk for part in parts for chunk in part.column("job_id").chunks], pa.string())

    def lineages(self) -> list[list[str]]:
        parts = self.parts("job_id", "supersedes")
        rows = (zip(*(column.to_pylist() for column in part.columns), strict=True) for part in parts)
        return lineages(pair for pairs in rows for pair in pairs)

    def extended(self) -> dict[str, list[str]]:
        """Return the lineages of extended jobs, by their newest ids."""
        supersedes = (part.column("supersedes") for part in self.parts("supersedes"))
        is_extended = any(column.null_count < len(column) for column in supersedes)
        return {lineage[-1]: lineage for lineage in self.lineages() if len(lineage) > 1} if is_extended else {}

    def custom_ids(self) -> set[str]:
        parts = self.parts("custom_id")
        return {name for part in parts for name in part.column("custom_id").to_pylist()}
