"""A table of jobs as bytes, to be damaged."""

from __future__ import annotations

import io
from collections.abc import Sequence

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.job_table import RECORD, parts_of, records_of, write_records


def to_parquet(records: Sequence[JobRecord], run_id: str) -> bytes:
    file = io.BytesIO()
    write_records(file, records, run_id)
    return file.getvalue()


def from_parquet(data: bytes, run_id: str | None = None) -> list[JobRecord]:
    return [record for part in parts_of(io.BytesIO(data), RECORD, run_id) for record in records_of(part)]
