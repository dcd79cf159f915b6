"""The page's visitors, their sessions and form tokens."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response
from starlette.datastructures import FormData

from swiftbatch.scheduler.serve.api.dependencies import Owner, Served
from swiftbatch.scheduler.serve.api_keys import Keyring
from swiftbatch.scheduler.serve.client_errors import RefusedError

COOKIE = "swiftbatch_session"
SESSION_SECONDS = 12 * 3600
MAX_SESSIONS = 10_000
SESSION_ID = re.compile(r"[A-Za-z0-9_-]{43}")
TOKEN = "form_token"
STALE_FORM = "this form was not sent by this page, or is older than the session: load the page again, then send it"


@dataclass(frozen=True)
class Session:
    """A login: the key's hash, and the end in `time.monotonic()` seconds."""

    key_digest: str
    ends: float


class Sessions:
    """The sessions, only in memory; thread-safe."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}  # by hashed id, oldest first

    def begin(self, key_digest: str) -> str:
        """Begin a session for a key and return its id."""
        session_id = new_session_id()
        now = time.monotonic()
        with self._lock:
            self._sessions = {name: session for name, session in self._sessions.items() if session.ends > now}
            while len(self._sessions) >= MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[_hash(session_id)] = Session(key_digest, now + SESSION_SECONDS)
        return session_id

    def owner(self, cookies: Mapping[str, str], keyring: Keyring) -> str | None:
        """Return the session's key name; None without a valid one."""
        digest = self.key_digest(cookies.get(COOKIE, ""))
        key = None if digest is None else keyring.find_digest(digest)
        return None if key is None else key.name

    def key_digest(self, session_id: str) -> str | None:
        """Return the hash of a session's key; None without a login."""
        session = self._sessions.get(_hash(session_id))
        return session.key_digest if session is not None and session.ends > time.monotonic() else None

    def end(self, session_id: str) -> None:
        with self._lock:
            self._sessions.pop(_hash(session_id), None)

    def form_token(self, session_id: str) -> str:
        """Return the token of a session's forms, also before a login."""
        return hmac.new(self._secret, session_id.encode(), hashlib.sha256).hexdigest()

    def is_form_token(self, session_id: str, token: str) -> bool:
        """Check a form token in constant time."""
        return hmac.compare_digest(self.form_token(session_id).encode(), token.encode())


def new_session_id() -> str:
    return secrets.token_urlsafe(32)


def is_session_id(text: str) -> bool:
    return SESSION_ID.fullmatch(text) is not None


def _hash(session_id: str) -> bytes:
    return hashlib.sha256(session_id.encode()).digest()


class LoginNeededError(Exception):
    """Raised for a visitor without a login, if there are keys."""


@dataclass(frozen=True)
class Visitor:
    """A visitor; `session_id` names the browser even before a login."""

    session_id: str
    name: str | None
    form_token: str


def sessions_of(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


async def visitor_of(request: Request, owner: Owner) -> Visitor:
    """Return the visitor, perhaps with a new session."""
    session_id = request.cookies.get(COOKIE, "")
    if not is_session_id(session_id):
        session_id = request.state.new_session_id = new_session_id()
    return Visitor(session_id, owner, sessions_of(request).form_token(session_id))


AnyVisitor = Annotated[Visitor, Depends(visitor_of)]


async def known_visitor_of(service: Served, visitor: AnyVisitor) -> Visitor:
    """Return the visitor if no login is missing. Raises LoginNeededError."""
    if visitor.name is None and service.keyring is not None:
        raise LoginNeededError
    return visitor


def check_form(request: Request, visitor: Visitor, form: FormData) -> None:
    """Raise RefusedError for a form that this visitor's page did not send."""
    token = form.get(TOKEN)
    if not isinstance(token, str) or not sessions_of(request).is_form_token(visitor.session_id, token):
        raise RefusedError(STALE_FORM, 403)


def keep_session(request: Request, response: Response, session_id: str) -> None:
    """Set the session cookie, hidden from scripts and other sites."""
    response.set_cookie(
        COOKIE,
        session_id,
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


KnownVisitor = Annotated[Visitor, Depends(known_visitor_of)]
