"""The jobs of a run in input order, with the job itself as JSON: a table of its own for each file that was submitted.

jobs.parquet                      of the first one
jobs/<number>-<random>.parquet    of each later one that brought new jobs; never changed, and no two have one name

A table is made of parts (row groups) of at most `ROWS_PER_PART` jobs, and no more than one is in memory. It says which
run it is of and how long its longest job is, and its pages have checksums.

A job that takes another one's place names it in the column `supersedes`. The token ids of its prompt stand with it,
so that no attempt makes them again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, BinaryIO
from uuid import uuid4

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

Row = tuple[Any, ...]
"""The values of one job, in the order of `table_schema`."""

FIRST = "jobs.parquet"
LATER = "jobs"
RUN, LONGEST = b"swiftbatch.run_id", b"swiftbatch.longest_job"  # in a table's metadata
JOB, TOKEN_IDS = 2, 5  # the places of the job as JSON and of its prompt's ids in a row
ROWS_PER_PART = 50_000
LETTERS_PER_PART = 64 * 2**20  # of the jobs as JSON, and bytes of their prompts' ids: prompts may be long


def paths(store: Store) -> list[str]:
    """The tables of a run, oldest first."""
    return [FIRST, *(f"{LATER}/{name}" for name in store.list(LATER) if name.endswith(".parquet"))]


def add(store: Store, table: BinaryIO) -> None:
    """Add a table of jobs, which stands in a file, to a run. Two at once do not harm each other."""
    if store.exists(FIRST) or not store.write_new_from(FIRST, table):
        number = len(store.list(LATER)) + 2
        table.seek(0)
        store.write_from(f"{LATER}/{number:06d}-{uuid4().hex[:8]}.parquet", table)


def write_records(target: IO[bytes], records: Iterable[JobRecord], run_id: str) -> int:
    """Write a table of jobs as they come; returns their number."""
    return _write(target, (_part(rows) for rows in _parts(map(_row, records))), run_id)


def write_tables(target: IO[bytes], parts: Iterable[pa.Table], run_id: str) -> int:
    """Write a table of parts as `read_parts` gives them; returns the number of jobs."""
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

    # large: all prompts of a part may pass the 2 GiB of a plain string column
    texts = {"job_id": pa.string(), "custom_id": pa.string(), "job": pa.large_string(), "supersedes": pa.string()}
    numbers = ("line_number", "num_prompt_tokens", "max_tokens", "choice_index", "num_choices")
    prompts = {"prompt_keys": pa.large_binary(), "prompt_token_ids": pa.large_binary(), "last_marker": pa.string()}
    return pa.schema([*texts.items(), *prompts.items(), *((name, pa.int64()) for name in numbers)])


def _row(record: JobRecord) -> Row:
    job = record.job
    texts = (record.job_id, job.custom_id, job.model_dump_json(), record.supersedes)
    return (
        *texts,
        *(record.prompt_keys, record.prompt_token_ids, record.last_marker),
        *(record.line_number, record.num_prompt_tokens, job.sampling.max_tokens, job.choice_index, job.num_choices),
    )


def _parts(rows: Iterable[Row]) -> Iterator[list[Row]]:
    part: list[Row] = []
    num_letters = 0
    for row in rows:
        part.append(row)
        num_letters += len(row[JOB]) + len(row[TOKEN_IDS])
        if len(part) == ROWS_PER_PART or num_letters >= LETTERS_PER_PART:
            yield part
            part, num_letters = [], 0
    if part:
        yield part


def _part(rows: Sequence[Row]) -> pa.Table:
    import pyarrow as pa

    schema = table_schema()
    columns = [pa.array(column, each.type) for column, each in zip(zip(*rows, strict=True), schema, strict=True)]
    return pa.Table.from_arrays(columns, schema=schema)


def lineages(pairs: Iterable[tuple[str, str | None]]) -> list[list[str]]:
    """The lineage of each job: the ids from its first form to its newest, in input order.

    `pairs` are the jobs of all tables in their order, each with the job that it supersedes. Two commands at once may
    both have added a job, or have taken the same one on: what came first in the tables stays.
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
    """The newest form of a job that is one of `job_ids`."""
    return next((job_id for job_id in reversed(lineage) if job_id in job_ids), None)
