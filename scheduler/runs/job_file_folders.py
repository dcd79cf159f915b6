"""Job files where they lie: in a folder on a disk, or in an object store."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence

from swiftbatch.jobs.input.input_file import odd_kind
from swiftbatch.jobs.input.job_file_paths import at_hand, found_files
from swiftbatch.jobs.input.line_parsing import JobLine
from swiftbatch.jobs.input.reader import JobReader
from swiftbatch.jobs.storage.store import Store

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
LOST_AND_FOUND = "lost+found"  # a file system's own, which it lets nobody read

Identity = tuple[int, int]  # of a folder: device and inode


def job_files(folder: Store) -> tuple[list[str], dict[str, str]]:
    """The paths of all job files in a folder and in the folders below it, sorted, by the ends of their names.

    With them what could not be looked into on a disk, and why: folders, links, and what is neither file nor folder.
    Names that start with '.' are passed over: so are files that are still being written under such a name.
    Raises StoreError where the folder itself can't be listed.
    """
    folder.list("")
    paths, skipped = _walk_disk(folder.uri) if folder.is_local else (_walk(folder, ""), {})
    return sorted(paths), skipped


def digest_of(folder: Store, path: str) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises StoreError."""
    digest = hashlib.sha256()
    for piece in folder.pieces(path) or ():
        digest.update(piece)
    return digest.hexdigest()


def job_lines(said: Sequence[str], reader: JobReader) -> Iterator[tuple[int, JobLine]]:
    """The jobs of files, as they are read, in the order of `found_files`. Raises InputFileError, StoreError."""
    files = found_files(said)
    reader.is_for_many = len(files) > 1
    for file in files:
        with at_hand(file) as (path, name):
            yield from reader.lines(path, name)
    reader.end()


def _walk(folder: Store, below: str) -> Iterator[str]:
    for name in folder.list(below):
        path = f"{below}/{name}" if below else name
        if not folder.exists(path):
            yield from _walk(folder, path)
        elif name.endswith(SUFFIXES):
            yield path


def _walk_disk(root: str) -> tuple[list[str], dict[str, str]]:
    paths, skipped = [], {}
    waiting: list[tuple[str, tuple[Identity, ...]]] = [("", ())]
    while waiting:
        path, above = waiting.pop()
        try:
            status, names = _look_at(os.path.join(root, path))
        except OSError as error:
            is_dangling = isinstance(error, FileNotFoundError)
            skipped[path] = "a link that leads nowhere" if is_dangling else error.strerror or str(error)
            continue
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            skipped[path] = "a link to a folder that it is in"
        elif names is not None:
            below = [f"{path}/{name}" if path else name for name in names if name[0] != "." and name != LOST_AND_FOUND]
            waiting += [(name, (*above, identity)) for name in below]
        elif kind := odd_kind(status.st_mode):
            skipped[path] = f"{kind}, no file"
        elif path.endswith(SUFFIXES):
            paths.append(path)
    return paths, skipped


def _look_at(place: str) -> tuple[os.stat_result, list[str] | None]:
    """The status of what is at a place, and the names in it if it is a folder."""
    status = os.stat(place)
    return status, os.listdir(place) if stat.S_ISDIR(status.st_mode) else None
