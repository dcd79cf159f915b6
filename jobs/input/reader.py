"""Reads job files and turns bad lines into rejects."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedReader
from itertools import islice
from tempfile import TemporaryFile
from typing import IO, Any

from swiftbatch.jobs.errors import LineError
from swiftbatch.jobs.input.job_files import (
    NUM_BYTES,
    ONE_A_LINE,
    STANDARD_INPUT,
    EmptyInputError,
    InputFileError,
    found_files,
    is_array,
    line_name,
    local_copy,
    odd_kind,
    open_input,
    other_kind,
)
from swiftbatch.jobs.input.line_parsing import JobLine, ParsedLineCache, parse_object
from swiftbatch.jobs.input.parquet_rows import BATCH, MAGIC, Columns, Row, parquet_rows
from swiftbatch.jobs.input.rejects import Reject, Rejects
from swiftbatch.jobs.input.request_fields import MAX_COLUMNS, kept_json, text_id
from swiftbatch.jobs.job import MAX_CUSTOM_ID, JobUrl
from swiftbatch.jobs.json_records import FieldError, is_utf8, shown
from swiftbatch.jobs.storage.store import Store

MAX_LINE_BYTES = 32 * 2**20
SKIP_BYTES = 2**20
MAX_REJECTS = 1_000_000  # bounds a small compressed file with endless lines
MAX_FIRST_REJECTS = 10_000  # bad lines before the first job
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PARQUET_SUFFIX = ".parquet"


@dataclass
class JobReader:
    """Reads several files as one, with line numbers from 1 over all.

    Lines without a seed get one from `run_seed`, and `defaults` for other sampling fields that they leave out. Those
    for another URL than `endpoint` are rejected. `kept_columns` counts the lines of each kept column, `num_named` those
    that are named after their file and number, such as `example`.
    """

    run_seed: int
    columns: Columns = field(default_factory=Columns)
    endpoint: JobUrl | None = None  # None accepts any
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_for_many: bool = False  # places then name their file
    rejects: Rejects = field(default_factory=Rejects)
    kept_columns: Counter[str] = field(default_factory=Counter)
    num_named: int = 0
    example: str = ""
    _files: list[tuple[int, str]] = field(default_factory=list)  # lines before each file, and its name
    _num_lines: int = 0
    _num_jobs: int = 0
    _first_lines: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kinds = ParsedLineCache(self.run_seed, self.defaults)

    def lines(self, path: str, name: str) -> Iterator[tuple[int, JobLine]]:
        """Yield a file's jobs with line numbers. Raises `InputFileError`."""
        before = self._num_lines
        self._files.append((before, name))
        for line_number, values, others in _rows(path, name, self.columns):
            self._num_lines = before + line_number
            try:
                job = self._job(values, others, line_name(name, line_number))
            except LineError as error:
                custom_id = _readable_custom_id(values.get("custom_id")) if isinstance(values, dict) else None
                self.rejects.add(Reject(self._num_lines, custom_id, str(error), code=error.code))
                self.refuse_endless(self.rejects)
                continue
            self._num_jobs += 1
            yield self._num_lines, job

    def end(self) -> None:
        """Raise `EmptyInputError` if all lines were blank."""
        if not self._num_jobs and not self.rejects:
            _, name = self._files[0]
            more = {1: " holds", 2: " and 1 more file hold"}.get(
                len(self._files), f" and {len(self._files) - 1} more files hold"
            )
            raise EmptyInputError(
                f"{name}{more} no jobs: found no row and no line with text, expected one JSON object a line, or Parquet"
            )

    def placed(self, reject: Reject) -> Reject:
        if not self.is_for_many:
            return reject
        before, name = self._files[bisect_left(self._files, (reject.line_number, "")) - 1]
        return replace(reject, line_number=reject.line_number - before, file=name)

    def _job(self, values: dict[str, Any] | LineError, others: Mapping[str, Any], name: str) -> JobLine:
        if isinstance(values, LineError):
            raise values
        if values.get("custom_id") is None and self._may_name(values):
            values = values | {"custom_id": name}
        job = self._kinds.line(values)
        if self.endpoint not in (None, job.url):
            raise LineError(f"field 'url': found a line for {job.url}, expected {self.endpoint}", "url_mismatch")
        first = self._first_lines.setdefault(job.custom_id, self._num_lines)
        if first != self._num_lines:
            place = self.placed(Reject(first, None, "")).place.removeprefix("line ")
            where = place if self.is_for_many else f"line {place}"
            problem = f"found {shown(job.custom_id)} again (first in {where}), expected it once"
            raise LineError(f"field 'custom_id': {problem}", "duplicate_custom_id")
        if others:
            job = self._with_others(job, others)
        if job.custom_id == name:
            self.num_named, self.example = self.num_named + 1, self.example or name
        return job

    def _may_name(self, values: dict[str, Any]) -> bool:
        """Return whether a line may omit its `custom_id`: one of OpenAI Batch may not."""
        return "custom_id" not in self.columns.by_field and all(values.get(name) is None for name in BATCH)

    def _with_others(self, job: JobLine, others: Mapping[str, Any]) -> JobLine:
        """Raise LineError."""
        kept = {name: value for name, value in others.items() if value is not None and value is not ...}
        idle = [name for name, value in others.items() if value is ...]
        self.kept_columns.update(kept.keys())
        try:
            columns = kept_json(kept, MAX_COLUMNS) if kept else None
        except FieldError as error:
            raise LineError(f"kept columns: {error}") from None
        return replace(job, without_effect=(*job.without_effect, *idle), columns=columns)

    def refuse_endless(self, rejects: Rejects) -> None:
        """Raise InputFileError for endless bad lines."""
        most = MAX_REJECTS if self._num_jobs else MAX_FIRST_REJECTS
        if len(rejects) > most:
            first = self.placed(rejects[0])
            raise InputFileError(
                f"{self._files[-1][1]} is no job file: found over {most:,} bad lines"
                f"{'' if self._num_jobs else ' and no good one'}, the first is {first.place}: {first.reason}"
            )


def _rows(path: str, name: str, columns: Columns) -> Iterator[Row]:
    with open_input(path, name) as file:
        if file.peek(len(MAGIC)).startswith(MAGIC):
            with _seekable(file, path) as whole:
                yield from parquet_rows(whole, name, columns)
            return
        if name.endswith(PARQUET_SUFFIX):
            found = "an empty file" if not file.peek(1) else "other first bytes than Parquet's"
            raise InputFileError(f"cannot read the job file {name}: found {found}; expected a Parquet file")
        for line_number, line in _job_lines(file, name):
            try:
                row: Row = (line_number, *columns.applied(parse_object(_text(line))))
            except LineError as error:
                row = (line_number, error, {})
            yield row


def _job_lines(file: BufferedReader, name: str) -> Iterator[tuple[int, bytes | None]]:
    """Raise `InputFileError` for another kind of file."""
    head = file.peek(NUM_BYTES)
    if kind := other_kind(head):
        raise InputFileError(f"cannot read the job file {name}: {kind}")
    lines = _lines(file)
    first = list(islice(lines, 2))
    if first and is_array(first[0][1], head.removeprefix(BYTE_ORDER_MARK), is_only=len(first) == 1):
        raise InputFileError(f"cannot read the job file {name}: found a JSON array; {ONE_A_LINE}")
    yield from first
    yield from lines


@contextmanager
def _seekable(file: BufferedReader, path: str) -> Iterator[IO[bytes]]:
    """Yield the file itself if it can seek, else a seekable copy."""
    if path != STANDARD_INPUT and os.path.isfile(path) and file.seekable():
        yield file
        return
    with TemporaryFile() as copy:
        shutil.copyfileobj(file, copy)
        yield copy


def _lines(file: BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """Yield line numbers and stripped lines, with None in place of a line that is too long."""
    line_number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        line_number += 1
        if len(line) > MAX_LINE_BYTES:
            _skip_rest(file, line)
            yield line_number, None
            continue
        if stripped := line.removeprefix(BYTE_ORDER_MARK).strip():  # a mark may follow where files were joined
            yield line_number, stripped


def _skip_rest(file: BufferedReader, line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = file.readline(SKIP_BYTES)


def _text(line: bytes | None) -> str:
    if line is None:
        problem = f"found over {MAX_LINE_BYTES} bytes, expected at most that many"
        raise LineError(f"the line is too long: {problem}", "invalid_json_line")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        found = f"0x{line[error.start]:02x} at byte {error.start + 1}"
        raise LineError(f"not UTF-8: found {found}, expected UTF-8 text", "invalid_json_line") from None


def _readable_custom_id(value: object) -> str | None:
    value = text_id(value)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID:
        return None
    return value if is_utf8(value) else None


# Job files in folders on a disk or in an object store.


JOB_FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
LOST_AND_FOUND = "lost+found"  # a file system's own folder, which nobody may read

FolderIdentity = tuple[int, int]  # device and inode


def job_files_in(folder: Store) -> tuple[list[str], dict[str, str]]:
    """List all job files below a folder, sorted, by their endings, and what could not be searched.

    Names with a leading '.' may be half written and are skipped. Raises StoreError.
    """
    folder.list("")
    paths, skipped = _walk_disk(folder.uri) if folder.is_local else (_walk(folder, ""), {})
    return sorted(paths), skipped


def digest_of(folder: Store, path: str) -> str:
    """Return the SHA-256 in hexadecimal. Raises StoreError."""
    digest = hashlib.sha256()
    for piece in folder.pieces(path) or ():
        digest.update(piece)
    return digest.hexdigest()


def job_lines(said: Sequence[str], reader: JobReader) -> Iterator[tuple[int, JobLine]]:
    """Yield the jobs of files in order. Raises InputFileError, StoreError."""
    files = found_files(said)
    reader.is_for_many = len(files) > 1
    for file in files:
        with local_copy(file) as (path, name):
            yield from reader.lines(path, name)
    reader.end()


def _walk(folder: Store, below: str) -> Iterator[str]:
    for name in folder.list(below):
        path = f"{below}/{name}" if below else name
        if not folder.exists(path):
            yield from _walk(folder, path)
        elif name.endswith(JOB_FILE_SUFFIXES):
            yield path


def _walk_disk(root: str) -> tuple[list[str], dict[str, str]]:
    paths, skipped = [], {}
    waiting: list[tuple[str, tuple[FolderIdentity, ...]]] = [("", ())]
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
        elif path.endswith(JOB_FILE_SUFFIXES):
            paths.append(path)
    return paths, skipped


def _look_at(place: str) -> tuple[os.stat_result, list[str] | None]:
    status = os.stat(place)
    return status, os.listdir(place) if stat.S_ISDIR(status.st_mode) else None
