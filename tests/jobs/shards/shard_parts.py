"""A run with choices, its jobs' ends, and its shards' contents."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyarrow import parquet

from swiftbatch.jobs.job import Job, JobRecord
from swiftbatch.jobs.run.output_line import error_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.shards import DATA, Shards, ShardSettings, ask_for_shards
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.jobs.storage.store import Store
from tests.jobs.run.run_parts import FINISHED, MANIFEST, write_result

Rows = list[dict[str, Any]]


def records_of(lines: dict[str, int], max_tokens: int = 5) -> list[JobRecord]:
    """Make jobs from custom_id: number of choices."""
    found = []
    for line_number, (custom_id, num_choices) in enumerate(lines.items(), start=1):
        for index in range(num_choices):
            job = Job(
                custom_id=custom_id,
                url="/v1/completions",
                prompt=f"Once {custom_id}",
                sampling=SamplingParams(max_tokens=max_tokens, seed=index),
                choice_index=index,
                num_choices=num_choices,
            )
            found.append(JobRecord(job.job_id("f1"), job, line_number, 3))
    return found


def make_run(uri: str, lines: dict[str, int], shards: str | None = "parquet:3") -> Run:
    run = Run.planned(uri, MANIFEST).made()
    run.add_jobs(records_of(lines))
    if shards is not None:
        ask_for_shards(run.store, ShardSettings.parse(shards))
    return run


def longer(record: JobRecord, max_tokens: int) -> JobRecord:
    sampling = record.job.sampling.model_copy(update={"max_tokens": max_tokens})
    job = record.job.model_copy(update={"sampling": sampling})
    return replace(record, job_id=job.job_id("f1"), job=job, supersedes=record.job_id)


def finish(run: Run, *records: JobRecord) -> None:
    for record in records:
        body = FINISHED["response"]["body"] | {
            "choices": [{"text": f"text of {record.job_id}", "finish_reason": "length"}],
            "metrics": {"speed": 1.5},
        }
        write_result(run, record.job_id, {"custom_id": record.job.custom_id, "response": {"body": body}, "error": None})


def fail(run: Run, *records: JobRecord, code: str = "attempts_failed", message: str = "why") -> None:
    for record in records:
        run.write_error(record.job_id, error_line(record, code, message))


def shards_of(run: Run, epoch: int = 1, check: Callable[[], None] = lambda: None) -> Shards:
    return Shards.of(Run.open(run.store.uri), epoch, check)


def files(store: Store) -> dict[str, bytes]:
    return {name: store.read(f"{DATA}/{name}") or b"" for name in store.list(DATA)}


def rows_of(name: str, data: bytes) -> Rows:
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in data.splitlines()]
    found: Rows = parquet.read_table(io.BytesIO(data), use_threads=False).to_pylist()
    return found


def all_rows(store: Store) -> list[Rows]:
    return [rows_of(name, data) for name, data in files(store).items()]


def job_ids(shards: Iterable[Rows]) -> list[str]:
    return [row["job_id"] for rows in shards for row in rows]


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.is_file()]
