"""Choices on a worker form one line; the first equals a single one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftbatch.jobs.input.line_parsing import JobLine
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run
from tests.worker.session.session_parts import claimed, digest, make_run, session, to_the_end, until

NUM_TOKENS = 60
NUM_CHOICES = 3
SAMPLING = {"seed": 5, "ignore_eos": True}


def records_of(num_choices: int) -> list[JobRecord]:
    line = JobLine("fox", ("the quick brown fox",), None, None, SAMPLING, num_choices, NUM_TOKENS)
    return [JobRecord(job.job_id("f"), job, 1, 5) for job in line.jobs([NUM_TOKENS])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[str]:
    """The digests by plain decoding, the first as the only choice."""
    run = make_run(tmp_path_factory.mktemp("undisturbed") / "run")
    jobs = [*records_of(1), *records_of(NUM_CHOICES)[1:]]
    run.add_jobs(jobs)
    worker = session(run, tiny_model, engine="autoregressive")
    for job in jobs:
        to_the_end(worker, claimed(run, job))
    return [digest(run, job) for job in jobs]


def lines(run: Run) -> list[dict[str, object]]:
    run.write_output()
    return [json.loads(line) for line in (run.store.read("output.jsonl") or b"").splitlines()]


def test_choices_beside_each_other_are_lost_and_resumed_one_by_one_and_each_has_its_own_tokens(
    tmp_path: Path, tiny_model: Path, undisturbed: list[str]
) -> None:
    run, jobs = make_run(tmp_path / "run"), records_of(NUM_CHOICES)
    run.add_jobs(jobs)
    first = session(run, tiny_model)
    until(first, jobs[1], 20, *(claimed(run, job) for job in jobs))
    del first  # as by a kill
    second = session(run, tiny_model)
    for job in reversed(jobs):
        assert lines(run) == []
        assert to_the_end(second, claimed(run, job)).of("finished")
    assert [digest(run, job) for job in jobs] == undisturbed
    assert len(set(undisturbed)) == NUM_CHOICES
    [line] = lines(run)
    body = line["response"]["body"]  # type: ignore[index]
    assert [choice["token_ids_sha256"] for choice in body["choices"]] == undisturbed
    assert body["usage"]["completion_tokens"] == NUM_CHOICES * NUM_TOKENS
    assert all(choice["metrics"]["num_attempts"] == 2 for choice in body["choices"])
