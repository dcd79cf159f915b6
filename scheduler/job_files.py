"""Job files where they lie: in a folder on a disk, or in an object store."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator

from jobs.job import Job
from jobs.reader import InputFileError, Reject, read_jobs
from jobs.store import Store
from jobs.uris import shown_uri

SUFFIX = ".jsonl"


def job_files(folder: Store) -> list[str]:
    """The paths of all files `*.jsonl` in a folder and in the folders below it, sorted. Raises StoreError.

    Names that start with '.' are passed over: so are files that are still being written under such a name.
    """
    return sorted(_walk(folder, ""))


def digest_of(folder: Store, path: str) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises StoreError."""
    with tempfile.TemporaryFile() as copy:
        folder.copy_to(path, copy)
        copy.seek(0)
        return hashlib.file_digest(copy, "sha256").hexdigest()


def read_job_file(uri: str, run_seed: int) -> tuple[list[tuple[int, Job]], list[Reject]]:
    """`read_jobs` of a file that may be in an object store. Raises InputFileError, StoreError."""
    if "://" not in uri:
        return read_jobs(uri, run_seed)
    folder_uri, name = _split(uri)
    with tempfile.NamedTemporaryFile() as copy:
        if not Store(folder_uri).copy_to(name, copy):
            raise InputFileError(f"cannot read the job file {shown_uri(uri)}: found none there; expected a JSONL file")
        copy.flush()
        try:
            return read_jobs(copy.name, run_seed)
        except InputFileError as error:
            raise InputFileError(str(error).replace(copy.name, shown_uri(uri))) from None


def joined(folder_uri: str, path: str) -> str:
    """The URI of a path below a folder; what follows a '?' stays at the end."""
    place, mark, query = folder_uri.partition("?") if "://" in folder_uri else (folder_uri, "", "")
    return f"{place.rstrip('/')}/{path}{mark}{query}"


def _walk(folder: Store, below: str) -> Iterator[str]:
    for name in folder.list(below):
        path = f"{below}/{name}" if below else name
        if not folder.exists(path):
            yield from _walk(folder, path)
        elif name.endswith(SUFFIX):
            yield path


def _split(uri: str) -> tuple[str, str]:
    """The URI of the folder that a file is in, and the file's name."""
    place, mark, query = uri.partition("?")
    folder, _, name = place.rpartition("/")
    return f"{folder}{mark}{query}", name
