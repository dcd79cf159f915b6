from __future__ import annotations

from typing import Any

import numpy as np

from swiftbatch.jobs.job import Job, JobRecord
from swiftbatch.jobs.run.output_line import line_id, success_line
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress, RunManifest, WorkerStatus
from swiftbatch.jobs.sampling_params import SamplingParams

MANIFEST = RunManifest(
    run_id="run-1",
    created=1.5,
    model="embedded",
    model_fingerprint="f1",
    text_fingerprint="t1",
    model_files={},
    engine="suffix",
    dtype="bfloat16",
    device="cpu",
    num_threads=1,
    seed=7,
    clock="2026-11-28T10:00:00+01:00",
    versions={"torch": "2.13.0"},
    exactness="exact",
    cpu_capability="AVX512",
)
PROGRESS = Progress(
    state="running",
    updated=2.0,
    started=1.0,
    jobs={"pending": 1, "running": 1},
    num_generated_tokens=10,
    tokens_per_second=2.5,
    eta_seconds=None,
    workers=(WorkerStatus(id="w0", host="here", pid=12, jobs=("a",)),),
    driver_host="here",
    driver_pid=11,
)
FINISHED: dict[str, Any] = {
    "custom_id": "a",
    "response": {
        "body": {
            "choices": [{"text": "once", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
            "metrics": {},
        }
    },
    "error": None,
}


def failed_line(code: str) -> dict[str, Any]:
    return {"custom_id": "a", "response": None, "error": {"code": code, "message": "why"}}


def finish(run: Run, record: JobRecord, text: str, num_tokens: int = 5, **metrics: Any) -> bool:
    """Give a job a result without a worker; return False if it has one."""
    line = success_line(
        record,
        "run",
        text,
        "length",
        model="tiny",
        system_fingerprint=run.manifest.fingerprint,
        token_ids=np.arange(num_tokens, dtype=np.uint32),
        metrics=metrics,
    )
    return write_result(run, record.job_id, line)


def make_record(custom_id: str, line_number: int = 1, prompt: str = "Once") -> JobRecord:
    sampling = SamplingParams(max_tokens=5, seed=1, stop=("END",))
    job = Job(custom_id=custom_id, url="/v1/completions", prompt=prompt, sampling=sampling)
    return JobRecord(job.job_id("f1"), job, line_number, 3)


def write_result(run: Run, job_id: str, line: dict[str, Any]) -> bool:
    """Write a result to its own segment; return False if there is one."""
    is_new = run.result(job_id) is None
    if is_new:
        run.write_segment(job_id, ResultSegment([(job_id, {"id": line_id(job_id)} | line)]))
    return is_new
