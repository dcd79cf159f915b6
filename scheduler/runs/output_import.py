"""Makes a run of job files and an output file, so that results can be verified without their run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swiftbatch.jobs.errors import LineError, UserError
from swiftbatch.jobs.input.job_files import InputFileError, open_input, shown_input
from swiftbatch.jobs.input.line_parsing import parse_object
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.json_records import dump_line
from swiftbatch.jobs.run.output_line import line_id, parse_line
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.scheduler.runs.submission import submission

Line = dict[str, Any]
EXPECTED = "expected an output line of swiftbatch"


def imported_run(output: str, jobs: Sequence[str], folder: str, settings: Settings) -> Run:
    """Make a run in `folder` of the jobs, with the results of an output file of swiftbatch.

    Raises InputFileError for lines that are no results, and UserError if no result belongs to a job.
    """
    with submission(jobs, folder, settings) as submitted:
        run, found = submitted.run, _lines_by_name(output)
        results = [
            (record.job_id, _own_line(record, found[record.custom_id], run.manifest.fingerprint, output))
            for record in run.records()
            if record.custom_id in found
        ]
        if not results:
            others = "".join(f"; {each.place} was rejected: {each.reason}" for each in submitted.rejects[:1])
            place = ", ".join(map(shown_input, jobs))
            raise UserError(f"{shown_input(output)} has no result of a job in {place}{others}")
        run.write_segment("imported", ResultSegment(results))
    return Run.open(folder)


def _lines_by_name(path: str) -> dict[str, Line]:
    """Return the results by `custom_id`; errors are left out."""
    found: dict[str, Line] = {}
    with open_input(path, shown_input(path)) as file:
        for number, text in enumerate(file, start=1):
            try:
                line = parse_object(text.decode())
                if line.get("error") is None:
                    found[line["custom_id"]] = line
            except UnicodeDecodeError:
                raise InputFileError(f"{path}:{number}: found no UTF-8; {EXPECTED}") from None
            except (LineError, KeyError, TypeError) as error:
                raise InputFileError(f"{path}:{number}: {error}; {EXPECTED}") from None
    return found


def _own_line(record: JobRecord, line: Line, fingerprint: str, path: str) -> Line:
    """Return the line of one choice as the run of that job would have written it. Raises InputFileError."""
    try:
        response = line["response"]
        body = response["body"]
        [choice] = [each for each in body["choices"] if each["index"] == record.job.choice_index]
        numbers = {name: choice.get(name, body.get(name)) for name in ("usage", "metrics")}
        own = {**body, **numbers, "choices": [choice], "system_fingerprint": fingerprint}
        is_ours = "token_ids_sha256" in choice and None not in numbers.values()
    except (KeyError, TypeError, ValueError):
        is_ours = False
    if not is_ours:
        place = f"{path}: the line of {record.custom_id!r}"
        raise InputFileError(f"{place} is no result of swiftbatch with choice {record.job.choice_index}")
    found: Line = {"id": line_id(record.job_id), "custom_id": record.custom_id, "error": None}
    found |= {"response": {**response, "body": own}}
    try:
        return parse_line(dump_line(found), record.job_id, fingerprint)
    except ValueError as error:
        raise InputFileError(f"{path}: the line of {record.custom_id!r}: {error}; {EXPECTED}") from None
