"""A job costs a driver as much among thousands as among hundreds."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftbatch.scheduler.driver.queue_loading import load_queue
from tests import ROOT
from tests.scheduler.driver.dispatch_parts import Dispatched, ask_status, dispatch, with_driver
from tests.work_counts import counted_calls

pytestmark = pytest.mark.ray

FEW, MANY = 500, 1_500
NUM_WAITING = 600  # jobs whose memory is measured
MOST_CALLS_PER_JOB = 20  # twice what is needed, to count ended jobs in a folder
BYTES_PER_DONE_JOB = 500  # its id and its result's place, to write the output
BYTES_OF_LENGTHS = 300_000  # tables of expected lengths, for any number of jobs
CALLS_FOR_A_LOOK = 4  # least calls per job; a heartbeat meanwhile takes 800 in all
SAME = 1.5  # cost among many over cost among few; visiting every job makes it almost 3


@pytest.fixture(scope="module")
def few_and_many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Dispatched, Dispatched]]:
    with pytest.MonkeyPatch.context() as patch:
        dispatch(tmp_path_factory.mktemp("first"), FEW, patch)  # imports and first uses
        few = dispatch(tmp_path_factory.mktemp("few"), FEW, patch)
        yield few, dispatch(tmp_path_factory.mktemp("many"), MANY, patch)


def test_a_job_is_as_much_work_for_the_driver_among_many_as_among_few(
    few_and_many: tuple[Dispatched, Dispatched],
) -> None:
    few, many = few_and_many
    assert many.calls_per_job() < SAME * few.calls_per_job()


def own_bytes() -> int:
    """Return the bytes held by lines of swiftbatch."""
    gc.collect()
    own = [tracemalloc.Filter(True, f"{ROOT}/swiftbatch/*")]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(own).traces)


def test_a_driver_keeps_nothing_of_jobs_that_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracemalloc.start()
    try:
        _, driver = with_driver(tmp_path / "run", NUM_WAITING, monkeypatch)
        num_bytes_waiting = own_bytes()
        driver.run()
        num_bytes_done = own_bytes()
    finally:
        tracemalloc.stop()
    waiting, done = (num_bytes / NUM_WAITING for num_bytes in (num_bytes_waiting, num_bytes_done))
    print(f"\n{waiting:,.0f} bytes per waiting job, {done:,.0f} per job that is done")
    assert num_bytes_done < BYTES_OF_LENGTHS + NUM_WAITING * BYTES_PER_DONE_JOB


def test_status_answers_while_thousands_of_jobs_run_and_after(few_and_many: tuple[Dispatched, Dispatched]) -> None:
    few, many = few_and_many
    assert many.status["state"] == "running"
    assert many.num_status_calls - few.num_status_calls < (MANY - FEW) * CALLS_FOR_A_LOOK / 2  # at half of the jobs
    num_calls, status = ask_status(many.run)
    assert num_calls < MANY * MOST_CALLS_PER_JOB
    assert status["state"] == "finished"
    assert status["jobs"]["finished"] == MANY
    assert status["num_generated_tokens"] == sum(8 + i % 50 for i in range(MANY))


def test_status_counts_thousands_of_jobs_where_no_driver_is_left_to_ask(
    few_and_many: tuple[Dispatched, Dispatched],
) -> None:
    _, many = few_and_many
    beat = many.run.progress()
    many.run.write_progress(beat.model_copy(update={"state": "running", "updated": 0.0, "jobs": {}}))
    num_calls, status = ask_status(many.run)
    many.run.write_progress(beat)
    assert num_calls < MANY * MOST_CALLS_PER_JOB
    assert status["state"] == "interrupted"
    assert status["jobs"]["finished"] == MANY


def test_a_run_of_thousands_is_taken_up_and_its_output_written_with_a_bounded_work_per_job(
    few_and_many: tuple[Dispatched, Dispatched],
) -> None:
    work_per_job = []
    for each in few_and_many:
        with counted_calls() as work:
            assert load_queue(each.run, 5).counts()["finished"] == each.num_jobs
            each.run.write_output()
        work_per_job.append(work.num_calls / each.num_jobs)
        assert each.run.store.read("output.jsonl").count(b"\n") == each.num_jobs
    few, many = work_per_job
    assert many < SAME * few
