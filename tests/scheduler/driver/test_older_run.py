"""A run folder that an older version has begun is read as before, and goes on to no other text: it loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.queue_loading import load_queue
from tests.scheduler.commands.command_parts import invoke
from tests.scheduler.driver.older_jobs import write_older_run

NAMES = ["done", "half", "urgent", "failed", "pair[0]", "pair[1]", "short"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    write_older_run(tmp_path / "run")
    return Run.open(str(tmp_path / "run"))


def test_jobs_of_older_tables_are_queued_as_they_stand(run: Run) -> None:
    queue = load_queue(run, 5)
    assert queue.counts() == {"pending": 5, "running": 0, "finished": 1, "failed": 1, "cancelled": 0}
    assert queue.num_generated_tokens == 40 + 30
    taken = [entry for _ in range(6) if (entry := queue.take("w1", 0.0)) is not None]
    assert [entry.name for entry in taken] == ["urgent", "half", "pair[0]", "pair[1]", "short"]
    assert [queue.num_shared_tokens(entry.job_id) for entry in taken] == [0, 0, 128, 128, 0]
    assert run.longest_job() == 61


def test_attempts_of_an_older_run_are_counted_on_above_their_numbers(run: Run) -> None:
    attempts = Attempts(run.store, 2, {})
    load_queue(run, 5, attempts)
    ids = {record.job.name: record.job_id for record in run.jobs()}
    assert CheckpointStore.of(run).attempts(ids["half"]) == [1, 2]
    assert attempts.begin(ids["half"]) == (2_000_001, 3)
    assert attempts.begin(ids["urgent"]) == (2_000_001, 1)


def test_each_job_of_older_tables_is_handed_out_as_it_was_written(run: Run) -> None:
    records = {record.job_id: record for record in run.jobs()}
    assert [record.job.name for record in records.values()] == NAMES
    queue = load_queue(run, 5)
    bodies = run.job_bodies(queue.places())
    while (entry := queue.take("w1", 0.0)) is not None:
        assert bodies.sent(entry).read().job == records[entry.job_id].job
        assert entry.max_tokens == records[entry.job_id].job.sampling.max_tokens
    run.add_jobs(list(records.values()))
    assert len(run.store.list("jobs")) == 2  # none was new


def contents(run: Run) -> dict[str, bytes]:
    """All files of a run but for the heartbeat."""
    folder = Path(run.store.uri)
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != "progress.json"}


def test_an_older_run_is_read_as_before(run: Run) -> None:
    lines = [json.loads(line) for line in invoke("results", run.store.uri).stdout.splitlines()]
    assert [line["custom_id"] for line in lines] == ["done", "failed", "short"]
    assert "5 pending" in invoke("status", run.store.uri).stdout
    assert json.loads(invoke("status", run.store.uri, "--json").stdout)["clock"] is None


@pytest.mark.parametrize(
    "command",
    [("resume",), ("resume", "--retry-failed"), ("extend", "--max-tokens", "100")],
)
def test_an_older_run_does_not_go_on_with_another_text_and_loses_nothing(run: Run, command: tuple[str, ...]) -> None:
    before = contents(run)
    result = invoke(*command, run.store.uri)
    assert result.exit_code == 2
    told = f"swiftbatch: the run at {run.store.uri} was made by swiftbatch "
    assert result.stderr.splitlines()[-1].startswith(told)
    assert "its results stay: submit the same file to a new run folder" in result.stderr
    after = contents(run)
    assert {name for name in before if name.startswith(("results", "jobs", "errors", "run.json"))} <= after.keys()
    assert all(after[name] == before[name] for name in before if not name.startswith("checkpoints/workers"))
