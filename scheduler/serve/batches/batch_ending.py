"""Ends a batch: writes its files, then its outcome.

It may be repeated after a kill.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.json_records import dump_line
from swiftbatch.jobs.run.run import MANIFEST, Run
from swiftbatch.jobs.run.run_records import DamagedError, Progress, RunManifest, read_model
from swiftbatch.jobs.storage.store import spool
from swiftbatch.scheduler.driver.queue_loading import CANCELLED
from swiftbatch.scheduler.process.streams import Lines
from swiftbatch.scheduler.runs.cancellation import EXPIRED, cancel_jobs, expire_jobs
from swiftbatch.scheduler.serve.batches.batch_driver import DriverProcess
from swiftbatch.scheduler.serve.records.batch_status import DAMAGED, is_submitted, lines_of, model_id, running_status
from swiftbatch.scheduler.serve.records.server_records import (
    BATCHES,
    Counts,
    Delivery,
    Ended,
    EndState,
    LineProblem,
    delivered_file_id,
)
from swiftbatch.scheduler.serve.records.stored_objects import Batch, Batches, StoredFiles

BATCH_CANCELLED = "batch_cancelled"  # OpenAI's code for such a line

MAX_PROBLEMS = 100  # problems shown; the error file has all rejects

Reason = Literal["finished", "cancelled", "expired"]


def deliver(batch: Batch, run: Run, files: StoredFiles) -> dict[str, Any]:
    """Write a batch's two files under fixed ids; return the fields of `Ended` that say so.

    The output file has the lines with a response, the error file all others. Raises StoreError, RunError.
    """
    counts = Counter[Delivery]()
    has_expired, tokens = False, Counter[str]()
    with spool() as output, spool() as errors:
        sources: dict[Delivery, BinaryIO] = {"output": output, "errors": errors}
        for line in _lines(batch, run):
            delivery: Delivery = "output" if line["error"] is None else "errors"
            sources[delivery].write(dump_line(line))
            counts[delivery] += 1
            tokens.update(_tokens(line) if line["error"] is None else {})
            has_expired = has_expired or any(error["code"] == EXPIRED for error in _errors(line))
        kept = {name: _keep(batch, files, name, source) for name, source in sources.items() if counts[name]}
    return {
        "state": "expired" if has_expired else "completed",
        "counts": Counts(total=counts.total(), completed=counts["output"], failed=counts["errors"]),
        **{name: tokens[name] for name in ("num_input_tokens", "num_generated_tokens", "num_reasoning_tokens")},
        "output_file_id": kept.get("output"),
        "error_file_id": kept.get("errors"),
    }


def _tokens(line: dict[str, Any]) -> dict[str, int]:
    usage = line["response"]["body"]["usage"]
    return {
        "num_input_tokens": usage["prompt_tokens"],
        "num_generated_tokens": usage["completion_tokens"],
        "num_reasoning_tokens": (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
    }


def _used(progress: Progress | None) -> dict[str, Any]:
    """Return the fields of `Ended` that a run's last heartbeat knows."""
    names = ("num_total_tokens", "worker_seconds", "price_per_worker_hour")
    return {} if progress is None else {name: getattr(progress, name) for name in names}


def _keep(batch: Batch, files: StoredFiles, delivery: Delivery, source: BinaryIO) -> str:
    source.seek(0)
    file_id = delivered_file_id(batch.id, delivery)
    files.add(source, f"{batch.id}_{delivery}.jsonl", "batch_output", batch.owner, file_id)
    return file_id


def _lines(batch: Batch, run: Run) -> Iterator[dict[str, Any]]:
    for line in run.joined_lines():
        for error in _errors(line):
            if error["code"] == CANCELLED:
                error["code"] = BATCH_CANCELLED
        yield line
    for number, reject in enumerate(run.rejects(), start=1):
        error = {"code": reject.code, "message": reject.reason, "line": reject.line_number}
        reject_id = f"batch_req_{batch.id}-reject-{number}"
        yield {"id": reject_id, "custom_id": reject.custom_id, "response": None, "error": error}


def _errors(line: dict[str, Any]) -> list[dict[str, Any]]:
    if line["error"] is not None:
        return [line["error"]]
    return [choice["error"] for choice in line["response"]["body"].get("failed_choices", ())]


def end_batch(batches: Batches, files: StoredFiles, batch: Batch, reason: Reason, driver: DriverProcess | None) -> None:
    """End a batch without a driver; `driver` is its last one.

    Raises RunTakenError, RunError, StoreError.
    """
    lines = lines_of(batch.store)
    if lines is None:
        batches.end(batch, _never_run(batch, reason, driver))
        return
    run = Run.open(batch.store.uri)
    if not lines.num_jobs:
        batches.end(batch, _without_good_lines(batch, run))
        return
    if reason == "cancelled":
        cancel_jobs(run, None)
    elif reason == "expired":
        expire_jobs(run)
    status = running_status(batch.store, lines)
    delivered = deliver(batch, run, files)
    if batch.cancellation is not None:
        delivered["state"] = "cancelled"
    ended = Ended(
        in_progress=status.in_progress,
        finalizing=status.finalizing or time.time(),
        ended=time.time(),
        model=status.model,
        **_used(status.progress),
        **delivered,
    )
    batches.end(batch, ended)


def settle(batches: Batches, files: StoredFiles, batch: Batch, driver: DriverProcess | None) -> bool:
    """End a batch without a driver, if it is due.

    A damaged run fails. Otherwise raises as `end_batch`.
    """
    try:
        reason = _reason_to_end(batch, driver)
        if reason is not None:
            end_batch(batches, files, batch, reason, driver)
        return reason is not None
    except DamagedError as error:
        Lines(sys.stderr).write(f"{batch.id} fails: {error}")
        batches.end(batch, _damaged(batch, files, error))
        return True


def ask_to_cancel(batch: Batch, driver: DriverProcess) -> None:
    """Let a driver cancel all jobs, or end it if it has not begun."""
    try:
        if driver.has_begun and is_submitted(batch.store):
            cancel_jobs(Run.open(batch.store.uri), None)
            return
    except UserError:  # the batch is settled after the driver's end
        pass
    driver.ask_to_end()


def _reason_to_end(batch: Batch, driver: DriverProcess | None) -> Reason | None:
    """Return why a batch without a driver ends now; None while it needs one."""
    read_model(batch.store, MANIFEST, RunManifest)  # raises DamagedError, even before all lines are in the run
    if batch.cancellation is not None:
        return "cancelled"
    if driver is not None and driver.bad_input is not None:
        return "finished"
    lines = lines_of(batch.store)
    if lines is not None and running_status(batch.store, lines).state == "finalizing":
        return "finished"
    can_name_lines = lines is not None or driver is not None
    return "expired" if can_name_lines and batch.has_expired() else None


def _never_run(batch: Batch, reason: Reason, driver: DriverProcess | None) -> Ended:
    if batch.cancellation is not None:
        return _at_once("cancelled", Counts())
    problem, bad_input = ("", None) if driver is None else (driver.problem, driver.bad_input)
    code = "batch_expired" if reason == "expired" else bad_input or "invalid_input_file"
    message = problem or "the input file could not be read in time"
    return _at_once("failed", Counts(), LineProblem(code=code, message=message))


def _damaged(batch: Batch, files: StoredFiles, error: DamagedError) -> Ended:
    """The run stays for repair."""
    message = f"{BATCHES}/{batch.id}/{error.path} is damaged: {error.problem}"
    run = Run(batch.store, None)
    failed = _at_once("failed", Counts(), LineProblem(code=DAMAGED, message=message))
    failed = failed.model_copy(update=_used(run.progress()))
    try:
        delivered = deliver(batch, run, files)
    except DamagedError:  # the jobs are damaged, too
        return failed
    return failed.model_copy(update=delivered | {"state": "failed"})


def _without_good_lines(batch: Batch, run: Run) -> Ended:
    rejects = run.rejects()
    problems = [
        LineProblem(code=each.code, message=each.reason, line=each.line_number) for each in rejects[:MAX_PROBLEMS]
    ]
    state: EndState = "failed" if batch.cancellation is None else "cancelled"
    ended = _at_once(state, Counts(total=len(rejects), failed=len(rejects)), *problems)
    return ended.model_copy(update={"model": model_id(run.manifest.model)})


def _at_once(state: EndState, counts: Counts, *problems: LineProblem) -> Ended:
    now = time.time()
    return Ended(
        state=state,
        counts=counts,
        in_progress=None,
        finalizing=now,
        ended=now,
        num_input_tokens=0,
        problems=problems,
    )
