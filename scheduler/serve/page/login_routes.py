"""Logs in visitors who have a key, and out again."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse

from swiftbatch.scheduler.serve.api.access import Served
from swiftbatch.scheduler.serve.page.page_route import PageRoute
from swiftbatch.scheduler.serve.page.rendering import page_response
from swiftbatch.scheduler.serve.page.sessions import AnyVisitor, Visitor, check_form, new_session_id, sessions_of

MOST_FIELDS, MOST_FIELD_BYTES = 4, 2**12
WRONG_KEY = "this key is not known here: it may have been replaced"

router = APIRouter(route_class=PageRoute)


@router.get("/login")
def login_page(service: Served, visitor: AnyVisitor) -> Response:
    if service.keyring is None or visitor.name is not None:
        return RedirectResponse("/", 303)
    return _login_page(visitor)


@router.post("/login")
async def login(request: Request, service: Served, visitor: AnyVisitor) -> Response:
    """Log in with a new session: one that somebody else may have put into this browser is worth nothing."""
    if service.keyring is None:
        return RedirectResponse("/", 303)
    async with request.form(max_files=0, max_fields=MOST_FIELDS, max_part_size=MOST_FIELD_BYTES) as form:
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
    async with request.form(max_files=0, max_fields=MOST_FIELDS, max_part_size=MOST_FIELD_BYTES) as form:
        check_form(request, visitor, form)
    sessions_of(request).end(visitor.session_id)
    request.state.new_session_id = new_session_id()
    return RedirectResponse("/login", 303)


def _login_page(visitor: Visitor, problem: str = "", status: int = 200) -> Response:
    return page_response("login", {"visitor": visitor, "problem": problem}, status)
