"""Open a job file: a file, a named pipe or standard input; as it is, or compressed with gzip or zstd.

A file of another kind in its place is told by its first bytes, and refused as a whole.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, cast

from swiftbatch.jobs.errors import UserError

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
