"""The visitor of the page: nobody in particular if there are no keys, else who has logged in with one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response
from starlette.datastructures import FormData

from swiftbatch.scheduler.serve.api.access import Owner, Served
from swiftbatch.scheduler.serve.page.sessions import COOKIE, SESSION_SECONDS, Sessions, is_session_id, new_session_id
from swiftbatch.scheduler.serve.refusals import RefusedError

TOKEN = "form_token"
STALE_FORM = "this form was not sent by this page, or is older than the session: load the page again, then send it"


class LoginNeededError(Exception):
    """Raised for a visitor who has not logged in, if there are keys."""


@dataclass(frozen=True)
class Visitor:
    """`session_id` names the browser, also before a login; `name` is that of the key, None without one."""

    session_id: str
    name: str | None
    form_token: str


def sessions_of(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


async def visitor_of(request: Request, owner: Owner) -> Visitor:
    """The visitor, as the gate has found; a browser without a session gets one with the answer."""
    session_id = request.cookies.get(COOKIE, "")
    if not is_session_id(session_id):
        session_id = request.state.new_session_id = new_session_id()
    return Visitor(session_id, owner, sessions_of(request).form_token(session_id))


AnyVisitor = Annotated[Visitor, Depends(visitor_of)]


async def known_visitor_of(service: Served, visitor: AnyVisitor) -> Visitor:
    """The visitor, who must have logged in if there are keys. Raises LoginNeededError."""
    if visitor.name is None and service.keyring is not None:
        raise LoginNeededError
    return visitor


def check_form(request: Request, visitor: Visitor, form: FormData) -> None:
    """Raise RefusedError for a form that this visitor's page has not sent."""
    token = form.get(TOKEN)
    if not isinstance(token, str) or not sessions_of(request).is_form_token(visitor.session_id, token):
        raise RefusedError(STALE_FORM, 403)


def keep_session(request: Request, response: Response, session_id: str) -> None:
    """Have the browser keep a session's id, out of reach of scripts and of other sites' requests."""
    response.set_cookie(
        COOKIE,
        session_id,
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


KnownVisitor = Annotated[Visitor, Depends(known_visitor_of)]
