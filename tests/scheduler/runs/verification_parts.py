from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from swiftbatch.jobs.job import JobRecord, packed
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.jobs.run.run_parts import MANIFEST
from tests.worker.session.session_parts import claimed, session, to_the_end


def finished(folder: Path, model: Path, *jobs: JobRecord, **changes: Any) -> Run:
    """Return a run with the results of jobs, whose prompts are tokenized."""
    manifest = MANIFEST.model_copy(update={"model": str(model), "dtype": "float32"})
    files = locate_model(str(model))
    run, codec = Run.planned(str(folder), manifest).made(), TextCodec(files)
    worker = session(run, model, checkpoint_seconds=600.0, **changes)
    prompts = [codec.prompt_of(job.job) for job in jobs]
    full = [
        replace(
            job,
            job_id=job.job.job_id(files.fingerprint),
            prompt_token_ids=packed(each.token_ids),
            num_prompt_tokens=len(each.token_ids),
        )
        for job, each in zip(jobs, prompts, strict=True)
    ]
    run.add_jobs(full)
    to_the_end(worker, *(claimed(run, job) for job in full))
    return Run.open(run.store.uri)


def rewritten(run: Run, change: Callable[[dict[str, Any]], object]) -> Run:
    """Change the choice of a run's only result."""
    [job_id] = run.job_ids()
    line = run.result(job_id)
    change(line["response"]["body"]["choices"][0])
    run.store.delete_folder("results")
    run.write_segment("forged", ResultSegment([(job_id, line)]))
    return Run.open(run.store.uri)
