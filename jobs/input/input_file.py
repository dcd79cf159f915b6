"""Open a job file: a file, a named pipe or standard input; as it is, or compressed with gzip or zstd."""

from __future__ import annotations

import os
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
