"""The page's routes: batches, files, reports, forms, assets, login and logout."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, RedirectResponse
from starlette.datastructures import FormData, UploadFile

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.pages.batch_pages import SAID, batch_page, list_page
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
from swiftbatch.scheduler.serve.records.server_records import Delivery, RefusedError, delivered_file_id
from swiftbatch.scheduler.serve.routes import batch_routes, file_routes
from swiftbatch.scheduler.serve.routes.access_control import new_session_id
from swiftbatch.scheduler.serve.routes.responses import Served

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
    await run_in_threadpool(batch_routes.cancel, service, visitor.name, batch_id)
    return RedirectResponse(f"/batches/{batch_id}", 303)


@router.get("/batches/{batch_id}/report")
def report(service: Served, visitor: KnownVisitor, batch_id: str) -> Response:
    return batch_routes.report(service, visitor.name, batch_id)


@router.api_route("/batches/{batch_id}/{delivery}.jsonl", methods=["GET", "HEAD"])
def delivered(request: Request, service: Served, visitor: KnownVisitor, batch_id: str, delivery: Delivery) -> Response:
    batch = service.batches.get(batch_id, visitor.name)
    response = file_routes.content(request, service, visitor.name, delivered_file_id(batch.id, delivery))
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
    record = file_routes.keep_upload(service, visitor.name, file)
    body = {
        "input_file_id": record.id,
        "endpoint": said["endpoint"],
        "completion_window": said["window"].strip(),
        "metadata": metadata,
        "priority": int(priority),
        "webhook": said["webhook"].strip() or None,
    }
    try:
        return str(batch_routes.create(service, visitor.name, None, body)["id"])
    except UserError:
        with suppress(StoreError):  # if the store is away now, the file stays in the list
            service.delete_file(record)
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
