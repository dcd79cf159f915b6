"""The order in which jobs begin, from lines and later submissions."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import PRIORITIES, Run
from swiftbatch.scheduler.driver.queue_loading import load_queue
from tests.scheduler.commands.command_parts import job, write_jobs
from tests.scheduler.commands.submit_parts import submit_file


def order(run: Run) -> list[str]:
    queue = load_queue(run, 5)
    taken = iter(lambda: queue.take("w1", 0.0), None)
    return [entry.name for entry in taken]


def submit(folder: Path, model: Path, *lines: dict[str, object]) -> Run:
    submitted = submit_file(write_jobs(folder / "jobs.jsonl", *lines), str(folder / "run"), model=str(model))
    assert submitted.rejects == []
    assert submitted.without_effect == {}
    return submitted.run


def test_a_line_with_a_lower_priority_begins_before_longer_ones(tmp_path: Path, tiny_model: Path) -> None:
    lines = [job("a", 30), job("b", 10, priority=-1), job("c", 50, priority=3, n=2), job("d", 20, priority=None)]
    assert order(submit(tmp_path, tiny_model, *lines)) == ["b", "a", "d", "c[0]", "c[1]"]


def test_the_same_line_with_another_priority_is_the_same_job_and_the_newest_one_counts(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = submit(tmp_path, tiny_model, job("a", 30, priority=1), job("b", 10, priority=2), job("c", 20))
    job_ids = run.job_ids()
    assert order(run) == ["c", "a", "b"]
    assert order(submit(tmp_path, tiny_model, job("a", 30), job("c", 20, priority=9))) == ["a", "b", "c"]
    assert run.priorities() == {"b": 2, "c": 9}  # lines that the file lacks keep their priority
    assert run.job_ids() == job_ids


def test_a_run_without_priorities_keeps_none_and_a_damaged_file_stops_nothing(tmp_path: Path, tiny_model: Path) -> None:
    run = submit(tmp_path, tiny_model, job("a", 10), job("b", 30))
    assert not run.store.exists(PRIORITIES)
    run.store.write(PRIORITIES, b"{torn")
    assert order(run) == ["b", "a"]
    submit(tmp_path, tiny_model, job("a", 10, priority=-2))
    assert order(run) == ["a", "b"]


@pytest.mark.parametrize("value", [1.5, "high", True, 2**63, -(2**63) - 1])
def test_what_is_no_whole_number_of_64_bits_is_a_rejected_line(value: object, tmp_path: Path, tiny_model: Path) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", job("a", priority=value), job("b", priority=-(2**63)))
    submitted = submit_file(path, str(tmp_path / "run"), model=str(tiny_model))
    (reject,) = submitted.rejects
    assert reject.line_number == 1
    assert "priority" in reject.reason
    assert "found" in reject.reason
    assert list(submitted.jobs.custom_ids()) == ["b"]
