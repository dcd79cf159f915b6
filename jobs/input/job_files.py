"""Finds job files by path, URI or pattern, and opens them."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from io import BufferedReader
from shutil import copyfileobj
from tempfile import NamedTemporaryFile
from typing import IO, Any, cast
from urllib.parse import quote

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.storage.folder_uri import OBJECT_STORES, hidden_credentials, local_path, shown_uri
from swiftbatch.jobs.storage.local_folder import COPY_BYTES
from swiftbatch.jobs.storage.store import Store, StoreError

STANDARD_INPUT = "-"
CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # magic numbers; none is UTF-8 text
UNPACKERS = {"gzip": "gunzip", "zstd": "zstd -d"}

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
EXPECTED = "expected a JSONL or Parquet file"
NUM_BYTES = 4096  # bytes read to detect a file's kind
TAR_SIGN = slice(257, 262)

UTF_8 = "expected UTF-8: convert it, as with iconv -f {0} -t UTF-8"
BYTE_ORDER_MARKS = {  # four-byte marks come first
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
ZEROS: dict[tuple[bool, ...], str] = {  # True for each zero among the first four bytes of ASCII letters
    (False, True, True, True): "UTF-32LE",
    (True, True, True, False): "UTF-32BE",
    (False, True, False, True): "UTF-16LE",
    (True, False, True, False): "UTF-16BE",
}

UNPACK = "expected it as it is, or in gzip or zstd: unpack it with {0}"
SIGNATURES = {
    b"BZh[1-9]1AY&SY": ("bzip2 data", UNPACK.format("bunzip2")),
    rb"\xfd7zXZ\0": ("xz data", UNPACK.format("unxz")),
    rb"\x04\x22\x4d\x18": ("lz4 data", UNPACK.format("lz4 -d")),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", UNPACK.format("7z x")),
    b"PK(\x03\x04|\x05\x06)": ("a ZIP archive", UNPACK.format("unzip")),
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an office document", EXPECTED),
    b"%PDF-": ("a PDF document", EXPECTED),
    b"SQLite format 3\0": ("an SQLite database", EXPECTED),
    b"ARROW1\0\0": ("an Arrow file", EXPECTED),
}
# first entries of the ZIP archives of office documents
OFFICE = (b"[Content_Types].xml", b"mimetypeapplication/vnd.oasis")

ARRAY = re.compile(rb"\s*\[\s*(\{|$)")
ONE_A_LINE = "expected one JSON object a line, without brackets around them: jq -c '.[]' makes that of it"


class InputFileError(UserError):
    """A job file that can't be read."""


class EmptyInputError(InputFileError):
    """A submission of blank lines alone."""


def shown_input(path: str) -> str:
    return "standard input" if path == STANDARD_INPUT else path or "''"


def line_name(file: str, number: int) -> str:
    """Return the `custom_id` of a line without one, such as `jobs.jsonl:17`."""
    name = "stdin" if file == shown_input(STANDARD_INPUT) else os.path.basename(file)
    return f"{name}:{number}".encode(errors="backslashreplace").decode()


def odd_kind(mode: int) -> str | None:
    """Return the name of an unusual file type, or None for a regular file or folder."""
    return KINDS.get(stat.S_IFMT(mode))


@contextmanager
def open_input(path: str, name: str | None = None) -> Iterator[BufferedReader]:
    """Open the uncompressed bytes of a job file or pipe; `-` is standard input.

    Raises InputFileError, also while reading: for absent, endless or damaged files.
    """
    codec = None
    try:
        with _open(path) as file:
            codec = _codec(file)
            if codec is None:
                yield file
            else:
                import pyarrow as pa

                # NativeFile is no RawIOBase but has all that BufferedReader needs
                stream: Any = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
                with BufferedReader(cast("Any", stream)) as text:
                    if inner := _codec(text):
                        raise InputFileError(
                            f"cannot read the job file {name or shown_input(path)}: found {inner} data in its {codec} "
                            f"data; expected it compressed once at most: unpack it once, with {UNPACKERS[codec]}"
                        )
                    yield text
    except OSError as error:
        problem = error.strerror or str(error)
        if codec is not None:
            problem = f"its {codec} data is damaged or cut off: {problem}"
        raise InputFileError(
            f"cannot read the job file {name or shown_input(path)}: {problem}; expected a JSONL or Parquet file"
        ) from None


def _codec(file: BufferedReader) -> str | None:
    """Return the compression's name, or None for an uncompressed file."""
    return next((codec for magic, codec in CODECS.items() if file.peek(4).startswith(magic)), None)


@contextmanager
def _open(path: str) -> Iterator[BufferedReader]:
    if path == STANDARD_INPUT:
        yield BufferedReader(cast("Any", sys.stdin.buffer))  # a stand-in for stdin may lack `peek`
        return
    kind = odd_kind(os.stat(path).st_mode)
    if kind in ("a socket", "a device"):
        raise OSError(None, f"found {kind}")
    with open(path, "rb") as file:
        yield file


def other_kind(head: bytes) -> str | None:
    """Describe what a file is by its first bytes, or return None if it may be a job file."""
    if encoding := _wide_encoding(head):
        return f"found {encoding[:6]} text; {UTF_8.format(encoding)}"
    if head[TAR_SIGN] == b"ustar":
        return f"found a tar archive; {UNPACK.format('tar -x')}"
    for pattern, (found, expected) in SIGNATURES.items():
        if re.match(pattern, head):
            if found == "a ZIP archive" and any(sign in head[:NUM_BYTES] for sign in OFFICE):
                return f"found an office document, such as .xlsx; {EXPECTED}"
            return f"found {found}; {expected}"
    return None


def is_array(line: bytes | None, head: bytes, is_only: bool) -> bool:
    """Return whether a file is one JSON array; `is_only` means that no other line has text.

    `line` is None if too long; then `head`, the first bytes, decides.
    """
    if line is None or is_only:
        return is_only and ARRAY.match(line or head) is not None
    if not ARRAY.match(line):
        return False
    text = line.decode(errors="replace")
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text)  # it continues on the next line
    except (ValueError, RecursionError):
        pass
    return False


def _wide_encoding(head: bytes) -> str | None:
    """Detect text with several bytes per ASCII letter."""
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return encoding
    return ZEROS.get(tuple(byte == 0 for byte in head[:4])) if head[:4].isascii() else None


# Resolves paths, URIs and patterns in reading order to files on a disk.


OURS = (*OBJECT_STORES, "file")
MAX_PROBLEM = 300  # characters; some libraries write long errors


def found_files(said: Sequence[str]) -> list[str]:
    """Resolve paths, URIs and patterns in order, each file once.

    Raises InputFileError for a pattern without files, StoreError.
    """
    found: dict[str, str] = {}
    for place in said:
        _check_object(place)
        for file in _matching(place) if glob.has_magic(place) else [place]:
            found.setdefault(_identity(file), file)
    return list(found.values())


def run_folder_beside(places: Sequence[str]) -> str:
    """Name the folder of a run beside its only job file.

    That is `jobs.run` for `jobs.jsonl`, and `jobs.parquet.run` for `jobs.parquet`. Raises InputFileError.
    """
    place = places[0]
    if len(places) == 1 and os.path.isfile(place):
        return _checked_folder(run_folder_of(place))
    is_absent = not (os.path.exists(place) or "://" in place or place == STANDARD_INPUT or glob.has_magic(place))
    if len(places) == 1 and (is_absent or os.path.isdir(place)):
        problem = os.strerror(errno.ENOENT if is_absent else errno.EISDIR)
        raise InputFileError(
            f"cannot read the job file {shown_input(place)}: {problem}; expected a JSONL or Parquet file"
        )
    raise InputFileError("expected --run with the run's folder: only one job file on a disk goes without it")


def run_folder_of(job_file: str) -> str:
    folder, name = os.path.split(job_file)
    return os.path.join(folder, f"{name.removesuffix('.jsonl') or name}.run")


def _checked_folder(folder: str) -> str:
    """Return a folder that is absent, empty or a run's. Raises InputFileError."""
    try:
        found = os.listdir(folder) if os.path.lexists(folder) else []
    except OSError as error:
        raise InputFileError(
            f"cannot use {folder} as the run's folder: {error.strerror}; name another folder with --run"
        ) from None
    if found and not {"run.json", "drivers"} & set(found):
        raise InputFileError(f"{folder} is there and is no run: name another folder with --run")
    return folder


@contextmanager
def local_copy(place: str) -> Iterator[tuple[str, str]]:
    """Yield a job file's local path, perhaps of a copy, and its name. Raises InputFileError, StoreError."""
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
    place, mark, query = uri.partition("?")
    folder, _, name = place.rpartition("/")
    return f"{folder}{mark}{query}", name


def joined(folder_uri: str, path: str) -> str:
    """Append a path to a folder's URI, before any `?`."""
    place, mark, query = folder_uri.partition("?") if "://" in folder_uri else (folder_uri, "", "")
    return f"{place.rstrip('/')}/{path}{mark}{query}"


def _check_object(place: str) -> None:
    if _scheme(place) in OBJECT_STORES:
        bucket, _, name = shown_uri(place).partition("://")[2].partition("/")
        if not bucket or not name.rpartition("/")[2]:
            found = f"found no {'file' if bucket else 'bucket'}"
            raise InputFileError(
                f"cannot read the job file {shown_uri(place)}: {found}, expected both, "
                f"as in {_scheme(place)}://bucket/jobs.jsonl"
            )


def _identity(place: str) -> str:
    """Return the same text for all names of one file."""
    if _scheme(place) == "file":
        return os.path.realpath(_path_of(place))
    return place if "://" in place or place == STANDARD_INPUT else os.path.realpath(place)


def _copy(place: str, name: str, target: IO[bytes]) -> None:
    """Raise InputFileError, StoreError."""
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
    """Raise InputFileError, StoreError."""
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
    """Copy a file to `target`; return False if absent. Raises StoreError."""
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    with _reached(uri) as (filesystem, path):
        if not filesystem.isfile(path):
            return False
        with PyFileSystem(FSSpecHandler(filesystem)).open_input_stream(path) as source:
            copyfileobj(source, target, COPY_BYTES)
    return True


def matching_foreign(uri: str) -> list[str]:
    """List the URIs of a pattern's files, sorted. Raises StoreError."""
    with _reached(uri) as (filesystem, pattern):
        if filesystem.isfile(pattern):
            return [uri]
        paths = [path for path in sorted(filesystem.glob(pattern)) if filesystem.isfile(path)]
        return [filesystem.unstrip_protocol(path) for path in paths]


@contextmanager
def _reached(uri: str) -> Iterator[tuple[Any, str]]:
    """Yield a URI's fsspec filesystem and path. Raises StoreError for any error."""
    try:
        import fsspec

        yield fsspec.core.url_to_fs(uri)
    except Exception as error:
        problem = " ".join(hidden_credentials(str(error) or type(error).__name__, uri).split())
        raise StoreError(
            f"cannot read {shown_uri(uri)}: {problem[:MAX_PROBLEM]}; expected a path, file://, s3://, gs://, az://, "
            "hf://datasets/ORG/NAME/FILE, or another place that fsspec reaches from here"
        ) from None
