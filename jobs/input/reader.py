"""Read a job file: one JSON object a line, in either input form. A bad line is a reject and never stops the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader

from jobs.input.input_file import InputFileError, open_input, shown_input
from jobs.input.job_line import JobLine
from jobs.input.lines import LineError, line_from_object, parse_object
from jobs.input.reasons import shown
from jobs.job import MAX_CUSTOM_ID

MAX_LINE_BYTES = 32 * 2**20
SKIP_BYTES = 2**20
MAX_REJECTS = 1_000_000  # are kept in memory; a small compressed file may hold any number
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Reject:
    """A line that is no job: its number (from 1), its `custom_id` where it could be read, and the reason."""

    line_number: int
    custom_id: str | None
    reason: str


def read_jobs(path: str, run_seed: int) -> tuple[list[tuple[int, JobLine]], list[Reject]]:
    """What the lines of a file ask for with their numbers (from 1), and its rejects, both in file order.

    A line without a seed gets one from `run_seed` and its `custom_id`. Raises `InputFileError` when the file can't be
    read to its end (see `open_input`), or holds nothing but blank lines.
    """
    jobs: list[tuple[int, JobLine]] = []
    rejects: list[Reject] = []
    first_lines: dict[str, int] = {}
    for line_number, line in _lines(path):
        custom_id = None
        try:
            values = parse_object(_text(line))
            custom_id = _readable_custom_id(values.get("custom_id"))
            job = line_from_object(values, run_seed)
            _refuse_duplicate(job.custom_id, first_lines)
        except LineError as error:
            rejects.append(Reject(line_number, custom_id, str(error)))
            _refuse_endless(path, rejects)
        else:
            first_lines[job.custom_id] = line_number
            jobs.append((line_number, job))
    if not jobs and not rejects:
        raise InputFileError(
            f"{shown_input(path)} holds no jobs: found no line with text, expected one JSON object a line"
        )
    return jobs, rejects


def _lines(path: str) -> Iterator[tuple[int, bytes | None]]:
    """Line numbers and stripped lines that are not blank; None stands for a line that is too long."""
    with open_input(path) as file:
        line_number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            line_number += 1
            if len(line) > MAX_LINE_BYTES:
                _skip_rest(file, line)
                yield line_number, None
                continue
            if line_number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if stripped := line.strip():
                yield line_number, stripped


def _skip_rest(file: BufferedReader, line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = file.readline(SKIP_BYTES)


def _text(line: bytes | None) -> str:
    if line is None:
        raise LineError(f"the line is too long: found over {MAX_LINE_BYTES} bytes, expected at most that many")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        found = f"0x{line[error.start]:02x} at byte {error.start + 1}"
        raise LineError(f"not UTF-8: found {found}, expected UTF-8 text") from None


def _readable_custom_id(value: object) -> str | None:
    """The `custom_id` of a line that may yet be rejected, if it is fit to be shown and written."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID:
        return None
    return None if any("\ud800" <= letter <= "\udfff" for letter in value) else value


def _refuse_endless(path: str, rejects: list[Reject]) -> None:
    if len(rejects) > MAX_REJECTS:
        first = rejects[0]
        raise InputFileError(
            f"{shown_input(path)} is no job file: found over {MAX_REJECTS:,} bad lines, "
            f"the first is line {first.line_number}: {first.reason}"
        )


def _refuse_duplicate(custom_id: str, first_lines: dict[str, int]) -> None:
    if custom_id in first_lines:
        first = first_lines[custom_id]
        raise LineError(f"field 'custom_id': found {shown(custom_id)} again (first in line {first}), expected it once")
