"""The two files that a batch ends with, as OpenAI has them: lines with a response, and all others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swiftbatch.jobs.input.reader import Reject
from swiftbatch.jobs.json_lines import dump_line
from swiftbatch.jobs.run.output import temporary_file
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.driver.backlog import CANCELLED, num_completion_tokens
from swiftbatch.scheduler.runs.cancellation import EXPIRED
from swiftbatch.scheduler.serve.batches import Batch
from swiftbatch.scheduler.serve.files import Files
from swiftbatch.scheduler.serve.records import Counts, Delivery, delivered_file_id

BATCH_CANCELLED = "batch_cancelled"  # OpenAI's code for such a line
INVALID = "invalid_request"


@dataclass(frozen=True)
class Delivered:
    """The files, None where no line went there, and what they hold. `has_expired` says whether a line came too late."""

    counts: Counts
    num_generated_tokens: int
    output_file_id: str | None
    error_file_id: str | None
    has_expired: bool


def deliver(batch: Batch, run: Run, files: Files) -> Delivered:
    """Write both files. Again is no harm: they have the same ids. Raises StoreError, RunError. Needs no manifest."""
    counts = {"output": 0, "errors": 0}
    has_expired, num_tokens = False, 0
    with temporary_file() as output, temporary_file() as errors:
        for line in _lines(batch, run):
            delivery = "output" if line["error"] is None else "errors"
            (output if line["error"] is None else errors).write(dump_line(line))
            counts[delivery] += 1
            num_tokens += num_completion_tokens(line) if line["error"] is None else 0
            has_expired = has_expired or any(error["code"] == EXPIRED for error in _errors(line))
        kept = {
            delivery: _keep(batch, files, delivery, file) if counts[delivery] else None
            for delivery, file in _both(output, errors)
        }
    num_completed, num_failed = counts["output"], counts["errors"]
    totals = Counts(total=num_completed + num_failed, completed=num_completed, failed=num_failed)
    return Delivered(totals, num_tokens, kept["output"], kept["errors"], has_expired)


def _both(output: Any, errors: Any) -> list[tuple[Delivery, Any]]:
    return [("output", output), ("errors", errors)]


def _keep(batch: Batch, files: Files, delivery: Delivery, source: Any) -> str:
    source.seek(0)
    file_id = delivered_file_id(batch.id, delivery)
    files.add(source, f"{batch.id}_{delivery}.jsonl", "batch_output", batch.owner, file_id)
    return file_id


def _lines(batch: Batch, run: Run) -> Iterator[dict[str, Any]]:
    """All lines of the run in input order, rejects behind them."""
    for line in run.joined_lines():
        for error in _errors(line):
            if error["code"] == CANCELLED:
                error["code"] = BATCH_CANCELLED
        yield line
    for number, reject in enumerate(run.rejects(), start=1):
        yield _reject_line(batch, number, reject)


def _errors(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The error of a line, or those of its choices that failed beside others."""
    if line["error"] is not None:
        return [line["error"]]
    return [choice["error"] for choice in line["response"]["body"].get("failed_choices", ())]


def _reject_line(batch: Batch, number: int, reject: Reject) -> dict[str, Any]:
    error = {"code": INVALID, "message": reject.reason, "line": reject.line_number}
    reject_id = f"batch_req_{batch.id}-reject-{number}"
    return {"id": reject_id, "custom_id": reject.custom_id, "response": None, "error": error}
