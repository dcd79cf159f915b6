"""Finds job files by paths, URIs and patterns, in the order in which they are read, each as a file on a disk.

Foreign files are those behind URIs that no run folder has: `hf://` and what else fsspec knows.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from shutil import copyfileobj
from tempfile import NamedTemporaryFile
from typing import IO, Any
from urllib.parse import quote

from swiftbatch.jobs.input.input_file import STANDARD_INPUT, InputFileError, shown_input
from swiftbatch.jobs.storage.local_folder import COPY_BYTES
from swiftbatch.jobs.storage.object_stores import OBJECT_STORES, hidden_credentials, local_path, shown_uri
from swiftbatch.jobs.storage.store import Store, StoreError

OURS = (*OBJECT_STORES, "file")
MAX_PROBLEM = 300  # characters; some libraries tell long stories


def found_files(said: Sequence[str]) -> list[str]:
    """The files that paths, URIs and patterns mean: as they were said, those of a pattern sorted, each file once.

    A name with signs of a pattern that is a file's is that file. Raises InputFileError for a pattern without a file,
    StoreError.
    """
    found: dict[str, str] = {}
    for place in said:
        _check_object(place)
        for file in _matching(place) if glob.has_magic(place) else [place]:
            found.setdefault(_identity(file), file)
    return list(found.values())


@contextmanager
def at_hand(place: str) -> Iterator[tuple[str, str]]:
    """The path of a job file on a disk, a copy where it is elsewhere, and its name for messages.

    Raises InputFileError where there is none, StoreError.
    """
    if "://" not in place:
        yield place, shown_input(place)
        return
    name = shown_uri(place)
    if _scheme(place) == "file":
        yield _path_of(place), name
        return
    with NamedTemporaryFile() as copy:
        _copy(place, name, copy)
        yield copy.name, name


def split(uri: str) -> tuple[str, str]:
    """The URI of the folder that a file is in, and the file's name."""
    place, mark, query = uri.partition("?")
    folder, _, name = place.rpartition("/")
    return f"{folder}{mark}{query}", name


def joined(folder_uri: str, path: str) -> str:
    """The URI of a path below a folder; what follows a '?' stays at the end."""
    place, mark, query = folder_uri.partition("?") if "://" in folder_uri else (folder_uri, "", "")
    return f"{place.rstrip('/')}/{path}{mark}{query}"


def _check_object(place: str) -> None:
    """Raise InputFileError for a URI of an object store that names no object."""
    if _scheme(place) in OBJECT_STORES:
        bucket, _, name = shown_uri(place).partition("://")[2].partition("/")
        if not bucket or not name.rpartition("/")[2]:
            found = f"found no {'file' if bucket else 'bucket'}"
            raise InputFileError(
                f"cannot read the job file {shown_uri(place)}: {found}, expected both, "
                f"as in {_scheme(place)}://bucket/jobs.jsonl"
            )


def _identity(place: str) -> str:
    """A text that is the same for all names of a file: it follows symbolic links, and makes a path of a file's URI."""
    if _scheme(place) == "file":
        return os.path.realpath(_path_of(place))
    return place if "://" in place or place == STANDARD_INPUT else os.path.realpath(place)


def _copy(place: str, name: str, target: IO[bytes]) -> None:
    """Copy a file that is elsewhere. Raises InputFileError, StoreError."""
    folder, file = split(place)
    try:
        is_there = Store(folder).copy_to(file, target) if _scheme(place) in OURS else copy_foreign(place, target)
        target.flush()
    except OSError as error:
        problem = error.strerror or str(error)
        raise InputFileError(
            f"cannot copy the job file {name} to a temporary file: {problem}; make room there"
        ) from None
    if not is_there:
        raise InputFileError(f"cannot read the job file {name}: found none there; expected a JSONL or Parquet file")


def _path_of(uri: str) -> str:
    try:
        return local_path(uri) or ""
    except ValueError as error:
        raise InputFileError(f"cannot read the job file {shown_uri(uri)}: {error}") from None


def _matching(place: str) -> list[str]:
    """The files that a pattern matches, sorted. Raises InputFileError, StoreError."""
    if "://" not in place:
        found = _on_disk(place)
    elif _scheme(place) in OURS:
        found = _in_store(place)
    else:
        found = matching_foreign(place)
    if not found:
        raise InputFileError(f"no file matches {shown_uri(place)}: expected a JSONL or Parquet file, or several")
    return found


def _on_disk(pattern: str) -> list[str]:
    if os.path.lexists(pattern):
        return [pattern]
    return [path for path in sorted(glob.glob(pattern, recursive=True)) if not os.path.isdir(path)]


def _in_store(pattern: str) -> list[str]:
    folder, name = split(pattern)
    store, is_of_folders = Store(folder), glob.has_magic(folder.partition("?")[0])
    if store.exists(name) or not (is_of_folders or glob.has_magic(name)):
        return [pattern]
    if is_of_folders:
        raise InputFileError(f"cannot look for {shown_uri(pattern)}: expected '*' behind the last '/' alone")
    names = [each for each in store.list("") if fnmatchcase(each, name) and store.exists(each)]
    return [joined(folder, quote(each) if _scheme(folder) == "file" else each) for each in names]


def _scheme(uri: str) -> str:
    return uri.partition("://")[0].lower() if "://" in uri else ""


def copy_foreign(uri: str, target: IO[bytes]) -> bool:
    """Write the bytes of a file to `target`; False where there is none. Raises StoreError."""
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    with _reached(uri) as (filesystem, path):
        if not filesystem.isfile(path):
            return False
        with PyFileSystem(FSSpecHandler(filesystem)).open_input_stream(path) as source:
            copyfileobj(source, target, COPY_BYTES)
    return True


def matching_foreign(uri: str) -> list[str]:
    """The URIs of the files that a pattern matches, sorted. Raises StoreError."""
    with _reached(uri) as (filesystem, pattern):
        if filesystem.isfile(pattern):
            return [uri]
        paths = [path for path in sorted(filesystem.glob(pattern)) if filesystem.isfile(path)]
        return [filesystem.unstrip_protocol(path) for path in paths]


@contextmanager
def _reached(uri: str) -> Iterator[tuple[Any, str]]:
    """The fsspec filesystem of a URI, and the path there. Whatever goes wrong is one StoreError: each has its own."""
    try:
        import fsspec

        yield fsspec.core.url_to_fs(uri)
    except Exception as error:
        problem = " ".join(hidden_credentials(str(error) or type(error).__name__, uri).split())
        raise StoreError(
            f"cannot read {shown_uri(uri)}: {problem[:MAX_PROBLEM]}; expected a path, file://, s3://, gs://, "
            "hf://datasets/ORG/NAME/FILE, or another place that fsspec reaches from here"
        ) from None
