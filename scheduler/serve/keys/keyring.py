"""The keys of a server, from a file that may change while it serves."""

from __future__ import annotations

import hmac
import os
import threading
import time
from collections.abc import Callable

from swiftbatch.jobs.errors import UserError
from swiftbatch.scheduler.serve.keys.api_key import ApiKey, KeyLineError, Rights, digest_of, parse_line

LOOK_SECONDS = 1.0  # between two looks at whether the file has changed

Signature = tuple[int, ...]
"""The file's modification time, size and inode, which change with the file."""


class KeyFileError(UserError):
    """The file of keys can't be used: which line, and why."""


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """The keys of a file, a line each; blank lines and those that begin with # say nothing. Raises KeyFileError.

    A name may stand on several lines, so that a new secret can take an old one's place; its rights are the same then.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = parse_line(line)
        except KeyLineError as error:
            raise KeyFileError(f"line {number}: {error}") from None
        for other in keys:
            if other.digest == key.digest:
                raise KeyFileError(f"line {number}: found the hash of {other.name} again, expected each once")
            if other.name == key.name and other.rights != key.rights:
                raise KeyFileError(f"line {number}: found other limits of {key.name} than before, expected the same")
        keys.append(key)
    if not keys:
        raise KeyFileError("found no key, expected a line that `swiftbatch serve --make-key NAME` prints")
    return tuple(keys)


class Keyring:
    """The keys that are valid now; threads may share it."""

    def __init__(self, path: str, tell: Callable[[str], None]) -> None:
        """Read the file. `tell` is told where a later version of it can't be used. Raises KeyFileError."""
        self._path, self._tell = path, tell
        self._lock = threading.Lock()
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._signature = _signature(path)
        self._keys = _read(path)

    def find(self, secret: str) -> ApiKey | None:
        """The key with this secret. The time it takes says nothing of how near the secret is to one."""
        return self.find_digest(digest_of(secret))

    def find_digest(self, digest: str) -> ApiKey | None:
        """Find a key as `find` does, by the hash of its secret."""
        found = None
        for key in self._newest():
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def rights(self, name: str) -> Rights:
        """The rights of the keys of this name; without limits if none is left: its batches were taken before."""
        return next((key.rights for key in self._newest() if key.name == name), Rights())

    def _newest(self) -> tuple[ApiKey, ...]:
        with self._lock:
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + LOOK_SECONDS
                self._look()
            return self._keys

    def _look(self) -> None:
        signature = _signature(self._path)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._keys = _read(self._path)
        except KeyFileError as error:
            self._tell(f"{error}; the keys before are still valid")


def _signature(path: str) -> Signature:
    """The signature of a file, empty if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: str) -> tuple[ApiKey, ...]:
    try:
        with open(path, encoding="utf-8") as file:
            return parse_keys(file.read())
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "found no text in UTF-8"
        raise KeyFileError(f"--api-keys {path}: {problem}") from None
    except KeyFileError as error:
        raise KeyFileError(f"--api-keys {path}: {error}") from None
