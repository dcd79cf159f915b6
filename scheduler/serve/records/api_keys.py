"""A server's keys, from a file that may change while it serves."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, ValidationError

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.json_records import Frozen, reasons

PREFIX = "sb_"
NUM_SECRET_BYTES = 32
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
EXPECTED_KEY_LINE = "expected NAME:sha256:HASH, as `swiftbatch serve --make-key NAME` prints it"

Count = Annotated[int, Field(ge=1)]
POLL_SECONDS = 1.0  # between two checks for a new file

Signature = tuple[int, ...]
"""The file's modification time, size and inode, which change with the file."""


class ApiKeyError(UserError):
    """An unusable key, line or file of keys; the text shows no secrets."""


class Rights(Frozen):
    """A key's rights; None is no limit."""

    max_running: Count | None = None  # batches at a time
    max_unfinished: Count | None = None  # batches, waiting ones included
    max_tokens_per_day: Count | None = None  # generated in 24 hours; beyond it no batch begins
    metrics: bool = False  # access to /metrics and /sd, which reveal all keys' batches


class ApiKey(Frozen):
    """A key; `name` owns files and batches, `digest` is the secret's SHA-256."""

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    rights: Rights = Rights()


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()


def make_key(name: str) -> tuple[str, str]:
    """Make a random secret and its key's line. Raises ApiKeyError."""
    secret = PREFIX + secrets.token_urlsafe(NUM_SECRET_BYTES)
    key = parse_line(f"{name}:sha256:{digest_of(secret)}")
    return secret, f"{key.name}:sha256:{key.digest}"


def parse_line(line: str) -> ApiKey:
    """Parse a line such as `NAME:sha256:HASH max_running=2 ...`. Raises ApiKeyError."""
    who, *words = line.split() or [""]
    name, _, rest = who.partition(":")
    kind, _, digest = rest.partition(":")
    if kind != "sha256":
        raise ApiKeyError(f"found no sha256 behind a name, {EXPECTED_KEY_LINE}")
    try:
        rights = Rights.model_validate(_said(words))
        return ApiKey(name=name, digest=digest, rights=rights)
    except ValidationError as error:
        if error.title == Rights.__name__:
            raise ApiKeyError(reasons(error, Rights)) from None
        fault = error.errors()[0]["loc"][0]
        problem = "up to 64 letters, digits, '.', '_' and '-' as its name" if fault == "name" else "64 digits of 0-9a-f"
        raise ApiKeyError(f"{fault}: expected {problem}; {EXPECTED_KEY_LINE}") from None


def _said(words: list[str]) -> dict[str, str]:
    said: dict[str, str] = {}
    for word in words:
        field, equals, value = word.partition("=")
        if not equals or field in said:
            raise ApiKeyError(f"expected limits as max_running=2 behind the hash, each once; {EXPECTED_KEY_LINE}")
        said[field] = value
    return said


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Parse a key file with blank lines and # comments. Raises ApiKeyError.

    A name may have several lines with equal rights, to replace its secret.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = parse_line(line)
        except ApiKeyError as error:
            raise ApiKeyError(f"line {number}: {error}") from None
        for other in keys:
            if other.digest == key.digest:
                raise ApiKeyError(f"line {number}: found the hash of {other.name} again, expected each once")
            if other.name == key.name and other.rights != key.rights:
                raise ApiKeyError(f"line {number}: found other limits of {key.name} than before, expected the same")
        keys.append(key)
    if not keys:
        raise ApiKeyError("found no key, expected a line that `swiftbatch serve --make-key NAME` prints")
    return tuple(keys)


class Keyring:
    """The presently valid keys; thread-safe."""

    def __init__(self, path: str, tell: Callable[[str], None]) -> None:
        """Read the file; `tell` receives problems of later versions. Raises ApiKeyError."""
        self._path, self._tell = path, tell
        self._lock = threading.Lock()
        self._next_look = time.monotonic() + POLL_SECONDS
        self._signature = _signature(path)
        self._keys = _read(path)

    def find(self, secret: str) -> ApiKey | None:
        return self.find_digest(digest_of(secret))

    def find_digest(self, digest: str) -> ApiKey | None:
        """Find a key by its secret's hash in constant time."""
        found = None
        for key in self._newest():
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def rights(self, name: str) -> Rights:
        """Return a name's rights, unlimited if its keys are gone."""
        return next((key.rights for key in self._newest() if key.name == name), Rights())

    def _newest(self) -> tuple[ApiKey, ...]:
        with self._lock:
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + POLL_SECONDS
                self._look()
            return self._keys

    def _look(self) -> None:
        if (signature := _signature(self._path)) == self._signature:
            return
        self._signature = signature
        try:
            self._keys = _read(self._path)
        except ApiKeyError as error:
            self._tell(f"{error}; the keys before are still valid")


def _signature(path: str) -> Signature:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: str) -> tuple[ApiKey, ...]:
    try:
        with open(path, encoding="utf-8") as file:
            return parse_keys(file.read())
    except OSError as error:
        problem = str(error.strerror)
    except UnicodeDecodeError:
        problem = "found no text in UTF-8"
    except ApiKeyError as error:
        problem = str(error)
    raise ApiKeyError(f"--api-keys {path}: {problem}")
