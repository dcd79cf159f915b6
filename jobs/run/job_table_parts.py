"""Reads tables of jobs part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from swiftbatch.jobs.input.validation_errors import shown
from swiftbatch.jobs.job import Job, JobRecord
from swiftbatch.jobs.run.checked_reading import DamagedError
from swiftbatch.jobs.run.job_table import LONGEST, RUN, paths
from swiftbatch.jobs.storage.store import Store
from swiftbatch.jobs.storage.temporary_files import at_hand

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray
    from pyarrow import parquet

PROMPT = ("prompt_token_ids", "last_marker")
RECORD = ("job_id", "job", "line_number", "num_prompt_tokens", "supersedes", "prompt_keys", *PROMPT)

Value = TypeVar("Value")


def read_parts(store: Store, names: Sequence[str], run_id: str | None = None) -> Iterator[pa.Table]:
    """The columns `names` of all tables of a run, part by part in order.

    Raises StoreError, RunError for a damaged table and for that of another run than `run_id`.
    """
    return _read_all(store, lambda file: parts_of(file, names, run_id))


def read_records(store: Store, places: NDArray[np.int64], run_id: str | None = None) -> Iterator[JobRecord]:
    """The jobs at some places, ascending ones, among the rows of all tables of a run. Raises as `read_parts`."""
    num_before = 0

    def records(file: BinaryIO) -> Iterator[JobRecord]:
        nonlocal num_before
        for part in parts_of(file, RECORD, run_id):
            yield from records_of(picked(part, places - num_before))
            num_before += len(part)

    return _read_all(store, records)


def longest_job(store: Store, run_id: str | None) -> int:
    """Positions that the longest job of a run needs, 0 without jobs. Raises as `read_parts`."""
    return max(_read_all(store, lambda file: iter([_longest(file, run_id)])), default=0)


def parts_of(file: BinaryIO, names: Sequence[str], run_id: str | None = None) -> Iterator[pa.Table]:
    """The parts of the table in a file, as `read_parts`. Raises ValueError for what can't be used."""
    import pyarrow as pa

    try:
        table = _opened(file, run_id)
        if absent := set(names) - set(table.schema_arrow.names):
            raise ValueError(f"found no column {min(absent)!r}, expected a table of jobs")
        for number in range(table.num_row_groups):
            yield table.read_row_group(number, columns=list(names), use_threads=False).select(list(names))
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ValueError(str(error)) from None


def records_of(part: pa.Table) -> Iterator[JobRecord]:
    """The jobs of a part that was read with the columns `RECORD`. Raises ValueError for damaged ones."""
    for job_id, job, *others in zip(*(part.column(name).to_pylist() for name in RECORD), strict=True):
        yield JobRecord(job_id, Job.model_validate_json(job), *others)


def _read_all(store: Store, read: Callable[[BinaryIO], Iterator[Value]]) -> Iterator[Value]:
    """Read something of each table of a run. Raises DamagedError, with its place, where `read` raises ValueError."""
    for path in paths(store):
        with at_hand(store, path) as file:
            if file is None:
                _refuse_if_it_was_there(store, path)
                continue
            values = read(file)
            while True:
                try:
                    value = next(values)
                except StopIteration:
                    break
                except (ValueError, TypeError, RecursionError) as error:
                    raise DamagedError(store, path, " ".join(str(error).split())) from None
                yield value


def _refuse_if_it_was_there(store: Store, path: str) -> None:
    """Raise DamagedError for a table that is missing although its jobs have results or checkpoints."""
    if any(store.list(folder) for folder in ("results", "checkpoints")):
        raise DamagedError(store, path, "it is missing, but its jobs have results or checkpoints")


def picked(part: pa.Table, places: NDArray[np.int64]) -> pa.Table:
    """Return the rows of a part at ascending places; places before the part or behind it are left out."""
    first, last = places.searchsorted([0, len(part)])
    return part if last - first == len(part) else part.take(places[first:last])


def _opened(file: BinaryIO, run_id: str | None) -> parquet.ParquetFile:
    from pyarrow import parquet

    file.seek(0)
    # without threads: pyarrow's may still be starting when `status` ends, and abort the process
    table = parquet.ParquetFile(file, pre_buffer=False, page_checksum_verification=True)
    found = _metadata(table).get(RUN, b"none")
    if run_id is not None and found != run_id.encode():
        raise ValueError(f"found the jobs of run {shown(found.decode(errors='replace'))}, expected those of {run_id}")
    return table


def _metadata(table: parquet.ParquetFile) -> dict[bytes, bytes]:
    return table.metadata.metadata or {}


def _longest(file: BinaryIO, run_id: str | None) -> int:
    return int(_metadata(_opened(file, run_id)).get(LONGEST, b""))
