"""Sessions of people at the page: random ids that a cookie carries, the keys behind them, and tokens for forms."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from swiftbatch.scheduler.serve.keys.keyring import Keyring

COOKIE = "swiftbatch_session"
SESSION_SECONDS = 12 * 3600
MOST_SESSIONS = 10_000
SESSION_ID = re.compile(r"[A-Za-z0-9_-]{43}")


@dataclass(frozen=True)
class Session:
    """A login: the hash of its key, and its end in `time.monotonic()` seconds."""

    key_digest: str
    ends: float


class Sessions:
    """The sessions of people, in memory alone: a server that starts again knows of no logins. Threads may share it."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}  # by hashes of their ids, oldest first

    def begin(self, key_digest: str) -> str:
        """The id of a new session of somebody with this key."""
        session_id = new_session_id()
        now = time.monotonic()
        with self._lock:
            self._sessions = {name: session for name, session in self._sessions.items() if session.ends > now}
            while len(self._sessions) >= MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[_hash(session_id)] = Session(key_digest, now + SESSION_SECONDS)
        return session_id

    def owner(self, cookies: Mapping[str, str], keyring: Keyring) -> str | None:
        """The name of the key behind a browser's session; None without one, and where the key is valid no more."""
        digest = self.key_digest(cookies.get(COOKIE, ""))
        key = None if digest is None else keyring.find_digest(digest)
        return None if key is None else key.name

    def key_digest(self, session_id: str) -> str | None:
        """The hash of the key behind a session; None where nobody has logged in, or it has ended."""
        session = self._sessions.get(_hash(session_id))
        return session.key_digest if session is not None and session.ends > time.monotonic() else None

    def end(self, session_id: str) -> None:
        with self._lock:
            self._sessions.pop(_hash(session_id), None)

    def form_token(self, session_id: str) -> str:
        """The token that a session's forms carry, so that no other site's form passes for one; also before a login."""
        return hmac.new(self._secret, session_id.encode(), hashlib.sha256).hexdigest()

    def is_form_token(self, session_id: str, token: str) -> bool:
        """Return whether a token is the session's. The time it takes says nothing of how near a guess is."""
        return hmac.compare_digest(self.form_token(session_id).encode(), token.encode())


def new_session_id() -> str:
    return secrets.token_urlsafe(32)


def is_session_id(text: str) -> bool:
    return SESSION_ID.fullmatch(text) is not None


def _hash(session_id: str) -> bytes:
    return hashlib.sha256(session_id.encode()).digest()
