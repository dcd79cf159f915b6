"""The text of a job so far, from its result or its token log."""

from __future__ import annotations

import time
from collections.abc import Iterator

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run, RunError
from swiftbatch.scheduler.driver.heartbeat import current_progress
from swiftbatch.scheduler.runs.cancellation import find_jobs

POLL_SECONDS = 1.0
TAKEN_BACK = "\n[a loop was taken back, this is in its place:]\n"


def follow_text(run: Run, custom_id: str, follow: bool, choice: int = 0) -> Iterator[str]:
    """Yield the text of a job, or of a choice of its line, so far; with `follow` until it ends or its driver does.

    Raises RunError for an unknown job, ModelError if the run's tokenizer is not there.
    """
    from swiftbatch.worker.model.files import locate_model
    from swiftbatch.worker.model.text import TextCodec

    record = _find_choice(run, custom_id, choice)
    checkpoints = CheckpointStore.of(run)
    settled = TextCodec(locate_model(run.manifest.model)).output_text.settled
    shown = ""
    while True:
        # looked up before the text, so that what was written in between is not missed
        goes_on = follow and current_progress(run).state == "running" and run.error(record.job_id) is None
        text = _result_text(run, record.job_id)
        is_whole = text is not None
        if text is None:
            text = settled(checkpoints.read_tokens(record.job_id).tolist())
        num_common = _num_common(shown, text)
        is_taken_back = num_common < min(len(shown), len(text))
        yield (TAKEN_BACK if is_taken_back else "") + text[num_common:]
        shown = text if num_common < len(text) else shown
        if is_whole or not goes_on:
            return
        time.sleep(POLL_SECONDS)


def _num_common(shown: str, text: str) -> int:
    """Count the characters with which both texts begin."""
    differing = (i for i, (one, other) in enumerate(zip(shown, text, strict=False)) if one != other)
    return len(shown) if text.startswith(shown) else next(differing, len(text))


def _find_choice(run: Run, custom_id: str, choice: int) -> JobRecord:
    records = find_jobs(run, custom_id)
    for record in records:
        if record.job.choice_index == choice:
            return record
    raise RunError(f"no choice {choice} of job {custom_id!r}: expected one of its {len(records)}, counted from 0")


def _result_text(run: Run, job_id: str) -> str | None:
    line = run.result(job_id)
    if line is None:
        return None
    choice = line["response"]["body"]["choices"][0]
    if "message" not in choice:
        return str(choice["text"])
    return str(choice["message"].get("reasoning_content", "") + choice["message"]["content"])
