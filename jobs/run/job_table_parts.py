"""Reads tables of jobs part by part; what tables of older versions lack is filled in from the jobs themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from swiftbatch.jobs.input.validation_errors import shown
from swiftbatch.jobs.job import Job, JobRecord
from swiftbatch.jobs.run.checked_reading import DamagedError
from swiftbatch.jobs.run.job_table import LONGEST, RUN, paths, table_schema
from swiftbatch.jobs.storage.store import Store
from swiftbatch.jobs.storage.temporary_files import at_hand

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray
    from pyarrow import parquet

PROMPT = ("prompt_token_ids", "last_marker")
RECORD = ("job_id", "job", "line_number", "num_prompt_tokens", "supersedes", "prompt_keys", *PROMPT)
FILL: dict[str, Callable[[dict[str, Any]], Any]] = {  # columns that older tables lack, from the job as JSON
    "max_tokens": lambda job: job["sampling"]["max_tokens"],
    "choice_index": lambda job: job.get("choice_index", 0),
    "num_choices": lambda job: job.get("num_choices", 1),
}
DEFAULTS: dict[str, Any] = {  # the same, for what is in no job
    **{"supersedes": None, "prompt_keys": b""},
    **{"prompt_token_ids": b"", "last_marker": None},
}

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
        absent = set(names) - set(table.schema_arrow.names)
        if unknown := absent - FILL.keys() - DEFAULTS.keys():
            raise ValueError(f"found no column {min(unknown)!r}, expected a table of jobs")
        needed = (set(names) - absent) | ({"job"} if absent & FILL.keys() else set())
        for number in range(table.num_row_groups):
            part = table.read_row_group(number, columns=sorted(needed), use_threads=False)
            yield _completed(part, names)
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
    found = _metadata(table).get(RUN)
    if found is not None and run_id is not None and found != run_id.encode():
        raise ValueError(f"found the jobs of run {shown(found.decode(errors='replace'))}, expected those of {run_id}")
    return table


def _metadata(table: parquet.ParquetFile) -> dict[bytes, bytes]:
    return table.metadata.metadata or {}


def _completed(part: pa.Table, names: Sequence[str]) -> pa.Table:
    """A part with all columns asked for, those that its version did not write with what they stand for."""
    import pyarrow as pa

    absent = [name for name in names if name not in part.column_names]
    jobs = [json.loads(text) for text in part.column("job").to_pylist()] if FILL.keys() & set(absent) else []
    for name in absent:
        values = [FILL[name](job) for job in jobs] if name in FILL else [DEFAULTS[name]] * len(part)
        part = part.append_column(name, pa.array(values, table_schema().field(name).type))
    return part.select(list(names))


def _longest(file: BinaryIO, run_id: str | None) -> int:
    known = _metadata(_opened(file, run_id)).get(LONGEST)
    if known is not None:
        return int(known)
    parts = parts_of(file, ("num_prompt_tokens", "max_tokens"), run_id)
    return max((sum(row.values()) for part in parts for row in part.to_pylist()), default=0)
