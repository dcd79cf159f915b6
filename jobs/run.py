"""One run folder: its manifest, jobs, rejects, results, errors and progress, readable with `ls` and `cat`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from jobs import job_table
from jobs.job import JobRecord
from jobs.json_lines import dump_line
from jobs.output import write_output
from jobs.reader import Reject
from jobs.retries import Retries
from jobs.run_files import RunError, pretty, read_model, read_object, read_objects, read_parsed
from jobs.status import Progress, RunManifest, WorkerStatus
from jobs.store import Store

__all__ = ["Progress", "Run", "RunError", "RunManifest", "WorkerStatus"]

MANIFEST = "run.json"
JOBS = "jobs.parquet"
REJECTS = "rejects.jsonl"
PROGRESS = "progress.json"
CANCEL_RUN = "cancel/run.json"
CANCEL_JOBS = "cancel/jobs"


class Run:
    """A run in its folder. Every method raises `StoreError` when the storage fails, `RunError` for a damaged file."""

    def __init__(self, store: Store, manifest: RunManifest) -> None:
        self.store = store
        self.manifest = manifest

    @classmethod
    def create_or_open(cls, uri: str, manifest: RunManifest, retries: Retries | None = None) -> Run:
        """The run at `uri`, made from `manifest` if there is none; an older run keeps its own manifest.

        Raises `RunError` when the run there has another model or dtype: its results would not fit the new ones.
        """
        store = Store(uri, retries)
        if not store.exists(MANIFEST):
            strangers = {"results", "errors", "checkpoints", "output.jsonl", JOBS} & set(store.list(""))
            if strangers:
                found = ", ".join(sorted(strangers))
                raise RunError(f"{store.shown_uri} holds {found} but no {MANIFEST}: expected a run or a new folder")
            store.write_new(MANIFEST, pretty(manifest))
        run = cls.open(uri, retries)
        run._refuse_other("model_fingerprint", f"model {run.manifest.model}", manifest)
        run._refuse_other("dtype", f"dtype {run.manifest.dtype}", manifest)
        return run

    @classmethod
    def open(cls, uri: str, retries: Retries | None = None) -> Run:
        """The run at `uri`. Raises `RunError` when there is none."""
        store = Store(uri, retries)
        manifest = read_model(store, MANIFEST, RunManifest)
        if manifest is None:
            raise RunError(f"no run at {store.shown_uri}: expected {MANIFEST} there; `swiftbatch submit` makes one")
        return cls(store, manifest)

    def add_jobs(self, records: Sequence[JobRecord]) -> None:
        """Add the jobs that the run does not have yet, in their order after those it has."""
        known = self.jobs()
        known_ids = {record.job_id for record in known}
        new = {record.job_id: record for record in records if record.job_id not in known_ids}
        if new:
            self.store.write(JOBS, job_table.to_parquet([*known, *new.values()]))

    def jobs(self) -> list[JobRecord]:
        """All jobs in input order."""
        return read_parsed(self.store, JOBS, job_table.from_parquet) or []

    def job_ids(self) -> list[str]:
        """The ids of all jobs in input order, without their prompts."""
        return read_parsed(self.store, JOBS, job_table.job_ids) or []

    def write_rejects(self, rejects: Sequence[Reject]) -> None:
        """The rejects of the newest submission, in place of older ones."""
        self.store.write(REJECTS, b"".join(dump_line(asdict(reject)) for reject in rejects))

    def rejects(self) -> list[Reject]:
        """The rejects of the newest submission, in file order."""
        return read_parsed(self.store, REJECTS, _parse_rejects) or []

    def write_result(self, job_id: str, line: dict[str, Any]) -> bool:
        """Keep the output line of a finished job. False when there is one: a result is never overwritten."""
        return self.store.write_new(_result_path(job_id), dump_line(line))

    def write_error(self, job_id: str, line: dict[str, Any]) -> None:
        """Keep the output line of a dead-lettered or cancelled job, in place of an older one."""
        self.store.write(_error_path(job_id), dump_line(line))

    def finished(self) -> set[str]:
        """The job ids with a result."""
        return self._job_ids("results")

    def failed(self) -> set[str]:
        """The job ids with an error and no result: a late result makes up for an error."""
        return self._job_ids("errors") - self.finished()

    def result(self, job_id: str) -> dict[str, Any] | None:
        """The output line of a finished job, else None."""
        return read_object(self.store, _result_path(job_id))

    def error(self, job_id: str) -> dict[str, Any] | None:
        """The output line of a dead-lettered or cancelled job, else None."""
        return read_object(self.store, _error_path(job_id))

    def errors(self, job_ids: Iterable[str]) -> Iterator[dict[str, Any]]:
        """The output lines of dead-lettered or cancelled jobs, in that order."""
        return (line for line in read_objects(self.store, map(_error_path, job_ids)) if line is not None)

    def output_lines(self) -> Iterator[tuple[JobRecord, dict[str, Any] | None]]:
        """Every job in input order with its output line, None while it has neither result nor error."""
        records, finished, failed = self.jobs(), self.finished(), self.failed()
        paths = {job_id: _result_path(job_id) for job_id in finished}
        paths |= {job_id: _error_path(job_id) for job_id in failed}
        lines = read_objects(self.store, (paths.get(record.job_id) for record in records))
        return zip(records, lines, strict=True)

    def clear_errors(self) -> int:
        """Make failed and cancelled jobs pending again; returns how many errors there were."""
        job_ids = self._job_ids("errors")
        for job_id in job_ids:
            self.store.delete(_error_path(job_id))
        return len(job_ids)

    def write_progress(self, progress: Progress) -> None:
        """The driver's heartbeat."""
        self.store.write(PROGRESS, pretty(progress))

    def progress(self) -> Progress | None:
        """The newest heartbeat; None before the first."""
        return read_model(self.store, PROGRESS, Progress)

    def request_cancel(self, job_id: str | None) -> None:
        """Ask the driver to cancel one job, or the whole run for None."""
        path = CANCEL_RUN if job_id is None else f"{CANCEL_JOBS}/{job_id}.json"
        self.store.write(path, dump_line({"requested": time.time()}))

    def cancel_requests(self) -> tuple[bool, set[str]]:
        """Whether the whole run is to be cancelled, and the job ids to be cancelled."""
        return self.store.exists(CANCEL_RUN), self._job_ids(CANCEL_JOBS)

    def clear_cancel(self) -> None:
        """Forget all requests to cancel."""
        self.store.delete_folder("cancel")

    def write_output(self) -> None:
        """`output.jsonl` and `output.parquet` from the results and errors so far, in input order."""
        write_output(self.store, (line for _, line in self.output_lines() if line is not None))

    def _refuse_other(self, field: str, shown: str, manifest: RunManifest) -> None:
        here, asked = getattr(self.manifest, field), getattr(manifest, field)
        if here != asked:
            raise RunError(
                f"the run at {self.store.shown_uri} was made with {shown}: expected {field} {here}, found {asked}; "
                "use the same one, or another run folder"
            )

    def _job_ids(self, folder: str) -> set[str]:
        return {name.removesuffix(".json") for name in self.store.list(folder) if name.endswith(".json")}


def _result_path(job_id: str) -> str:
    return f"results/{job_id}.json"


def _error_path(job_id: str) -> str:
    return f"errors/{job_id}.json"


def _parse_rejects(data: bytes) -> list[Reject]:
    return [Reject(**json.loads(line)) for line in data.splitlines()]
