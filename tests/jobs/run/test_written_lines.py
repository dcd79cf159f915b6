from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftbatch.jobs.job import Job, JobRecord, Message
from swiftbatch.jobs.json_records import dump_line, sealed
from swiftbatch.jobs.run import error_files, output_line
from swiftbatch.jobs.run.output_line import Reasoning, error_line, success_line
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from tests.jobs.run.run_parts import FINISHED, MANIFEST, make_record, write_result

NAMES = ("text", "log", 'na\u00efve "name"', "short", "failed", "open")
TEXT = 'plain, "quoted", \\ and \n, a \u2028 line, na\u00efve \U0001f600'


def make_chat(custom_id: str) -> JobRecord:
    job = Job(
        custom_id=custom_id,
        url="/v1/chat/completions",
        messages=(Message(role="user", content="Hello"),),
        sampling=make_record("a").job.sampling,
    )
    return JobRecord(job.job_id("f1"), job, 1, 3)


def line_of(record: JobRecord, run: Run, text: str = TEXT, **others: Any) -> dict[str, Any]:
    return success_line(
        *(record, "run-1", text, "length"),
        **{"model": 'a "model"', "system_fingerprint": run.manifest.fingerprint} | others,
        token_ids=np.arange(5, dtype=np.uint32),
        metrics={"speed": 1e-7, "mean": 2.5, "none": float("nan"), "note": "é"},
    )


def make_run(uri: str) -> tuple[Run, list[JobRecord]]:
    """Make a line of every kind, one to be extended and one unfinished."""
    run = Run.planned(uri, MANIFEST).made()
    records = [make_record(name) for name in NAMES]
    records += [make_chat("chat"), make_chat("thought")]
    run.add_jobs(records)
    text, log, named, short, failed, _, chat, thought = records
    reasoning = Reasoning("thought, then said", "said", 2)
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "text_offset": [0]}
    lines = [line_of(text, run), line_of(named, run), line_of(chat, run, "")]
    lines += [line_of(log, run, logprobs=logprobs), line_of(thought, run, reasoning=reasoning)]
    owners = (text, named, chat, log, thought)
    run.write_segment("s", ResultSegment((each.job_id, line) for each, line in zip(owners, lines, strict=True)))
    write_result(run, short.job_id, FINISHED | {"custom_id": "short"})
    run.write_error(failed.job_id, error_line(failed, "attempts_exhausted", "why \x7f"))
    run.add_jobs([replace(text, job_id=f"{text.job_id}-longer", supersedes=text.job_id)])
    return run, records


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def parse(data: bytes, job_id: str, fingerprint: str | None) -> dict[str, Any]:
        seen.append(job_id)
        return output_line.parse_line(data, job_id, fingerprint)

    monkeypatch.setattr(error_files, "parse_line", parse)
    return seen


def test_lines_of_all_kinds_are_those_that_parsing_and_writing_makes(tmp_path: Path) -> None:
    made, _ = make_run(str(tmp_path / "run"))
    written = list(Run.open(made.store.uri).written_lines())
    assert written == [dump_line(line) for line in Run.open(made.store.uri).joined_lines()]
    assert [json.loads(line)["custom_id"] for line in written] == [*NAMES[:5], "chat", "thought"]


def test_results_in_segments_are_copied_and_not_parsed(tmp_path: Path, parsed: list[str]) -> None:
    made, records = make_run(str(tmp_path / "run"))
    assert len(list(Run.open(made.store.uri).written_lines())) == 7
    ids = {record.custom_id: record.job_id for record in records}
    assert sorted(parsed) == sorted([ids["short"], ids["failed"]])


def test_a_line_of_a_run_with_several_choices_is_one_line(tmp_path: Path) -> None:
    made, _ = make_run(str(tmp_path / "run"))
    first = make_record("many")
    jobs = [first.job.model_copy(update={"num_choices": 2, "choice_index": index}) for index in range(2)]
    choices = [JobRecord(job.job_id("f1"), job, 9, 3) for job in jobs]
    made.add_jobs(choices)
    made.write_segment("m", ResultSegment((each.job_id, line_of(each, made)) for each in choices))
    written = list(Run.open(made.store.uri).written_lines())
    assert written == [dump_line(line) for line in Run.open(made.store.uri).joined_lines()]
    assert len(json.loads(written[-1])["response"]["body"]["choices"]) == 2


FAULTS: dict[str, Callable[[bytes], bytes]] = {
    "checksum": lambda text: sealed(text).replace(b"plain", b"plaim"),
    "another job": lambda text: sealed(text.replace(b"batch_req_text", b"batch_req_test")),
    "another run": lambda text: sealed(text.replace(b'"fp_', b'"fq_')),
    "no choice": lambda text: sealed(re.sub(rb'"choices": \[.*\], "usage"', b'"choices": [], "usage"', text)),
    "no UTF-8": lambda text: sealed(text.replace(b"plain", b"\xff")),
    "another end": lambda text: sealed(text.replace(b', "error": null}', b', "error": null, "more": 1}')),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_result_that_is_not_the_job_s_is_left_out_and_told_of(tmp_path: Path, fault: str) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    record = make_record("text")
    run.add_jobs([record])
    text = dump_line(line_of(record, run))[:-1]
    segment = ResultSegment()
    segment.add_sealed(record.job_id, FAULTS[fault](text), 5)
    run.write_segment("s", segment)
    opened, other = Run.open(run.store.uri), Run.open(run.store.uri)
    assert list(opened.written_lines()) == list(other.joined_lines()) == []
    assert opened.damaged == other.damaged
    assert len(opened.damaged) == 1


@pytest.mark.parametrize("letter", ["\x7f", "\x85", "\u2028"])
def test_a_character_that_lines_must_not_have_is_escaped_though_it_was_sealed(tmp_path: Path, letter: str) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    record = make_record("text")
    run.add_jobs([record])
    line = line_of(record, run, f"a{letter}b")
    unescaped = json.dumps(line, ensure_ascii=False).encode()
    segment = ResultSegment()
    segment.add_sealed(record.job_id, sealed(unescaped), 5)
    run.write_segment("s", segment)
    assert list(Run.open(run.store.uri).written_lines()) == [dump_line(line)]
