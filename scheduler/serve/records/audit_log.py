"""The audit log of a server: who did what, a JSON line for each action.

audit/<time>.jsonl  a file of a local folder only grows; the next begins when it is full, and at a new server
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from swiftbatch.jobs.storage.folder_uri import local_path
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.scheduler.process.streams import Lines

FOLDER = "audit"
MAX_BYTES = 16 * 2**20  # of a file
MAX_UNKNOWN = 60  # lines a minute of refused requests without a known key: anybody can send those
MAX_REQUEST = 200  # characters of a method and a path
OBJECT_ID = re.compile(r"(?:batch_|file-)[0-9a-f]{24}")

Action = Literal["uploaded", "created", "cancelled", "downloaded", "deleted", "refused"]


class Sender(NamedTuple):
    """The sender of a request: its key's name, None without one, and its address."""

    name: str | None
    address: str


class AuditLog:
    """Appends lines; each is on the disk, or in the object store, when its call returns. Thread-safe."""

    def __init__(self, runs: Store, has_keys: bool) -> None:
        self._runs, self._has_keys = runs, has_keys
        self._folder = local_path(runs.uri)
        self._lock = threading.Lock()
        self._path: str | None = None  # of the newest file
        self._minute = self._num_unknown = 0

    def write(self, sender: Sender, action: Action, object_id: str | None, **more: object) -> None:
        """Write a line. Raises StoreError."""
        now = datetime.now(UTC)
        said: dict[str, Any] = {"time": now.isoformat(timespec="milliseconds"), "key": sender.name}
        said |= {"address": sender.address, "action": action, "id": object_id, **more}
        line = json.dumps(said).encode() + b"\n"  # ASCII, so that no path changes how a terminal shows the line
        with self._lock:
            path = f"{FOLDER}/{now.strftime('%Y%m%d-%H%M%S-%f')}.jsonl"
            if self._folder is None:  # objects do not grow
                self._runs.write(path, line)
                return
            try:
                self._append(os.path.join(self._folder, path), line)
            except OSError as error:
                self._path = None  # a torn line stays the last of its file
                raise StoreError(f"cannot write the audit log {FOLDER}: {error.strerror or error}") from None

    def refuse(self, sender: Sender, request: str, status: int) -> None:
        """Write the line of a refused request, such as `DELETE /v1/files/ID`."""
        if sender.name is None and self._has_keys and self._has_many_unknown():
            return
        found = OBJECT_ID.search(request)
        try:
            self.write(sender, "refused", found and found[0], request=request[:MAX_REQUEST], status=status)
        except StoreError as error:
            Lines(sys.stderr).write(str(error))

    def _append(self, path: str, line: bytes) -> None:
        if self._path is None or os.path.getsize(self._path) + len(line) > MAX_BYTES:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._path = path
        with open(self._path, "ab", buffering=0) as file:
            file.write(line)
            os.fsync(file.fileno())

    def _has_many_unknown(self) -> bool:
        minute = int(time.time() // 60)
        with self._lock:
            self._num_unknown = self._num_unknown + 1 if minute == self._minute else 1
            self._minute = minute
            return self._num_unknown > MAX_UNKNOWN
