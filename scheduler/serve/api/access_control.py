"""Checks a request's sender, host and site before its body is read."""

from __future__ import annotations

import ipaddress
from itertools import chain
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftbatch.metrics import exporter
from swiftbatch.scheduler.serve.api.responses import refuse
from swiftbatch.scheduler.serve.api_keys import ApiKey, Keyring
from swiftbatch.scheduler.serve.client_errors import RefusedError
from swiftbatch.scheduler.serve.page.login_sessions import Sessions
from swiftbatch.scheduler.serve.page.page_security import is_of_page

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
OF_THE_USER = ("same-origin", "none")  # browsers' values for a request of no other site
OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # they reveal only that the server runs
METRICS_PATHS = frozenset({"/metrics", exporter.DISCOVERY_PATH})  # they reveal everybody's batches
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


def is_of_loopback(headers: Headers) -> bool:
    """Return whether the request names a loopback host."""
    return is_loopback(_hostname(f"//{headers.get('host', '')}"))


def is_cross_site(method: str, headers: Headers) -> bool:
    """Return whether a browser wants a change for another site's page."""
    if method in SAFE_METHODS:
        return False
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site not in OF_THE_USER
    return origin is not None and origin.partition("://")[2] != headers.get("host", "")


def _hostname(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
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
                scope.setdefault("state", {})["owner"] = self._owner(scope)
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
            if self._only_loopback and not is_of_loopback(headers):
                raise RefusedError(OTHER_HOST, 403, code="wrong_host")
            return None
        if scope["path"] in OPEN_PATHS:
            return None
        if is_of_page(scope["path"]):  # the page asks for a login itself
            return self._sessions.owner(HTTPConnection(scope).cookies, self._keyring)
        key = _key(self._keyring, headers)
        if scope["path"] in METRICS_PATHS and not key.rights.metrics:
            raise RefusedError(NO_METRICS, 403, code="insufficient_permissions")
        return key.name


def _is_form_of_page(path: str, headers: Headers) -> bool:
    """Return whether this may be the page's form, whose origin browsers hide."""
    return is_of_page(path) and headers.get("origin") == "null" and "sec-fetch-site" not in headers


def _key(keyring: Keyring, headers: Headers) -> ApiKey:
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise RefusedError(NO_KEY, 401)
    key = keyring.find(secret.strip())
    if key is None:
        raise RefusedError(WRONG_KEY, 401, code="invalid_api_key")
    return key
