"""Identifies processes across containers and restarts, where numbers repeat."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

from swiftbatch.jobs.run.run_records import ProcessKey

START_FIELD = 19  # in /proc/PID/stat, counted after the name, which may contain anything
STATE_FIELD = 0
ENDED_STATES = {"Z", "X", "x"}


@functools.cache
def _own_key(pid: int) -> ProcessKey | None:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return ProcessKey(boot_id=boot_id, pid_namespace=os.readlink("/proc/self/ns/pid"), start_ticks=_start(pid))
    except (OSError, ValueError, IndexError):  # no Linux, or a restricted /proc
        return None


def own_key() -> ProcessKey | None:
    """Return this process's key; None if the system does not say."""
    return _own_key(os.getpid())


def is_of_this_machine(host: str, key: ProcessKey | None) -> bool:
    """Return whether a process has a number here. Without a `key`, equal host names count as one host."""
    if key is None:
        return host == socket.gethostname()
    own = own_key()
    return own is not None and (key.boot_id, key.pid_namespace) == (own.boot_id, own.pid_namespace)


def is_gone(host: str, pid: int, key: ProcessKey | None) -> bool:
    """Return whether a process has surely ended.

    Without a `key`, equal host names count as one host.
    """
    if not is_of_this_machine(host, key):
        return False
    if key is None:
        return not _exists(pid)
    try:
        return _start(pid) != key.start_ticks
    except FileNotFoundError:
        return True
    except OSError:
        return not _exists(pid)


def _start(pid: int) -> int:
    """Return a process's start in clock ticks. Raises FileNotFoundError if it ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    if fields[STATE_FIELD] in ENDED_STATES:
        raise FileNotFoundError(pid)
    return int(fields[START_FIELD])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
