"""A worker's session on the tiny model."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.job import Job, JobRecord, packed
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.scheduler.driver.queue_loading import put_logs_in_place
from swiftbatch.scheduler.runs.run_manifest import with_model
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.forward.step_costs import StepCosts
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.session.session import WorkerSession
from swiftbatch.worker.session.work_messages import Assignment, Orders, WorkReport
from tests.jobs.run.run_parts import MANIFEST

NUM_TOKENS = 240

_newest: dict[tuple[str, str], int] = {}  # attempts by run and job


def record(
    custom_id: str, num_tokens: int = NUM_TOKENS, drawn: Mapping[str, Any] = MappingProxyType({}), **changes: object
) -> JobRecord:
    """`drawn` adds sampling fields, `changes` other fields of the job."""
    base = {"max_tokens": num_tokens, "seed": 3, "ignore_eos": True, "repetition_penalty": 1.1}
    sampling = SamplingParams.model_validate(base | dict(drawn))
    fields: dict[str, object] = {"url": "/v1/completions", "prompt": f"the quick brown {custom_id}", **changes}
    job = Job(custom_id=custom_id, sampling=sampling, **fields)  # type: ignore[arg-type]
    return JobRecord(job.job_id("f"), job, 1, 5)


def make_run(folder: Path) -> Run:
    """Make a run whose first `session` sets the model."""
    return Run.planned(str(folder), MANIFEST).made()


def made_with(run: Run, model: Path) -> Run:
    """Set the run's model, if it has none."""
    known = Run.open(run.store.uri).manifest
    if known.model_fingerprint == MANIFEST.model_fingerprint:
        kept = with_model(known, locate_model(str(model)))
        manifest = kept.model_copy(update={"exactness": known.exactness})
        run.store.write("run.json", manifest.model_dump_json().encode())
        vars(run).update(vars(Run(run.store, manifest)))  # a test already holds it
    return run


def session(run: Run, model: Path, metrics_host: str | None = None, **changes: Any) -> WorkerSession:
    fields = {"dtype": "float32", "engine": "token-recycling", "checkpoint_seconds": 0.01, "checkpoint_tokens": 32}
    config = EngineConfig(model=str(model), num_threads=1, **fields | changes)
    return WorkerWithPrompts(config, made_with(run, model).store.uri, "w0", metrics_host)


class WorkerWithPrompts(WorkerSession):
    """Tokenizes its jobs' prompts here."""

    def work(self, orders: Orders, seconds: float) -> WorkReport:
        kept = {name: tuple(map(self._with_prompt, getattr(orders, name))) for name in ("assignments", "reserve")}
        return super().work(replace(orders, **kept), seconds)

    def _with_prompt(self, assignment: Assignment) -> Assignment:
        record = assignment.record
        if not record.prompt_token_ids:
            prompt = self._codec.prompt_of(record.job)
            ids = packed(prompt.token_ids)
            record = replace(record, prompt_token_ids=ids, last_marker=prompt.last_marker)
        return replace(assignment, body=record.body)


# plain decoding without checkpoints, for undisturbed texts
PLAINLY: dict[str, Any] = {"engine": "autoregressive", "checkpoint_seconds": 600.0, "checkpoint_tokens": 100_000}


def claimed(run: Run, job: JobRecord, num_reported_tokens: int = 0) -> Assignment:
    """Return the next attempt; earlier ones count as lost."""
    put_logs_in_place(run)
    place = (run.store.uri, job.job_id)
    found = CheckpointStore.of(run).attempts(job.job_id)
    _newest[place] = attempt = max([*found, _newest.get(place, 0)]) + 1
    return replace(Assignment.of(job, attempt, attempt), num_reported_tokens=num_reported_tokens)


def to_the_end(worker: WorkerSession, *assignments: Assignment) -> WorkReport:
    """Return the sum of what ended."""
    report = worker.work(Orders(assignments), 0.05)
    outcomes = report.outcomes
    while report.of("running"):
        report = worker.work(Orders(), 0.05)
        outcomes += report.outcomes
    return WorkReport(outcomes)


def run_to_end(run: Run, model: Path, *jobs: JobRecord, **changes: Any) -> WorkerSession:
    """Return the worker that ran the jobs' next attempts."""
    worker = session(run, model, **changes)
    to_the_end(worker, *(claimed(run, job) for job in jobs))
    return worker


def until(worker: WorkerSession, job: JobRecord, num_tokens: int, *assignments: Assignment) -> int:
    """Return the job's number of tokens."""
    report = worker.work(Orders(assignments), 0.0)
    while True:
        [progress] = [each for each in report.of("running") if each.job_id == job.job_id]
        if progress.num_generated_tokens >= num_tokens:
            return progress.num_generated_tokens
        report = worker.work(Orders(), 1e-5)  # one step, because a fast machine does many in a millisecond


def step_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Let `until` stop at any token, also where nothing is drafted."""
    patch.setattr("swiftbatch.worker.engine.engine.MOST_STEPS", 1)


def preempted(run: Run, model: Path, job: JobRecord, num_tokens: int, **changes: Any) -> int:
    """Run a job in its own worker to that many tokens; return its number."""
    worker = session(run, model, **changes)
    num_generated_tokens = until(worker, job, num_tokens, claimed(run, job))
    worker.drain(30.0)
    return num_generated_tokens


def have_caches_loaded(patch: pytest.MonkeyPatch, is_worth_it: bool = True) -> None:
    """Force resumes by loading or by replay."""
    patch.setattr(StepCosts, "replay_seconds", lambda *_: math.inf if is_worth_it else 0.0)


def run_at(moment: Path, folder: Path) -> Run:
    """Make a run with another's checkpoints at a moment."""
    run = make_run(folder)
    shutil.copytree(moment, folder / "checkpoints", dirs_exist_ok=True)
    return run


def body(run: Run, job: JobRecord) -> dict[str, Any]:
    line = run.result(job.job_id)
    assert line is not None
    return dict(line["response"]["body"])


def digest(run: Run, job: JobRecord) -> str:
    return str(body(run, job)["choices"][0]["token_ids_sha256"])


def resumed_digest(folder: Path, model: Path, job: JobRecord) -> str:
    run = Run.open(str(folder))
    run_to_end(run, model, job)
    return digest(run, job)


def looping_outcome(run: Run, job: JobRecord) -> dict[str, Any]:
    return {"digest": digest(run, job), "num_rewinds": body(run, job)["metrics"]["num_rewinds"]}


def undisturbed_digest(folder: Path, model: Path, job: JobRecord, **changes: Any) -> str:
    return str(undisturbed_body(folder, model, job, **changes)["choices"][0]["token_ids_sha256"])


def undisturbed_body(folder: Path, model: Path, job: JobRecord, **changes: Any) -> dict[str, Any]:
    run = make_run(folder)
    run_to_end(run, model, job, **PLAINLY | changes)
    return body(run, job)


LOOPS_OF_80 = {  # tokens; before the first loop's end a text has a cache boundary
    "repetition_penalty": 1.0,
    "logit_bias": {"17": 32},
    "seed": 3,
    "repetition_detection": {"max_pattern_size": 1, "min_count": 80, "action": "rewind", "max_rewinds": 2},
}
