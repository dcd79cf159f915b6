from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptRecord, ResumeRecord, Timeline
from swiftbatch.jobs.job import Job, JobRecord
from swiftbatch.jobs.run.output_line import success_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.metrics.report.page import render
from swiftbatch.metrics.report.run_facts import RunFacts, gather
from tests.jobs.run.run_parts import MANIFEST, PROGRESS, write_result

BEGIN = 1_790_000_000.0
NUM_PROMPT_TOKENS = 100
ENDED = PROGRESS.model_copy(update={"state": "finished", "workers": (), "running": {}})


def new_run(uri: str) -> Run:
    return Run.planned(uri, MANIFEST.model_copy(update={"created": BEGIN})).made()


def record(custom_id: str, prompt: str = "Once", max_tokens: int = 1000) -> JobRecord:
    job = Job(
        custom_id=custom_id,
        url="/v1/completions",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
    )
    return JobRecord(job.job_id("f1"), job, 1, NUM_PROMPT_TOKENS)


def timeline(
    started: float, seconds: float, first: int, last: int, is_released: bool = False, num_marks: int = 11
) -> Timeline:
    """Make even marks from `first` to `last` tokens, with 3 tokens per step."""
    tokens = np.linspace(first, last, num_marks).round().astype(int)
    drafts = (tokens - first) // 3
    return Timeline(
        started=started,
        seconds=tuple(np.linspace(0, seconds, num_marks).round(3).tolist()),
        num_tokens=tuple(tokens.tolist()),
        num_drafts=tuple(drafts.tolist()),
        num_accepted_tokens=tuple((2 * drafts).tolist()),
        is_released=is_released,
    )


def resume(resumed: float, num_recovered: int, num_recomputed: int = 0) -> ResumeRecord:
    return ResumeRecord(
        kind="kv",
        num_recovered_tokens=num_recovered,
        num_recomputed_tokens=num_recomputed,
        num_loaded_positions=num_recovered,
        seconds=1.5,
        resumed=resumed,
    )


def attempt(
    number: int, worker_id: str, claimed: float, kept: Timeline | None = None, began: ResumeRecord | None = None
) -> AttemptRecord:
    return AttemptRecord(
        attempt=number, number=number, worker_id=worker_id, claimed=claimed, resume=began, timeline=kept
    )


def finish(run: Run, job: JobRecord, attempts: Sequence[AttemptRecord], ended: float, text: str = "The end.") -> None:
    num_tokens = job.job.sampling.max_tokens
    line = success_line(
        job,
        "run-1",
        text,
        "length",
        model="embedded",
        system_fingerprint=run.manifest.fingerprint,
        token_ids=np.zeros(num_tokens, dtype=np.uint32),
        metrics={
            "num_drafts": 200,
            "num_accepted_tokens": 400,
            "num_tokens_by_draft": {"none": num_tokens - num_tokens // 4, "tree": 0, "chain": num_tokens // 4},
            "mean_acceptance_length": 3.0,
            "ms_per_token": 20.0,
            "attempts": [entry.model_dump() for entry in attempts],
        },
    )
    line["response"]["body"]["created"] = int(ended)
    assert write_result(run, job.job_id, line)


def facts_of(run: Run, progress: Progress = ENDED) -> RunFacts:
    return gather(run, progress, [])


def page_of(run: Run, progress: Progress = ENDED, folder: str = "/") -> str:
    return render(facts_of(run, progress), run.store, folder)


def preempted_run(uri: str) -> Run:
    """Make two jobs of 1,000 tokens over 100 s: `lost` was killed on w1 at 400, `moved` left w2 at 500."""
    run, lost, moved = new_run(uri), record("lost"), record("moved")
    run.add_jobs([lost, moved])

    lost_attempts = [
        attempt(1, "w1", BEGIN, timeline(BEGIN + 2, 40.0, 0, 400)),
        attempt(2, "w3", BEGIN + 50, timeline(BEGIN + 60, 40.0, 360, 1000), resume(BEGIN + 60, 360, 40)),
    ]
    moved_attempts = [
        attempt(1, "w2", BEGIN, timeline(BEGIN + 1, 49.0, 0, 500, True)),
        attempt(2, "w3", BEGIN + 51, timeline(BEGIN + 52, 48.0, 500, 1000), resume(BEGIN + 52, 500)),
    ]
    finish(run, lost, lost_attempts, BEGIN + 100)
    finish(run, moved, moved_attempts, BEGIN + 100)
    return run
