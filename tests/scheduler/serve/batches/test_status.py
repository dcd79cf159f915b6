"""A batch's status follows from its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.scheduler.serve.batches.batch_ending import ask_to_cancel, settle
from swiftbatch.scheduler.serve.records.batch_status import Status, Watcher
from swiftbatch.scheduler.serve.records.server_records import ENDED, Counts, delivered_file_id
from swiftbatch.scheduler.serve.records.stored_objects import Batch
from tests.scheduler.commands.command_parts import finish
from tests.scheduler.serve.batch_parts import Folder, cancel, submit, submit_two
from tests.scheduler.serve.server_parts import request


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "runs"))


def status(folder: Folder, batch: Batch) -> Status:
    return Watcher(folder.found(batch)).status()


def settled(folder: Folder, batch: Batch) -> Status:
    new = folder.again()
    assert settle(new.batches, new.files, new.batches.get(batch.id, None), None)
    return status(folder, batch)


def lines(folder: Folder, file_id: str | None) -> list[dict[str, Any]]:
    files = folder.again().files
    data = b"".join(files.content(files.get(file_id, None)))
    return [json.loads(line) for line in data.splitlines()]


def test_a_batch_is_validating_until_all_its_lines_are_in_the_run(
    folder: Folder, tiny_model: Path, tmp_path: Path
) -> None:
    batch = folder.create()
    assert status(folder, batch) == Status("validating")
    run = submit_two(batch, tiny_model, tmp_path, 0)
    (Path(run.store.uri) / "rejects.jsonl").rename(tmp_path / "rejects.jsonl")
    assert status(folder, batch) == Status("validating")


def test_a_batch_is_in_progress_then_finalizing_and_counts_lines(
    folder: Folder, tiny_model: Path, tmp_path: Path
) -> None:
    batch = folder.create()
    run = submit_two(batch, tiny_model, tmp_path, 1)
    found = status(folder, batch)
    assert (found.state, found.counts) == ("in_progress", Counts(total=3, completed=1, failed=1))
    assert found.in_progress == run.manifest.created
    cancel(batch)
    assert status(folder, batch).state == "cancelling"
    (Path(batch.store.uri) / "cancel.json").unlink()
    finish(run, "b", "text of b")
    found = status(folder, batch)
    assert (found.state, found.counts, found.finalizing is not None) == (
        "finalizing",
        Counts(total=3, completed=2, failed=1),
        True,
    )
    found = settled(folder, batch)
    assert (found.state, found.counts) == ("completed", Counts(total=3, completed=2, failed=1))
    assert [line["custom_id"] for line in lines(folder, found.output_file_id)] == ["a", "b"]
    assert [line["error"]["line"] for line in lines(folder, found.error_file_id)] == [3]


@pytest.mark.parametrize(("state", "code"), [("cancelled", "batch_cancelled"), ("expired", "batch_expired")])
def test_a_batch_that_is_given_up_delivers_what_is_finished(
    state: str, code: str, folder: Folder, tiny_model: Path, tmp_path: Path
) -> None:
    batch = folder.create(seconds=0 if state == "expired" else 3600)
    submit_two(batch, tiny_model, tmp_path, 1)
    if state == "cancelled":
        cancel(batch)
    found = settled(folder, batch)
    assert (found.state, found.counts) == (state, Counts(total=3, completed=1, failed=2))
    assert [line["custom_id"] for line in lines(folder, found.output_file_id)] == ["a"]
    failed = lines(folder, found.error_file_id)
    assert [(line["custom_id"], line["error"]["code"]) for line in failed] == [("b", code), (None, "invalid_json_line")]


@pytest.mark.parametrize(("state", "code"), [("cancelled", "batch_cancelled"), ("expired", "batch_expired")])
def test_a_batch_whose_only_missing_texts_are_choices_of_a_line_is_given_up_all_the_same(
    state: str, code: str, folder: Folder, tiny_model: Path, tmp_path: Path
) -> None:
    batch = folder.create(seconds=0 if state == "expired" else 3600)
    finish(submit(batch, tiny_model, tmp_path, request("a", n=2)), "a", "text of the first choice")
    if state == "cancelled":
        cancel(batch)
    found = settled(folder, batch)
    assert (found.state, found.counts) == (state, Counts(total=1, completed=1))
    [line] = lines(folder, found.output_file_id)
    [failed] = line["response"]["body"]["failed_choices"]
    assert (failed["index"], failed["error"]["code"]) == (1, code)


@pytest.mark.parametrize("state", ["cancelled", "expired", "completed"])
def test_an_end_that_a_kill_cut_off_is_begun_anew_with_the_same_outcome(
    state: str, folder: Folder, tiny_model: Path, tmp_path: Path
) -> None:
    batch = folder.create(seconds=0 if state == "expired" else 3600)
    submit_two(batch, tiny_model, tmp_path, 2 if state == "completed" else 1)
    if state == "cancelled":
        cancel(batch)
    first = settled(folder, batch)
    ids = (first.output_file_id, first.error_file_id)
    assert ids == (delivered_file_id(batch.id, "output"), delivered_file_id(batch.id, "errors"))
    before = [lines(folder, file_id) for file_id in ids]
    (Path(batch.store.uri) / ENDED).unlink()
    again = settled(folder, batch)
    assert (again.state, again.counts) == (first.state, first.counts) == (state, first.counts)
    assert [lines(folder, file_id) for file_id in ids] == before
    assert len(folder.again().files.all()) == 3  # with the input


def test_a_batch_of_bad_lines_alone_fails_with_their_numbers(folder: Folder, tiny_model: Path, tmp_path: Path) -> None:
    batch = folder.create()
    submit(batch, tiny_model, tmp_path, "{torn", "[]")
    found = settled(folder, batch)
    assert (found.state, found.counts) == ("failed", Counts(total=2, failed=2))
    assert [problem.line for problem in found.problems] == [1, 2]


def test_a_batch_that_was_cancelled_before_it_ran_has_no_lines(folder: Folder) -> None:
    batch = folder.create()
    cancel(batch)
    assert settled(folder, batch).state == "cancelled"
    late = folder.create(seconds=0)
    new = folder.again()
    assert not settle(new.batches, new.files, new.batches.get(late.id, None), None), "its lines are yet to be named"


def test_of_a_batch_that_has_ended_nothing_else_is_read(folder: Folder, tiny_model: Path, tmp_path: Path) -> None:
    batch = folder.create()
    submit_two(batch, tiny_model, tmp_path, 2)
    before = settled(folder, batch)
    for path in Path(batch.store.uri).iterdir():
        if path.name not in ("batch.json", ENDED):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert status(folder, batch) == before


def test_a_running_batch_is_read_once_a_second(
    folder: Folder, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = folder.create()
    submit_two(batch, tiny_model, tmp_path, 1)
    watcher, now = Watcher(batch), [1000.0]
    monkeypatch.setattr("swiftbatch.scheduler.serve.records.batch_status.time.monotonic", lambda: now[0])
    first = watcher.status()
    assert all(watcher.status() is first for _ in range(100))
    now[0] += 1
    assert watcher.status() is not first


class Driver:
    def __init__(self, has_begun: bool) -> None:
        self.has_begun = has_begun
        self.is_asked_to_end = False

    def ask_to_end(self) -> None:
        self.is_asked_to_end = True


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_driver_that_starts_ray_is_ended_by_a_cancellation_and_one_at_work_cancels_its_jobs(
    has_begun: bool, folder: Folder, tiny_model: Path, tmp_path: Path
) -> None:
    batch = folder.create()
    run = submit_two(batch, tiny_model, tmp_path, 1)
    driver = Driver(has_begun)
    ask_to_cancel(batch, driver)
    assert driver.is_asked_to_end is not has_begun
    assert len(run.ended()[1]) == has_begun  # nobody holds the run, so the job is cancelled at once
