"""What a `Store` asks of its storage, and the storage on a local disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self
from uuid import uuid4

COPY_BYTES = 2**23
NUM_DELETE_TRIES = 5
CHANGED_MEANWHILE = {errno.ENOENT, errno.ENOTEMPTY}
NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


class Reader(Protocol):
    """An open file. A read that failed can be asked for again."""

    def read(self, size: int, /) -> bytes | None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None: ...


class Folder(Protocol):
    """One folder. Paths are relative and already checked; `list` is unordered.

    Every error is an `OSError`; one without a number comes from the network or a server and may pass.
    """

    def write(self, path: str, data: bytes | memoryview) -> None: ...

    def write_from(self, path: str, source: BinaryIO) -> None: ...

    def write_new(self, path: str, data: bytes) -> bool: ...

    def read(self, path: str) -> bytes | None: ...

    def open(self, path: str) -> Reader | None: ...

    def exists(self, path: str) -> bool: ...

    def list(self, folder: str) -> list[str]: ...

    def delete(self, path: str) -> None: ...

    def delete_folder(self, folder: str) -> None: ...


class LocalFolder:
    """A folder on a local disk: write aside under a name that starts with '.', flush, fsync, rename."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def write(self, path: str, data: bytes | memoryview) -> None:
        self._put(path, lambda file: file.write(data), os.replace)

    def write_from(self, path: str, source: BinaryIO) -> None:
        self._put(path, lambda file: shutil.copyfileobj(source, file, COPY_BYTES), os.replace)

    def write_new(self, path: str, data: bytes) -> bool:
        if self.exists(path):
            return False
        try:
            self._put(path, lambda file: file.write(data), _link_new)
        except FileExistsError:
            return False
        return True

    def read(self, path: str) -> bytes | None:
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None

    def open(self, path: str) -> Reader | None:
        try:
            return open(self._root / path, "rb", buffering=0)
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        return (self._root / path).is_file()

    def list(self, folder: str) -> list[str]:
        try:
            return os.listdir(self._root / folder)
        except FileNotFoundError:
            return []

    def delete(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        target = self._root / folder
        # a writer that was believed dead may put one more file in while the folder goes
        for num_tries_left in reversed(range(NUM_DELETE_TRIES)):
            try:
                shutil.rmtree(target)
            except OSError as error:
                if error.errno not in CHANGED_MEANWHILE or num_tries_left == 0:
                    raise
            if not target.exists():
                return

    def _put(self, path: str, fill: Callable[[BinaryIO], object], publish: Callable[[Path, Path], None]) -> None:
        """`fill` a file aside, `publish(aside, target)`; if that fails, the target is as it was, and no file left."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.{uuid4().hex}")
        try:
            with open(aside, "xb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            publish(aside, target)
        finally:
            aside.unlink(missing_ok=True)
        _sync_folder(target.parent)


def _link_new(aside: Path, target: Path) -> None:
    """Publish under a free name or raise `FileExistsError`: a rename would overwrite, a hard link never does."""
    try:
        os.link(aside, target)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        os.replace(aside, target)


def _sync_folder(folder: Path) -> None:
    """The new name is on the disk only when the folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
