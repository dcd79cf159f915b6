"""The pages of batches, and all routes of pages: batches, files, reports, forms, assets, login and logout."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, RedirectResponse
from starlette.datastructures import FormData, UploadFile

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.run.output_line import num_completion_tokens
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress, in_parallel
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.scheduler.driver.queue_loading import CANCELLED
from swiftbatch.scheduler.runs.cancellation import EXPIRED
from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.pages.page_responses import (
    FOLDER,
    AnyVisitor,
    KnownVisitor,
    PageRoute,
    Visitor,
    check_form,
    page_response,
    sessions_of,
)
from swiftbatch.scheduler.serve.records.batch_status import is_submitted, names_of, partial_texts, unread_status
from swiftbatch.scheduler.serve.records.server_records import Delivery, RefusedError, delivered_file_id
from swiftbatch.scheduler.serve.records.stored_objects import Batch
from swiftbatch.scheduler.serve.routes import batch_routes, file_routes
from swiftbatch.scheduler.serve.routes.access_control import new_session_id
from swiftbatch.scheduler.serve.routes.responses import Served

NAME_KEY = "name"  # in a batch's metadata
SAID = {"endpoint": "/v1/completions", "window": "24h", "metadata": "", "priority": "0", "webhook": ""}
NUM_BATCHES = 50  # per page
NUM_JOBS = 50  # per page
NUM_PROBLEMS = 100
NUM_TEXTS, LAST_TOKENS = 12, 120  # running jobs on a page, and last tokens of each
NUM_KNOWN_RUNS = 8
REFRESH_SECONDS = 2  # while figures change
REFRESH_SECONDS_OBJECT_STORE = 10  # because each look costs money

Values = dict[str, Any]
"""The values that a template shows, by name."""


def list_page(
    service: Service,
    visitor: Visitor,
    after: str | None = None,
    problem: str = "",
    status: int = 200,
    said: Mapping[str, str] | None = None,
) -> Response:
    """Show the batches after `after`; `problem` is why the form with `said` was refused."""
    batches, has_more = service.batches.page(visitor.name, after, NUM_BATCHES)
    own = [batch for batch in service.batches.all() if batch.owner == visitor.name]
    values = {
        "rows": [_figures(service, batch) for batch in batches],
        "num_batches": len(own),
        "num_unfinished": sum(batch.ended is None for batch in own),
        "is_first": after is None,
        "last_id": batches[-1].id if has_more else None,
        "problem": problem,
        "said": SAID | dict(said or {}),
        "takes_webhooks": service.takes_webhooks,
        "max_bytes": service.max_file_bytes,
        "visitor": visitor,
        "refresh_seconds": REFRESH_SECONDS,
    }
    return page_response("list", values, status)


def batch_page(service: Service, visitor: Visitor, batch: Batch, number: int) -> Response:
    """Show one batch with a page of its jobs; the run's errors appear on the page."""
    figures = _figures(service, batch)
    refresh_seconds = REFRESH_SECONDS if batch.store.is_local else REFRESH_SECONDS_OBJECT_STORE
    values = {
        "batch": figures,
        "record": batch.record,
        "ended": batch.ended,
        "waits_for": None if batch.ended else service.keeper.hindrance(batch),
        "view": _run_view(service, batch, number),
        "last_tokens": LAST_TOKENS,
        "visitor": visitor,
        "refresh_seconds": None if figures["has_ended"] else refresh_seconds,
    }
    return page_response("batch", values)


def _figures(service: Service, batch: Batch) -> Values:
    """Return a batch's figures; an unreadable folder becomes its problem."""
    try:
        status = service.status(batch)
    except UserError as error:
        status = unread_status(batch, str(service.refusal(error)))
    progress, has_ended = status.progress, status.ended is not None
    num_tokens = 0 if progress is None else progress.num_generated_tokens
    return {
        "id": batch.id,
        "name": _name(service, batch),
        "state": status.state,
        "has_ended": has_ended,
        "can_be_cancelled": not has_ended and status.state != "cancelling",
        "counts": status.counts,
        "num_done": status.counts.completed + status.counts.failed,
        "num_tokens": num_tokens if batch.ended is None else batch.ended.num_generated_tokens,
        "most_tokens": num_tokens + (0 if progress is None else progress.num_tokens_left),  # so far and to come
        "tokens_per_second": _speed(batch, progress),
        "eta_seconds": None if progress is None else progress.eta_seconds,
        "cost": batch.ended.cost if batch.ended is not None else None if progress is None else progress.cost,
        "created": batch.created,
        "problem": service.problem(batch, status),
        "progress": progress,
    }


def _name(service: Service, batch: Batch) -> str:
    if name := (batch.record.metadata or {}).get(NAME_KEY):
        return name
    try:
        return service.files.get(batch.record.input_file_id, batch.owner).filename
    except RefusedError:
        return ""


def _speed(batch: Batch, progress: Progress | None) -> float | None:
    """Return the present rate, after the end the average."""
    if (ended := batch.ended) is not None:
        if ended.in_progress is None or not ended.num_generated_tokens:
            return None
        return ended.num_generated_tokens / max(1.0, ended.finalizing - ended.in_progress)
    return progress.tokens_per_second if progress is not None and progress.state == "running" else None


def _run_view(service: Service, batch: Batch, number: int) -> Values:
    """Return jobs, problems and texts of a batch's run; `unread` says what can't be read."""
    view: Values = {"jobs": None, "problems": (), "texts": (), "num_running": 0, "has_report": False, "unread": ""}
    view["cost_per_token"] = None
    try:
        if not is_submitted(batch.store):
            return view | {"problems": _problems(service, batch, None)}
        run = Run.open(batch.store.uri)
        progress = run.progress() if batch.ended else service.status(batch).progress
        running = {} if batch.ended or progress is None else progress.running
        longest = sorted(running, key=lambda name: -running[name])[:NUM_TEXTS]
        return view | {
            "jobs": _jobs(run, running, number),
            "cost_per_token": None if progress is None else progress.cost_per_token,
            "problems": _problems(service, batch, run),
            "texts": partial_texts(run, longest, LAST_TOKENS) if longest else (),
            "num_running": len(running),
            "has_report": True,
        }
    except UserError as error:
        return view | {"unread": str(service.refusal(error))}


def _jobs(run: Run, running: Mapping[str, int], number: int) -> Values:
    """Return a page of jobs, at most the last one; pages count from 1. Raises RunError, StoreError."""
    names = names_of(run.store)
    num_pages = max(1, -(-len(names) // NUM_JOBS))
    number = min(max(1, number), num_pages)
    shown = names[(number - 1) * NUM_JOBS : number * NUM_JOBS]
    at_rest = [job.job_id for job in shown if job.name not in running]
    results = dict(zip(at_rest, _known_run(run.store.uri).result_lines(at_rest), strict=True))
    rows = in_parallel(lambda job: _row(run, job, running, results.get(job.job_id)), shown)
    return {"rows": rows, "number": number, "num_pages": num_pages, "num_jobs": len(names)}


@functools.lru_cache(maxsize=NUM_KNOWN_RUNS)
def _known_run(uri: str) -> Run:
    """The cached run keeps its result index."""
    return Run.open(uri)


def _row(run: Run, job: JobEntry, running: Mapping[str, int], result: dict[str, Any] | None) -> Values:
    row: Values = {"name": job.name, "num_tokens": None, "finish_reason": ""}
    if job.name in running:
        return row | {"state": "running", "num_tokens": running[job.name]}
    if result is not None:
        reason = str(result["response"]["body"]["choices"][0]["finish_reason"])
        return row | {"state": "finished", "num_tokens": num_completion_tokens(result), "finish_reason": reason}
    line = run.error(job.job_id)
    if line is None:
        return row | {"state": "pending"}
    return row | {"state": {CANCELLED: "cancelled", EXPIRED: "expired"}.get(str(line["error"]["code"]), "failed")}


def _problems(service: Service, batch: Batch, run: Run | None) -> list[Values]:
    """Return the first lines and jobs without a result, and why. Raises RunError, StoreError."""
    ended = batch.ended
    if ended is None:
        return [] if run is None else _run_problems(run)
    if ended.error_file_id is None:
        return [_problem(each.line, "", each.message) for each in ended.problems if each.line is not None]
    pieces = service.files.content(service.files.get(ended.error_file_id, batch.owner))
    return [_problem_of(json.loads(line)) for line in islice(_lines(pieces), NUM_PROBLEMS)]


def _run_problems(run: Run) -> list[Values]:
    rejects = [_problem(each.line_number, each.custom_id, each.reason) for each in run.rejects()[:NUM_PROBLEMS]]
    failed = [name.removesuffix(".json") for name in run.store.list("errors")][:NUM_PROBLEMS]
    return [*map(_problem_of, run.errors(failed)), *rejects][:NUM_PROBLEMS]


def _problem_of(line: dict[str, Any]) -> Values:
    return _problem(line["error"].get("line"), line["custom_id"], line["error"]["message"])


def _problem(line: int | None, name: object, message: object) -> Values:
    return {"line": line, "name": str(name or ""), "message": str(message)}


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole


# Routes.


UPLOAD_PATH = "/"
ASSETS = {"/page.css": "text/css", "/page.js": "text/javascript", "/icon.svg": "image/svg+xml"}
MAX_FIELDS, MAX_FIELD_BYTES = 10, 2**14  # of a form
MAX_LOGIN_FIELDS, MAX_LOGIN_FIELD_BYTES = 4, 2**12
WRONG_KEY = "this key is not known here: it may have been replaced"
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,10}")

router = APIRouter(route_class=PageRoute)


@router.get(UPLOAD_PATH)
def batches(service: Served, visitor: KnownVisitor, after: str | None = None) -> Response:
    return list_page(service, visitor, after)


@router.post(UPLOAD_PATH)
async def upload(request: Request, service: Served, visitor: KnownVisitor) -> Response:
    """Make a batch of a file; the visitor is checked before the body is read."""
    async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES) as form:
        check_form(request, visitor, form)
        return await run_in_threadpool(_take, service, visitor, form)


@router.get("/batches/{batch_id}")
def batch(
    service: Served, visitor: KnownVisitor, batch_id: str, jobs: Annotated[int, Query(ge=1, le=10**9)] = 1
) -> Response:
    return batch_page(service, visitor, service.batches.get(batch_id, visitor.name), jobs)


@router.post("/batches/{batch_id}/cancel")
async def cancel(request: Request, service: Served, visitor: KnownVisitor, batch_id: str) -> Response:
    async with request.form(max_files=0, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES) as form:
        check_form(request, visitor, form)
    await run_in_threadpool(batch_routes.cancel, service, visitor.sender, batch_id)
    return RedirectResponse(f"/batches/{batch_id}", 303)


@router.get("/batches/{batch_id}/report")
def report(service: Served, visitor: KnownVisitor, batch_id: str) -> Response:
    return batch_routes.report(service, visitor.name, batch_id)


@router.get("/batches/{batch_id}/{delivery}.jsonl")
def delivered(request: Request, service: Served, visitor: KnownVisitor, batch_id: str, delivery: Delivery) -> Response:
    batch = service.batches.get(batch_id, visitor.name)
    response = file_routes.content(request, service, visitor.sender, delivered_file_id(batch.id, delivery))
    response.headers["Content-Disposition"] = f'attachment; filename="{batch.id}_{delivery}.jsonl"'
    return response


def _take(service: Service, visitor: Visitor, form: FormData) -> Response:
    said = {name: str(form.get(name, "")) for name in SAID}
    try:
        batch_id = _new_batch(service, visitor, form.get("file"), said)
    except RefusedError as error:
        return list_page(service, visitor, None, str(error), error.status, said)
    return RedirectResponse(f"/batches/{batch_id}", 303)


def _new_batch(service: Service, visitor: Visitor, file: object, said: dict[str, str]) -> str:
    """Errors delete the file.

    Raises RefusedError, StoreError.
    """
    metadata, priority = _metadata(said["metadata"]), said["priority"].strip() or "0"
    if WHOLE_NUMBER.fullmatch(priority) is None:
        raise RefusedError(f"priority: found {priority[:40]!a}, expected a whole number")
    if not isinstance(file, UploadFile) or not file.filename:
        raise RefusedError("no file was chosen: expected one with a job on each line")
    record = file_routes.keep_upload(service, visitor.sender, file)
    body = {
        "input_file_id": record.id,
        "endpoint": said["endpoint"],
        "completion_window": said["window"].strip(),
        "metadata": metadata,
        "priority": int(priority),
        "webhook": said["webhook"].strip() or None,
    }
    try:
        return str(batch_routes.create(service, visitor.sender, None, body)["id"])
    except UserError:
        with suppress(StoreError):  # if the store is away now, the file stays in the list
            service.delete_file(record, visitor.sender)
        raise


def _metadata(text: str) -> dict[str, str] | None:
    """Parse `name: value` lines; None if empty. Raises RefusedError."""
    pairs: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        key, colon, value = line.partition(":")
        if not colon or not key.strip():
            raise RefusedError(f"metadata: found {line[:40]!a}, expected a name, a colon and a value on each line")
        pairs[key.strip()] = value.strip()
    return pairs or None


def asset(request: Request) -> FileResponse:
    path = request.url.path
    return FileResponse(FOLDER / "assets" / path.removeprefix("/"), media_type=ASSETS[path])


for path in ASSETS:
    router.add_api_route(path, asset, methods=["GET"])


@router.get("/login")
def login_page(service: Served, visitor: AnyVisitor) -> Response:
    if service.keyring is None or visitor.name is not None:
        return RedirectResponse("/", 303)
    return _login_page(visitor)


@router.post("/login")
async def login(request: Request, service: Served, visitor: AnyVisitor) -> Response:
    """Log in with a new session, because the old one may be planted."""
    if service.keyring is None:
        return RedirectResponse("/", 303)
    async with request.form(max_files=0, max_fields=MAX_LOGIN_FIELDS, max_part_size=MAX_LOGIN_FIELD_BYTES) as form:
        check_form(request, visitor, form)
        secret = str(form.get("key", "")).strip()
    key = await run_in_threadpool(service.keyring.find, secret)
    if key is None:
        return _login_page(visitor, WRONG_KEY, 401)
    sessions = sessions_of(request)
    sessions.end(visitor.session_id)
    request.state.new_session_id = sessions.begin(key.digest)
    return RedirectResponse("/", 303)


@router.post("/logout")
async def logout(request: Request, visitor: AnyVisitor) -> Response:
    async with request.form(max_files=0, max_fields=MAX_LOGIN_FIELDS, max_part_size=MAX_LOGIN_FIELD_BYTES) as form:
        check_form(request, visitor, form)
    sessions_of(request).end(visitor.session_id)
    request.state.new_session_id = new_session_id()
    return RedirectResponse("/login", 303)


def _login_page(visitor: Visitor, problem: str = "", status: int = 200) -> Response:
    return page_response("login", {"visitor": visitor, "problem": problem}, status)
