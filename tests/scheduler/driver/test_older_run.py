"""A run folder that an older version has begun goes on: no job is lost, none runs twice, and all have their tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.output_line import tokens_sha256
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.cluster.ray_cluster import Cluster
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.queue_loading import load_queue
from tests.scheduler.driver.driver_parts import RecordingDisplay, make_driver
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


@pytest.mark.ray
def test_an_older_run_ends_with_the_tokens_that_it_would_have_had(run: Run, cluster: Cluster) -> None:
    assert make_driver(run, cluster, RecordingDisplay()).run() == "finished"
    lines = {record.job.name: run.result(record.job_id) for record in run.jobs()}
    assert [name for name, line in lines.items() if line is None] == ["failed"]
    half = lines["half"]
    assert half is not None
    token_ids = list(range(7, 37))  # of the log, and then as the session counts: ten a slice
    for number in range(30):
        token_ids.append(7 + len(token_ids) + number % 10)
    [choice] = half["response"]["body"]["choices"]
    assert choice["token_ids_sha256"] == tokens_sha256(np.array(token_ids, np.uint32))
    metrics = half["response"]["body"]["metrics"]
    assert (metrics["num_attempts"], metrics["num_recovered_tokens"]) == (3, 30)
    assert len((Path(run.store.uri) / "output.jsonl").read_bytes().splitlines()) == 6  # a line for each input line
