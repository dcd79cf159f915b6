"""Shared parts of all pages: their visitor, their form tokens, strict headers, and templates.

Templates escape all texts, direction marks included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException

from swiftbatch.jobs.errors import UserError
from swiftbatch.metrics.report.page_text import amount, date, in_html
from swiftbatch.scheduler.display.progress_line import counted, duration, printable
from swiftbatch.scheduler.serve.records.audit_log import Sender
from swiftbatch.scheduler.serve.records.server_records import RefusedError
from swiftbatch.scheduler.serve.routes.access_control import (
    COOKIE,
    SESSION_ID,
    SESSION_SECONDS,
    Sessions,
    new_session_id,
)
from swiftbatch.scheduler.serve.routes.responses import By, HeadRoute, Served, refusal_of

TOKEN = "form_token"
STALE_FORM = "this form was not sent by this page, or is older than the session: load the page again, then send it"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}

FOLDER = Path(__file__).parent
LONGEST_NAME = 120  # characters shown of a batch's name
SPANS = ((86400, "d"), (3600, "h"), (60, "min"))


class LoginNeededError(Exception):
    """Raised for a visitor without a login, if there are keys."""


@dataclass(frozen=True)
class Visitor:
    """A visitor; `session_id` names the browser even before a login."""

    session_id: str
    sender: Sender
    form_token: str

    @property
    def name(self) -> str | None:
        return self.sender.name


def sessions_of(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


async def visitor_of(request: Request, sender: By) -> Visitor:
    """Return the visitor, perhaps with a new session."""
    session_id = request.cookies.get(COOKIE, "")
    if SESSION_ID.fullmatch(session_id) is None:
        session_id = request.state.new_session_id = new_session_id()
    return Visitor(session_id, sender, sessions_of(request).form_token(session_id))


AnyVisitor = Annotated[Visitor, Depends(visitor_of)]


async def known_visitor_of(service: Served, visitor: AnyVisitor) -> Visitor:
    """Return the visitor if no login is missing. Raises LoginNeededError."""
    if visitor.name is None and service.keyring is not None:
        raise LoginNeededError
    return visitor


KnownVisitor = Annotated[Visitor, Depends(known_visitor_of)]


def check_form(request: Request, visitor: Visitor, form: FormData) -> None:
    """Raise RefusedError for a form that this visitor's page did not send."""
    token = form.get(TOKEN)
    if not isinstance(token, str) or not sessions_of(request).is_form_token(visitor.session_id, token):
        raise RefusedError(STALE_FORM, 403)


class PageRoute(HeadRoute):
    """Answers with strict headers, and with a page for an error."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_strictly(request: Request) -> Response:
            try:
                response = await answer(request)
            except LoginNeededError:
                response = RedirectResponse("/login", 303)
            except (UserError, RequestValidationError, HTTPException) as error:
                refusal = refusal_of(request, error)
                response = page_response("problem", {"problem": str(refusal)}, refusal.status)
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            if (session_id := getattr(request.state, "new_session_id", None)) is not None:
                _keep_session(request, response, session_id)
            return response

        return answer_strictly


def _keep_session(request: Request, response: Response, session_id: str) -> None:
    """Set the session cookie, hidden from scripts and other sites."""
    response.set_cookie(
        COOKIE,
        session_id,
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def page_response(template: str, values: Mapping[str, Any], status: int = 200) -> HTMLResponse:
    page = ENVIRONMENT.get_template(f"{template}.html.jinja").render(values)
    return HTMLResponse(page.encode(errors="replace"), status)


def number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def ago(moment: float) -> str:
    """Return the age of a time in its largest unit."""
    seconds = max(0.0, time.time() - moment)
    for length, unit in SPANS:
        if seconds >= length:
            return f"{int(seconds / length)} {unit} ago"
    return f"{int(seconds)} s ago"


def short(text: str) -> str:
    return printable(text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…")


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        finalize=in_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    filters = (number, ago, short, date, duration, counted, amount)
    environment.filters |= {each.__name__: each for each in filters} | {"plain": printable}
    return environment


ENVIRONMENT = _environment()
