"""Commands treat a line with choices as one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.driver.queue_loading import load_queue
from swiftbatch.scheduler.driver.run_lease import current_progress
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.jobs.checkpoints.checkpoint_parts import claim
from tests.jobs.run import run_parts
from tests.scheduler.commands.command_parts import invoke, job, pretend_to_run, refusal, write_jobs
from tests.scheduler.commands.submit_parts import submit_file


@pytest.fixture
def jobs_file(tmp_path: Path) -> str:
    return write_jobs(tmp_path / "jobs.jsonl", job("one"), job("many", n=3), job("two", prompt=["fox", "dog"]))


def finish(run: Run, record: JobRecord) -> None:
    assert run_parts.finish(run, record, f"text {record.job.choice_index}", 4, num_drafts=1)


def test_the_same_file_again_adds_nothing_and_another_number_of_choices_is_refused(run: Run, tmp_path: Path) -> None:
    jobs = run.jobs()
    assert [record.job.name for record in jobs] == ["one", "many[0]", "many[1]", "many[2]", "two[0]", "two[1]"]
    assert [record.line_number for record in jobs] == [1, 2, 2, 2, 3, 3]
    again = submit_file(str(tmp_path / "jobs.jsonl"), run.store.uri)
    assert (again.rejects, again.run.jobs()) == ([], jobs)
    changed = write_jobs(tmp_path / "changed.jsonl", job("many", n=4), job("one", n=2), job("new", n=2))
    submission = submit_file(changed, run.store.uri)
    assert [(reject.line_number, reject.custom_id) for reject in submission.rejects] == [(1, "many"), (2, "one")]
    assert [record.job.name for record in submission.run.jobs()[6:]] == ["new[0]", "new[1]"]


def test_a_custom_id_is_a_duplicate_whatever_choices_it_has(tmp_path: Path, tiny_model: Path) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", job("a", n=2), job("a", n=2), job("a"))
    submission = submit_file(path, str(tmp_path / "run"), model=str(tiny_model))
    assert [reject.line_number for reject in submission.rejects] == [2, 3]
    assert len(submission.jobs) == 2


def test_results_are_one_line_for_each_input_line_that_is_whole(run: Run) -> None:
    one, *many, _, last = run.jobs()
    for record in (last, *many, one):
        finish(run, record)
    found = [json.loads(line) for line in invoke("results", run.store.uri).stdout.splitlines()]
    assert [(line["custom_id"], len(line["response"]["body"]["choices"])) for line in found] == [
        ("one", 1),
        ("many", 3),
    ]
    counts = json.loads(invoke("status", run.store.uri, "--json").output)["jobs"]
    assert (counts["finished"], counts["pending"]) == (5, 1)


def test_a_line_is_cancelled_with_all_its_choices_and_those_that_are_finished_stay(run: Run) -> None:
    finish(run, run.jobs()[1])
    assert "cancelled job many" in invoke("cancel", run.store.uri, "many").output
    assert "ended already" in invoke("cancel", run.store.uri, "many").output
    (line,) = [json.loads(line) for line in invoke("results", run.store.uri).stdout.splitlines()]
    body = line["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0]
    assert [(each["index"], each["error"]["code"]) for each in body["failed_choices"]] == [
        (1, "cancelled"),
        (2, "cancelled"),
    ]
    assert "cancelled job two" in invoke("cancel", run.store.uri, "two").output
    error = json.loads(invoke("results", run.store.uri).stdout.splitlines()[1])["error"]
    assert error == {"code": "cancelled", "message": "all 2 choices: cancelled by its user"}


def test_a_driver_is_asked_to_cancel_every_choice_that_has_not_ended(run: Run) -> None:
    finish(run, run.jobs()[2])
    pretend_to_run(run)
    assert "asked the driver to cancel job many" in invoke("cancel", run.store.uri, "many").output
    asked = {record.job.name for record in run.jobs() if record.job_id in run.cancel_requests()[1]}
    assert asked == {"many[0]", "many[2]"}


def test_tail_shows_the_choice_that_is_asked_for(run: Run, tiny_model: Path) -> None:
    many = [record for record in run.jobs() if record.job.custom_id == "many"]
    finish(run, many[0])
    checkpoints = CheckpointStore.of(run)
    ids = np.array(TextCodec(locate_model(str(tiny_model))).encode("the lazy dog"), dtype=np.uint32)
    checkpoints.write_tokens(many[2].job_id, claim(checkpoints, many[2].job_id, "w1"), ids)
    assert invoke("tail", run.store.uri, "many").output == "text 0\n"
    assert invoke("tail", run.store.uri, "many", "--choice", "2").output == "the lazy dog\n"
    assert "no choice 3 of job 'many': expected one of its 3" in refusal("tail", run.store.uri, "many", "--choice", "3")
    assert "no choice 1 of job 'one'" in refusal("tail", run.store.uri, "one", "--choice", "1")


def test_each_choice_goes_on_from_its_own_tokens(run: Run) -> None:
    many = [record for record in run.jobs() if record.job.custom_id == "many"]
    progress = current_progress(run).model_copy(update={"running": {"many[1]": 7, "many[2]": 9, "many": 11}})
    run.write_progress(progress)
    queue = load_queue(run, 5)
    assert [queue.find(record.job_id).num_generated_tokens for record in many] == [0, 7, 9]


def test_the_report_has_every_choice_by_its_name(run: Run, tmp_path: Path) -> None:
    for record in run.jobs()[:3]:
        finish(run, record)
    page = tmp_path / "report.html"
    assert "report of 6 jobs" in invoke("report", run.store.uri, "--output", str(page)).output
    text = page.read_text()
    assert all(f"<bdi>{name}</bdi>" in text for name in ("one", "many[0]", "many[1]", "two[1]"))
