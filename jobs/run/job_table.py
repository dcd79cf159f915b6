"""The jobs of a run in input order, with the job itself as JSON: a table of its own for each file that was submitted.

jobs.parquet                      of the first one
jobs/<number>-<random>.parquet    of each later one that brought new jobs; never changed, and no two have one name

A table says which run it is of, and its pages have checksums. Those of older versions have neither, and are read.

A job that takes another one's place names it in the column `supersedes`, which other tables do not have. A table whose
prompts are all shorter than what has a key lacks the column `prompt_keys`.

The forms of one job, each in the place of the one before, are its lineage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from swiftbatch.jobs.input.reasons import shown
from swiftbatch.jobs.job import Job, JobRecord
from swiftbatch.jobs.run.run_files import read_parsed
from swiftbatch.jobs.storage.store import Store

FIRST = "jobs.parquet"
LATER = "jobs"
RUN = b"swiftbatch.run_id"  # in a table's metadata
OPTIONAL = {"supersedes": None, "prompt_keys": b""}  # columns that a table may lack, and what its jobs have then


def add(store: Store, records: Sequence[JobRecord], run_id: str) -> None:
    """Add a table of jobs to a run. Two at once do not harm each other."""
    data = to_parquet(records, run_id)
    if not store.write_new(FIRST, data):
        number = len(store.list(LATER)) + 2
        store.write(f"{LATER}/{number:06d}-{uuid4().hex[:8]}.parquet", data)


def paths(store: Store) -> list[str]:
    """The tables of a run, oldest first."""
    return [FIRST, *(f"{LATER}/{name}" for name in store.list(LATER) if name.endswith(".parquet"))]


def to_parquet(records: Sequence[JobRecord], run_id: str) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    columns = {
        "job_id": pa.array([record.job_id for record in records], pa.string()),
        "custom_id": pa.array([record.job.custom_id for record in records], pa.string()),
        "line_number": pa.array([record.line_number for record in records], pa.int64()),
        "num_prompt_tokens": pa.array([record.num_prompt_tokens for record in records], pa.int64()),
        # large: all prompts together may pass the 2 GiB of a plain string column
        "job": pa.array([record.job.model_dump_json() for record in records], pa.large_string()),
    }
    if any(record.supersedes for record in records):
        columns["supersedes"] = pa.array([record.supersedes for record in records], pa.string())
    if any(record.prompt_keys for record in records):
        columns["prompt_keys"] = pa.array([record.prompt_keys for record in records], pa.large_binary())
    sink = pa.BufferOutputStream()
    table = pa.table(columns).replace_schema_metadata({RUN: run_id})
    parquet.write_table(table, sink, write_page_checksum=True)
    return bytes(sink.getvalue())


def from_parquet(data: bytes, run_id: str | None = None) -> list[JobRecord]:
    """The jobs of `to_parquet`. Raises `ValueError` for anything else, and for those of another run than `run_id`."""
    names = ["job_id", "job", "line_number", "num_prompt_tokens", *OPTIONAL]
    return [
        JobRecord(job_id, Job.model_validate_json(job), *others)
        for job_id, job, *others in zip(*_columns(data, names, run_id), strict=True)
    ]


def job_ids(data: bytes, run_id: str | None = None) -> list[tuple[str, str | None]]:
    """The ids of the jobs of `to_parquet`, each with the one that it supersedes, if any. Raises `ValueError`.

    Prompts are not taken apart.
    """
    return list(zip(*_columns(data, ["job_id", "supersedes"], run_id), strict=True))


def names(data: bytes) -> list[tuple[str, str | None, str]]:
    """The ids that `job_ids` returns, each also with its `custom_id`. Raises `ValueError`."""
    return list(zip(*_columns(data, ["job_id", "supersedes", "custom_id"]), strict=True))


def custom_ids(data: bytes, run_id: str | None = None) -> list[str]:
    """The names of the lines of the jobs of `to_parquet`, one for each job. Raises `ValueError`."""
    [names] = _columns(data, ["custom_id"], run_id)
    return names


def _columns(data: bytes, names: list[str], run_id: str | None = None) -> list[list[Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        # without threads: pyarrow's may still be starting when `status` ends, and abort the process
        file = parquet.ParquetFile(pa.BufferReader(data), pre_buffer=False, page_checksum_verification=True)
        _refuse_other_run((file.schema_arrow.metadata or {}).get(RUN), run_id)
        table = file.read(columns=names, use_threads=False)
        without = OPTIONAL.keys() - set(table.column_names)
        return [[OPTIONAL[name]] * len(table) if name in without else table.column(name).to_pylist() for name in names]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ValueError(str(error)) from None


def _refuse_other_run(found: bytes | None, run_id: str | None) -> None:
    """Raise `ValueError` for a table that says that it is of another run."""
    if found is not None and run_id is not None and found != run_id.encode():
        raise ValueError(f"found the jobs of run {shown(found.decode(errors='replace'))}, expected those of {run_id}")


def lineages(pairs: Iterable[tuple[str, str | None]]) -> list[list[str]]:
    """The ids of each job from its first form to its newest, in input order.

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


@dataclass(frozen=True, slots=True)
class JobName:
    """A job, and which one of how many choices of its line it is."""

    job_id: str
    custom_id: str
    choice_index: int
    num_choices: int

    @property
    def name(self) -> str:
        """The name of the job for people and events, equal to `Job.name`."""
        return self.custom_id if self.num_choices == 1 else f"{self.custom_id}[{self.choice_index}]"


def job_names(store: Store) -> list[JobName]:
    """The jobs of a run in input order, each in its newest form. Raises RunError, StoreError."""
    tables = (read_parsed(store, path, names) for path in paths(store))
    rows = [row for table in tables for row in table or []]
    custom_ids = {job_id: custom_id for job_id, _, custom_id in rows}
    newest = [lineage[-1] for lineage in lineages((job_id, superseded) for job_id, superseded, _ in rows)]
    num_choices = Counter(custom_ids[job_id] for job_id in newest)
    seen: Counter[str] = Counter()
    found = []
    for job_id in newest:
        custom_id = custom_ids[job_id]
        found.append(JobName(job_id, custom_id, seen[custom_id], num_choices[custom_id]))
        seen[custom_id] += 1
    return found
