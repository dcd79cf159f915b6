"""An `extend` killed between any two changes loses and blocks nothing."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.driver import run_lease
from swiftbatch.scheduler.driver.queue_loading import load_queue
from swiftbatch.scheduler.driver.run_lease import RunTakenError
from swiftbatch.scheduler.process.process_id import own_key
from swiftbatch.scheduler.runs.extension import kept_of, prune
from tests.jobs.checkpoints.checkpoint_parts import claim
from tests.scheduler.commands.command_parts import job, write_jobs
from tests.scheduler.commands.submit_parts import submit_file
from tests.scheduler.runs.extension_parts import extend, finish
from tests.scheduler.runs.test_killed_submit import Files, States, put

pytestmark = pytest.mark.long

NAMES = ["a", "b[0]", "b[1]"]
MOMENTS = 30  # the least number of them


def ended_run(uri: str, folder: Path, model: Path) -> Run:
    """Make two lines with three jobs that ended at 20 tokens; job a has a kept state."""
    path = write_jobs(folder / "jobs.jsonl", job("a"), job("b", n=2))
    run = submit_file(path, uri, model=str(model)).run
    for record in run.jobs():
        finish(run, record)
    claim(CheckpointStore.of(run), run.jobs()[0].job_id, "w1")
    return run


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a kill leaves what was written
    return ended_run(str(tmp_path / "run"), tmp_path, tiny_model)


@contextlib.contextmanager
def as_a_process_that_is_no_more() -> Iterator[pytest.MonkeyPatch]:
    key = own_key()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_lease, "own_key", lambda: key.model_copy(update={"start_ticks": key.start_ticks - 1}))
        yield patch


def lengths(run: Run) -> list[int]:
    bodies = [line["response"]["body"] for line in run.joined_lines()]
    return [choice.get("usage", body["usage"])["completion_tokens"] for body in bodies for choice in body["choices"]]


def check(uri: str, model: Path, max_tokens: int) -> None:
    run = Run.open(uri)
    assert lengths(run) == [20, 20, 20]
    extend(run, model, max_tokens)
    queue = load_queue(run, 5)
    assert sorted(job.name for job in queue.jobs(queue.unfinished())) == NAMES
    records = {record.job_id: record for record in run.jobs()}
    for job_id in queue.unfinished():
        assert queue.find(job_id).num_generated_tokens == 20
        assert CheckpointStore.of(run).attempts(job_id) == [1]
        finish(run, records[job_id])
    extend(run, model, max_tokens)
    assert lengths(run) == [max_tokens] * 3
    assert [record.job.name for record in run.jobs()] == NAMES
    assert [record.line_number for record in run.jobs()] == [1, 2, 2]


def test_a_kill_at_every_moment_of_extend_loses_nothing_and_the_same_command_completes_it(
    run: Run, tmp_path: Path, tiny_model: Path
) -> None:
    states = States()
    with as_a_process_that_is_no_more() as patch:
        states.watch_disk(Path(run.store.uri), patch)
        extend(run, tiny_model, 30)
    moments: list[Files] = list(states.seen.values())
    assert len(moments) >= MOMENTS
    for number, files in enumerate(moments):
        put(files, f"{tmp_path}/copy-{number}")
        check(f"{tmp_path}/copy-{number}", tiny_model, 30)


def test_another_limit_after_a_kill_before_the_jobs_were_added_takes_them_there(run: Run, tiny_model: Path) -> None:
    with as_a_process_that_is_no_more() as patch:
        patch.setattr(Run, "add_jobs", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            extend(run, tiny_model, 30)
    check(run.store.uri, tiny_model, 25)


def test_in_an_object_store_jobs_go_on_as_well_and_what_is_kept_is_dropped(
    s3_uri: str, tmp_path: Path, tiny_model: Path
) -> None:
    run = ended_run(f"{s3_uri}/run", tmp_path, tiny_model)
    assert len(kept_of(run).states) == 1
    check(f"{s3_uri}/run", tiny_model, 30)
    for record in run.jobs():
        # finished here without a worker, which would clear it
        assert CheckpointStore.of(run).attempts(record.job_id) == [1]
    assert prune(run, logs=True, state=True).startswith("freed ")
    assert (kept_of(run).logs, kept_of(run).states) == ({}, {})


def test_of_two_at_once_one_extends_and_the_other_is_refused(run: Run, tiny_model: Path) -> None:
    ends: list[object] = []
    start = threading.Barrier(2)

    def one(max_tokens: int) -> None:
        start.wait()
        try:
            ends.append(len(extend(Run.open(run.store.uri), tiny_model, max_tokens).records))
        except RunTakenError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=one, args=(max_tokens,)) for max_tokens in (30, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.job.name for record in run.jobs()] == NAMES
    assert len({record.job.sampling.max_tokens for record in run.jobs()}) == 1
    assert ends.count(3) == 1  # the other was refused, or found jobs that have not ended
