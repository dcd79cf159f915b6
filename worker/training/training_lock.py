"""Lock of a folder that a training writes to, without torch."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from swiftbatch.jobs.errors import ModelError

LOCK = ".training.lock"  # the file names the process that has the lock, for error messages

_held: set[Path] = set()  # a training may be part of another training in this process


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Lock a folder within the block; remove a new one at the end if it is empty. Raises ModelError."""
    folder = Path(os.path.realpath(path))  # Path.resolve would raise for a link to itself
    if folder in _held:
        yield
        return
    is_new = not os.path.exists(folder)  # Path.exists would raise for a name that is too long
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder / LOCK, path)
    except OSError as error:
        raise ModelError(f"output {path}: cannot be written ({error.strerror}); name another folder") from None
    _held.add(folder)
    try:
        yield
    finally:
        _held.remove(folder)
        (folder / LOCK).unlink(missing_ok=True)
        os.close(lock)
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _lock(file: Path, path: Path) -> int:
    """Create and lock the file; return its descriptor. Raises ModelError if another process holds it, OSError."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode(errors="replace") or "one that is just starting"
            os.close(descriptor)
            raise ModelError(
                f"output {path}: another process is at work there, {holder}; wait for its end, end it, or name "
                "another folder"
            ) from None
        except OSError:
            pass  # without locks in the file system, every process may train
        if _is_at(file, descriptor):
            os.truncate(descriptor, 0)
            os.write(descriptor, _own_name().encode())
            return descriptor
        os.close(descriptor)  # the process that had the lock has ended, and has removed the file


def _own_name() -> str:
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {since}"


def _is_at(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False
