"""Checks a request's sender, by key or login, its host and site before its body is read."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import threading
import time
from collections.abc import Mapping
from itertools import chain
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftbatch.metrics import exporter
from swiftbatch.scheduler.serve.records.api_keys import ApiKey, Keyring
from swiftbatch.scheduler.serve.records.server_records import RefusedError
from swiftbatch.scheduler.serve.routes.responses import refuse

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
OF_THE_USER = ("same-origin", "none")  # browsers' values for a request of no other site
OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # they reveal only that the server runs
METRICS_PATHS = frozenset({"/metrics", exporter.DISCOVERY_PATH})  # they reveal everybody's batches
OF_PAGE = re.compile(r"/(login|logout|page\.css|page\.js|icon\.svg|batches/.*)?", re.DOTALL)
MAX_HEADERS, MAX_HEADER_BYTES = 100, 2**15

LONG_HEAD = f"expected at most {MAX_HEADERS} headers of {MAX_HEADER_BYTES:,} bytes in all"
NO_KEY = "no API key was given: expected it in the header Authorization, as: Bearer sb_..."
WRONG_KEY = "this API key is not known here: it may have been replaced"
NO_METRICS = "this API key does not read metrics: its line in the file of keys has to say metrics=yes"
OTHER_HOST = "found another name of this host, expected a loopback name, as localhost: without keys it serves no other"
OTHER_SITE = "found a request that a page of another site has made: those change nothing here"


def is_loopback(host: str) -> bool:
    """Return whether a name without a port can only be this machine's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_cross_site(method: str, headers: Headers) -> bool:
    """Return whether a browser wants a change for another site's page."""
    if method in SAFE_METHODS:
        return False
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site not in OF_THE_USER
    return origin is not None and origin.partition("://")[2] != headers.get("host", "")


def _hostname(headers: Headers) -> str:
    try:
        return urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


class AccessControl:
    """Stores a request's owner in its state, or refuses the request.

    Without keys, `only_loopback` refuses requests that name another host, as by DNS rebinding.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring | None, sessions: Sessions, only_loopback: bool) -> None:
        self._app = app
        self._keyring = keyring
        self._sessions = sessions
        self._only_loopback = only_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope.setdefault("state", {})["owner"] = None
                scope["state"]["owner"] = self._owner(scope)
            except RefusedError as error:
                await refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _owner(self, scope: Scope) -> str | None:
        """Raises RefusedError."""
        headers = Headers(scope=scope)
        if len(headers) > MAX_HEADERS or sum(map(len, chain.from_iterable(headers.raw))) > MAX_HEADER_BYTES:
            raise RefusedError(LONG_HEAD, 431)
        if is_cross_site(scope["method"], headers) and not _is_form_of_page(scope["path"], headers):
            raise RefusedError(OTHER_SITE, 403, code="cross_site")
        if self._keyring is None:
            if self._only_loopback and not is_loopback(_hostname(headers)):
                raise RefusedError(OTHER_HOST, 403, code="wrong_host")
            return None
        if scope["path"] in OPEN_PATHS:
            return None
        if _is_of_page(scope["path"]):  # the page asks for a login itself
            return self._sessions.owner(HTTPConnection(scope).cookies, self._keyring)
        key = _key(self._keyring, headers)
        scope["state"]["owner"] = key.name  # of a refused request, too
        if scope["path"] in METRICS_PATHS and not key.rights.metrics:
            raise RefusedError(NO_METRICS, 403, code="insufficient_permissions")
        return key.name


def _is_of_page(path: str) -> bool:
    return OF_PAGE.fullmatch(path) is not None


def _is_form_of_page(path: str, headers: Headers) -> bool:
    """Return whether this may be the page's form, whose origin browsers hide."""
    return _is_of_page(path) and headers.get("origin") == "null" and "sec-fetch-site" not in headers


def _key(keyring: Keyring, headers: Headers) -> ApiKey:
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise RefusedError(NO_KEY, 401)
    key = keyring.find(secret.strip())
    if key is None:
        raise RefusedError(WRONG_KEY, 401, code="invalid_api_key")
    return key


# Logins of the page.


COOKIE = "swiftbatch_session"
SESSION_SECONDS = 12 * 3600
MAX_SESSIONS = 10_000
SESSION_ID = re.compile(r"[A-Za-z0-9_-]{43}")


class Sessions:
    """The sessions, only in memory; thread-safe."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        # by hashed id, oldest first: the key's hash, and the end in `time.monotonic()` seconds
        self._sessions: dict[bytes, tuple[str, float]] = {}

    def begin(self, key_digest: str) -> str:
        """Begin a session for a key and return its id."""
        session_id = new_session_id()
        now = time.monotonic()
        with self._lock:
            self._sessions = {name: session for name, session in self._sessions.items() if session[1] > now}
            while len(self._sessions) >= MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[_hash(session_id)] = key_digest, now + SESSION_SECONDS
        return session_id

    def owner(self, cookies: Mapping[str, str], keyring: Keyring) -> str | None:
        """Return the session's key name; None without a valid one."""
        digest = self.key_digest(cookies.get(COOKIE, ""))
        key = None if digest is None else keyring.find_digest(digest)
        return None if key is None else key.name

    def key_digest(self, session_id: str) -> str | None:
        digest, end = self._sessions.get(_hash(session_id), (None, 0.0))
        return digest if end > time.monotonic() else None

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


def _hash(session_id: str) -> bytes:
    return hashlib.sha256(session_id.encode()).digest()
