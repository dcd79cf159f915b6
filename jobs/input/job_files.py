"""Finds job files by paths, URIs and patterns, and opens them: plain, gzip, zstd, a pipe or standard input."""

from __future__ import annotations

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
CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # by first bytes, none of which are UTF-8 text
UNPACKERS = {"gzip": "gunzip", "zstd": "zstd -d"}

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
EXPECTED = "expected a JSONL or Parquet file"
NUM_BYTES = 4096  # the first bytes of a file that tell its kind
TAR_SIGN = slice(257, 262)

UTF_8 = "expected UTF-8: convert it, as with iconv -f {0} -t UTF-8"
BYTE_ORDER_MARKS = {  # marks of four bytes come first
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
ZEROS: dict[tuple[bool, ...], str] = {  # True for a zero among the first four bytes of ASCII letters
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
OFFICE = (b"[Content_Types].xml", b"mimetypeapplication/vnd.oasis")  # first names in the ZIP archive of such a document

ARRAY = re.compile(rb"\s*\[\s*(\{|$)")
ONE_A_LINE = "expected one JSON object a line, without brackets around them: jq -c '.[]' makes that of it"


class InputFileError(UserError):
    """The job file as a whole can't be read."""


def shown_input(path: str) -> str:
    """The name of a job file in messages."""
    return "standard input" if path == STANDARD_INPUT else path or "''"


def odd_kind(mode: int) -> str | None:
    """The kind of a thing with this `st_mode`, if it is neither a file nor a folder."""
    return KINDS.get(stat.S_IFMT(mode))


@contextmanager
def open_input(path: str, name: str | None = None) -> Iterator[BufferedReader]:
    """The uncompressed bytes of a job file; `-` is standard input. A pipe is waited for. Errors call it `name`.

    Raises InputFileError, also while it is read from: for what is absent, a folder, a socket or a device (which may
    have no end), and for compressed data that is damaged or cut off.
    """
    codec = None
    try:
        with _open(path) as file:
            codec = _codec(file)
            if codec is None:
                yield file
            else:
                import pyarrow as pa

                # NativeFile is no RawIOBase, and has all that a BufferedReader asks of one
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
    """Tell the compression by the first bytes; None for a file without."""
    return next((codec for magic, codec in CODECS.items() if file.peek(4).startswith(magic)), None)


@contextmanager
def _open(path: str) -> Iterator[BufferedReader]:
    if path == STANDARD_INPUT:
        yield BufferedReader(cast("Any", sys.stdin.buffer))  # one that can peek, whatever stands in for it
        return
    kind = odd_kind(os.stat(path).st_mode)
    if kind in ("a socket", "a device"):
        raise OSError(None, f"found {kind}")
    with open(path, "rb") as file:
        yield file


def other_kind(head: bytes) -> str | None:
    """Say by a file's first bytes what it is instead of a job file, and what was expected; None for a job file."""
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
    """Tell by a file's first line if it holds one JSON array of objects; `is_only`: no other line has text.

    A whole array in front of other lines, or a torn one, is a bad line, and no file of another kind. `line` is None
    where it is too long: then the file's first bytes, `head`, tell.
    """
    if line is None or is_only:
        return is_only and ARRAY.match(line or head) is not None
    if not ARRAY.match(line):
        return False
    text = line.decode(errors="replace")
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text)  # it goes on in the next line
    except (ValueError, RecursionError):
        pass
    return False


def _wide_encoding(head: bytes) -> str | None:
    """The encoding of text that has more than one byte for an ASCII letter."""
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return encoding
    return ZEROS.get(tuple(byte == 0 for byte in head[:4])) if head[:4].isascii() else None


# Finds job files by paths, URIs and patterns, in the order in which they are read, each as a file on a disk.


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
def local_copy(place: str) -> Iterator[tuple[str, str]]:
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
            f"cannot read {shown_uri(uri)}: {problem[:MAX_PROBLEM]}; expected a path, file://, s3://, gs://, az://, "
            "hf://datasets/ORG/NAME/FILE, or another place that fsspec reaches from here"
        ) from None
