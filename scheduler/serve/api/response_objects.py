"""The objects that clients are sent, in the form of OpenAI's API; moments are whole seconds since the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swiftbatch.scheduler.serve.batch_status import Status
from swiftbatch.scheduler.serve.batches import Batch
from swiftbatch.scheduler.serve.server_records import FileRecord, LineProblem

Object = dict[str, Any]


def file_object(record: FileRecord) -> Object:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": int(record.created),
        "expires_at": None,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: Batch, status: Status) -> Object:
    record = batch.record
    ended_at: Object = {f"{state}_at": None for state in ("completed", "failed", "expired", "cancelled")}
    if status.ended is not None:
        ended_at[f"{status.state}_at"] = _seconds(status.ended)
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": _errors(status.problems),
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": status.state,
        "output_file_id": status.output_file_id,
        "error_file_id": status.error_file_id,
        "created_at": int(record.created),
        "in_progress_at": _seconds(status.in_progress),
        "expires_at": int(record.expires),
        "finalizing_at": _seconds(status.finalizing),
        "cancelling_at": None if batch.cancellation is None else int(batch.cancellation.requested),
        **ended_at,
        "request_counts": status.counts.model_dump(),
        "metadata": record.metadata,
        "priority": record.priority,
    }


def page_object(data: Sequence[Object], has_more: bool) -> Object:
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def _errors(problems: Sequence[LineProblem]) -> Object | None:
    if not problems:
        return None
    data = [problem.model_dump() | {"param": None} for problem in problems]
    return {"object": "list", "data": data}


def _seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
