"""The storage behind a `Store` on a local disk.

The caller checks paths. Errors are `OSError`; an error without an error number is transient.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar
from uuid import uuid4

Answer = TypeVar("Answer")

ASIDE = re.compile(r"\..+\.[0-9a-f]{32}")  # the name of an unfinished file
COPY_BYTES = 2**23
NUM_DELETE_TRIES = NUM_WRITE_TRIES = 5
NO_FILE = {errno.ENXIO, errno.ELOOP}  # a socket, a link to itself
ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


class ReplacedError(OSError):
    def __init__(self) -> None:
        super().__init__(errno.ECANCELED, "it was replaced while it was read; try again")


class LocalReader:
    """Reads one file, and reopens it after an error: its handle may stay stale on a network disk."""

    def __init__(self, path: str) -> None:
        """Raise `FileNotFoundError` if there is no such file."""
        self._path = path
        self._file = _opened(path)
        self._identity = _identity(self._file)
        self._is_doubtful = False

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, or the rest; b"" at the end. Raises `ReplacedError`."""
        return self._ask(lambda file: file.read(size)) or b""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._ask(lambda file: file.seek(offset, whence))

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    def _ask(self, ask: Callable[[FileIO], Answer]) -> Answer:
        if self._is_doubtful:
            self._open_anew()
        start = self._file.tell()
        try:
            return ask(self._file)
        except OSError:
            self._file.seek(start)
            self._is_doubtful = True
            raise

    def _open_anew(self) -> None:
        try:
            file = _opened(self._path)
        except FileNotFoundError:
            raise ReplacedError from None
        file.seek(self._file.tell())
        self._file.close()
        self._file = file
        if _identity(file) != self._identity:
            raise ReplacedError
        self._is_doubtful = False


class LocalFolder:
    """A folder on a local disk: write aside under a name that starts with '.', flush, fsync, rename."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def write(self, path: str, data: bytes | memoryview) -> None:
        for num_tries_left in reversed(range(NUM_WRITE_TRIES)):
            try:
                self._put(path, lambda file: file.write(data), os.replace)
            except FileNotFoundError:  # a worker that was believed dead deletes a finished job's folder meanwhile
                if num_tries_left == 0:
                    raise
            else:
                return

    def write_from(self, path: str, source: BinaryIO) -> None:
        self._put(path, lambda file: shutil.copyfileobj(source, file, COPY_BYTES), os.replace)

    def write_new_from(self, path: str, source: BinaryIO) -> bool:
        if self.exists(path):
            return False
        try:
            self._put(path, lambda file: shutil.copyfileobj(source, file, COPY_BYTES), _link_new)
        except FileExistsError:
            return False
        return True

    def read(self, path: str) -> bytes | None:
        source = self.open(path)
        if source is None:
            return None
        with closing(source):
            return source.read(-1)

    def read_part(self, path: str, start: int, length: int) -> bytes | None:
        try:
            number = _open_file(f"{self._root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:  # a file object would cost more than the read of a short part
            return os.pread(number, length, start)
        finally:
            os.close(number)

    def open(self, path: str) -> LocalReader | None:
        try:
            return LocalReader(f"{self._root}/{path}")
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        try:  # `Path.is_file` of Python 3.14 takes every error for an absent file
            return stat.S_ISREG(os.stat(self._root / path).st_mode)
        except OSError as error:
            if error.errno in ABSENT:
                return False
            raise

    def list(self, folder: str) -> list[str]:
        try:
            return os.listdir(self._root / folder)
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int | None]:
        try:
            with os.scandir(self._root / folder) as entries:
                return {entry.name: _size(entry) for entry in entries}
        except FileNotFoundError:
            return {}

    def move(self, path: str, target: str) -> bool:
        _make_folder((self._root / target).parent)
        try:
            os.rename(self._root / path, self._root / target)
        except FileNotFoundError:
            return False
        for folder in {(self._root / path).parent, (self._root / target).parent}:
            _sync_folder(folder)
        return True

    def delete_leftovers(self, folder: str, min_age_seconds: float) -> None:
        try:
            names = [name for name in os.listdir(self._root / folder) if ASIDE.fullmatch(name)]
        except FileNotFoundError:
            return
        for path in (self._root / folder / name for name in names):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime >= min_age_seconds:
                    path.unlink()

    def delete(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        target = self._root / folder
        if target.is_symlink():  # the target of a link is not ours
            target.unlink()
            return
        # a writer that was believed dead may put one more file in while the folder goes
        num_tries_left = NUM_DELETE_TRIES
        while num_tries_left:
            try:
                shutil.rmtree(target)
            except FileNotFoundError:  # another one deletes as well: each file that is gone brings the end nearer
                pass
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or num_tries_left == 1:
                    raise
                num_tries_left -= 1
            else:
                num_tries_left -= 1
            if not target.exists():
                return

    def _put(self, path: str, fill: Callable[[BinaryIO], object], publish: Callable[[Path, Path], None]) -> None:
        """`fill` a file aside, then `publish(aside, target)`; on failure nothing has changed."""
        target = self._root / path
        _make_folder(target.parent)
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


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # a file stands in the folder's place
        found = "found a file or a link that leads nowhere, expected a folder"
        raise NotADirectoryError(errno.ENOTDIR, found, str(folder)) from None


def _open_file(path: str, flags: int) -> int:
    """Open a regular file. Raises FileNotFoundError for anything else."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in NO_FILE:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _opened(path: str) -> FileIO:
    return open(path, "rb", buffering=0, opener=_open_file)  # a pipe without a writer would hold us up


def _identity(file: FileIO) -> tuple[int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def _size(entry: os.DirEntry[str]) -> int | None:
    try:
        status = entry.stat()
    except OSError as error:
        if error.errno in ABSENT:  # or a link that leads nowhere
            return None
        raise
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _link_new(aside: Path, target: Path) -> None:
    """Publish by a hard link, which never overwrites, or raise `FileExistsError`."""
    try:
        os.link(aside, target)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        os.replace(aside, target)


def _sync_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that a new name in it survives a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
