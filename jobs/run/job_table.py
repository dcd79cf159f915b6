"""The tables of a run's jobs (jobs.parquet), in input order."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TypeVar
from uuid import uuid4
from weakref import finalize

from swiftbatch.jobs.job import LINE_END, Job, JobRecord
from swiftbatch.jobs.json_records import shown
from swiftbatch.jobs.run.run_records import DamagedError
from swiftbatch.jobs.storage.store import Store, at_hand, new_spool, told_of_room

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray
    from pyarrow import parquet

Value = TypeVar("Value")
Row = tuple[Any, ...]
"""The values of one job, in the order of `table_schema`."""

FIRST = "jobs.parquet"
LATER = "jobs"
RUN, LONGEST = b"swiftbatch.run_id", b"swiftbatch.longest_job"  # metadata of a table
JOB, TOKEN_IDS, KEPT = 2, 5, -1  # columns of the JSON job, of its prompt's ids and of what it keeps
ROWS_PER_PART = 50_000
CHARACTERS_PER_PART = 64 * 2**20  # characters of JSON plus bytes of prompt ids: prompts may be long


def paths(store: Store) -> list[str]:
    return [FIRST, *(f"{LATER}/{name}" for name in store.list(LATER) if name.endswith(".parquet"))]


def add(store: Store, table: BinaryIO) -> None:
    """Add a table of jobs; two writers at once do no harm."""
    if store.exists(FIRST) or not store.write_new_from(FIRST, table):
        number = len(store.list(LATER)) + 2
        table.seek(0)
        store.write_from(f"{LATER}/{number:06d}-{uuid4().hex[:8]}.parquet", table)


def write_records(target: IO[bytes], records: Iterable[JobRecord], run_id: str) -> int:
    return _write(target, map(_part, in_groups(map(_row, records), ROWS_PER_PART, CHARACTERS_PER_PART, _size)), run_id)


def write_tables(target: IO[bytes], parts: Iterable[pa.Table], run_id: str) -> int:
    return _write(target, (part.select(table_schema().names) for part in parts if len(part)), run_id)


def _write(target: IO[bytes], parts: Iterable[pa.Table], run_id: str) -> int:
    from pyarrow import compute, parquet

    num_rows = longest = 0
    with parquet.ParquetWriter(target, table_schema().with_metadata({RUN: run_id}), write_page_checksum=True) as writer:
        for part in parts:
            num_rows += len(part)
            lengths = compute.add(part.column("num_prompt_tokens"), part.column("max_tokens"))
            longest = max(longest, compute.max(lengths).as_py())
            writer.write_table(part, row_group_size=ROWS_PER_PART)
        writer.add_key_value_metadata({LONGEST: str(longest)})
    return num_rows


def table_schema() -> pa.Schema:
    import pyarrow as pa

    # large_string: a part's prompts may exceed the 2 GiB of a string column
    texts = {"job_id": pa.string(), "custom_id": pa.string(), "job": pa.large_string(), "supersedes": pa.string()}
    numbers = ("line_number", "num_prompt_tokens", "max_tokens", "choice_index", "num_choices")
    prompts = {"prompt_keys": pa.large_binary(), "prompt_token_ids": pa.large_binary(), "last_marker": pa.string()}
    kept = (LATER_COLUMN, pa.large_string())
    return pa.schema([*texts.items(), *prompts.items(), *((name, pa.int64()) for name in numbers), kept])


def _row(record: JobRecord) -> Row:
    job = record.job
    texts = (record.job_id, job.custom_id, job.model_dump_json(), record.supersedes)
    return (
        *texts,
        *(record.prompt_keys, record.prompt_token_ids, record.last_marker),
        *(record.line_number, record.num_prompt_tokens, job.sampling.max_tokens, job.choice_index, job.num_choices),
        record.kept,
    )


def in_groups(
    items: Iterable[Value], max_items: int, max_size: int, size_of: Callable[[Value], int]
) -> Iterator[list[Value]]:
    """Yield lists of at most `max_items` consecutive items, or of fewer if their sizes add up to `max_size`."""
    group, size = list[Value](), 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if len(group) == max_items or size >= max_size:
            yield group
            group, size = [], 0
    if group:
        yield group


def _size(row: Row) -> int:
    return len(row[JOB]) + len(row[TOKEN_IDS]) + len(row[KEPT] or "")


def _part(rows: Sequence[Row]) -> pa.Table:
    import pyarrow as pa

    schema = table_schema()
    columns = [pa.array(column, each.type) for column, each in zip(zip(*rows, strict=True), schema, strict=True)]
    return pa.Table.from_arrays(columns, schema=schema)


def lineages(pairs: Iterable[tuple[str, str | None]]) -> list[list[str]]:
    """Return each job's ids, from its original version to its latest extension.

    `pairs` are (job, superseded job) in table order; of two equal pairs, the first stays.
    """
    found: list[list[str]] = []
    by_job_id: dict[str, list[str]] = {}
    for job_id, superseded in pairs:
        if job_id in by_job_id:
            continue
        lineage = by_job_id.get(superseded or "")
        if lineage is None:
            found.append(lineage := [])
        elif lineage[-1] != superseded:
            continue
        lineage.append(job_id)
        by_job_id[job_id] = lineage
    return found


def newest_with(lineage: list[str], job_ids: Container[str]) -> str | None:
    return next((job_id for job_id in reversed(lineage) if job_id in job_ids), None)


# Reads tables of jobs in parts.


PROMPT = ("prompt_token_ids", "last_marker")
LATER_COLUMN = "kept"  # tables of earlier versions lack it
RECORD = ("job_id", "job", "line_number", "num_prompt_tokens", "supersedes", "prompt_keys", *PROMPT, LATER_COLUMN)


def read_parts(store: Store, names: Sequence[str], run_id: str | None = None) -> Iterator[pa.Table]:
    """Read columns of all tables in parts.

    Raises StoreError, RunError for a damaged table or one of another run.
    """
    return _read_all(store, lambda file: parts_of(file, names, run_id))


def read_records(store: Store, places: NDArray[np.int64], run_id: str | None = None) -> Iterator[JobRecord]:
    """Read the jobs at ascending places of all tables. Raises as `read_parts`."""
    num_before = 0

    def records(file: BinaryIO) -> Iterator[JobRecord]:
        nonlocal num_before
        for part in parts_of(file, RECORD, run_id):
            yield from records_of(picked(part, places - num_before))
            num_before += len(part)

    return _read_all(store, records)


def longest_job(store: Store, run_id: str | None) -> int:
    """Return the longest job's positions, or 0 if there are no jobs. Raises as `read_parts`."""
    return max(_read_all(store, lambda file: iter([_longest(file, run_id)])), default=0)


def parts_of(file: BinaryIO, names: Sequence[str], run_id: str | None = None) -> Iterator[pa.Table]:
    """Read one table as `read_parts` does. Raises ValueError."""
    import pyarrow as pa

    try:
        table = _opened(file, run_id)
        absent = set(names) - set(table.schema_arrow.names)
        if absent - {LATER_COLUMN}:
            raise ValueError(f"found no column {min(absent)!r}, expected a table of jobs")
        there = [name for name in names if name not in absent]
        for number in range(table.num_row_groups):
            part = table.read_row_group(number, columns=there, use_threads=False)
            if absent:
                part = part.append_column(LATER_COLUMN, pa.nulls(len(part), pa.large_string()))
            yield part.select(list(names))
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ValueError(str(error)) from None


def records_of(part: pa.Table) -> Iterator[JobRecord]:
    """Parse a part with the columns `RECORD`. Raises ValueError."""
    for job_id, job, *others in zip(*(part.column(name).to_pylist() for name in RECORD), strict=True):
        yield JobRecord(job_id, Job.model_validate_json(job), *others)


def _read_all(store: Store, read: Callable[[BinaryIO], Iterator[Value]]) -> Iterator[Value]:
    """Read from each table; a ValueError becomes DamagedError."""
    for path in paths(store):
        with at_hand(store, path) as file:
            if file is None:
                if any(store.list(folder) for folder in ("results", "checkpoints")):
                    raise DamagedError(store, path, "it is missing, but its jobs have results or checkpoints")
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


def picked(part: pa.Table, places: NDArray[np.int64]) -> pa.Table:
    """Return the rows at ascending places, ignoring places outside this part."""
    first, last = places.searchsorted([0, len(part)])
    return part if last - first == len(part) else part.take(places[first:last])


def _opened(file: BinaryIO, run_id: str | None) -> parquet.ParquetFile:
    from pyarrow import parquet

    file.seek(0)
    # without threads: pyarrow's may still start when `status` ends, and abort the process
    table = parquet.ParquetFile(file, pre_buffer=False, page_checksum_verification=True)
    found = _metadata(table).get(RUN, b"none")
    if run_id is not None and found != run_id.encode():
        raise ValueError(f"found the jobs of run {shown(found.decode(errors='replace'))}, expected those of {run_id}")
    return table


def _metadata(table: parquet.ParquetFile) -> dict[bytes, bytes]:
    return table.metadata.metadata or {}


def _longest(file: BinaryIO, run_id: str | None) -> int:
    return int(_metadata(_opened(file, run_id)).get(LONGEST, b""))


# The bodies of a driver's jobs.


BODY = ("job", "last_marker", "prompt_token_ids")


class JobBodies:
    """The bodies of many jobs in a local file: the columns of `parts`, joined by line ends."""

    def __init__(self, parts: Iterator[pa.Table], places: NDArray[np.int64]) -> None:
        """`places` are ascending. Raises StoreError."""
        import numpy as np

        self._places = places
        self._first, last = (int(places[0]), int(places[-1])) if len(places) else (0, -1)
        self._is_gapless = last - self._first + 1 == len(places)  # holds for a new run
        self._file = new_spool()
        finalize(self, self._file.close)
        with told_of_room():
            sizes = [_write_bodies(self._file, part) for part in _at(parts, places)]
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([places[:0], *sizes]))])

    def at(self, place: int) -> bytes:
        """Read the body of the job at a place. Raises StoreError."""
        start, end = self._bounds(place)
        with told_of_room():
            self._file.seek(start)
            return self._file.read(end - start)

    def num_bytes(self, place: int) -> int:
        start, end = self._bounds(place)
        return end - start

    def _bounds(self, place: int) -> list[int]:
        row = place - self._first if self._is_gapless else int(self._places.searchsorted(place))
        return [int(each) for each in self._starts[row : row + 2]]


def _at(parts: Iterator[pa.Table], places: NDArray[np.int64]) -> Iterator[pa.Table]:
    num_before = 0
    for part in parts:
        yield picked(part, places - num_before)
        num_before += len(part)


def _write_bodies(file: BinaryIO, part: pa.Table) -> NDArray[np.int64]:
    """Return the bytes of each body."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute

    columns = [column.cast(pa.large_binary()) for column in part.columns]
    line_end = pa.scalar(LINE_END, pa.large_binary())
    bodies = compute.binary_join_element_wise(*columns, line_end, null_handling="replace", null_replacement=b"")
    for chunk in bodies.chunks:
        if len(chunk):
            _, offsets, letters = chunk.buffers()
            ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
            file.write(memoryview(letters)[int(ends[0]) : int(ends[-1])])
    return np.asarray(compute.binary_length(bodies).to_numpy(), np.int64)
