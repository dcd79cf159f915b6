"""Attempt numbers are unique and counted under any kill."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.scheduler.driver.attempt_numbers import FOLDER, Attempts, forget_strikes
from swiftbatch.scheduler.driver.queued_job import Strikes
from tests.scheduler.driver.dispatch_parts import with_driver

SECONDS = 60  # until a test gives up


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def kept(attempts: Attempts) -> None:
    attempts.keep()
    attempts._pool.submit(lambda: None).result(SECONDS)


def test_drivers_give_no_number_twice_and_a_later_one_gives_greater_ones(store: Store) -> None:
    first, second = Attempts(store, 1, {}), Attempts(store, 2, {})
    numbers = [attempts.begin("job")[0] for attempts in (first, first, second, second)]
    assert numbers == sorted(set(numbers))
    assert first.begin("job")[0] < numbers[2]  # believed dead, it hands the job out again


def test_files_of_a_later_epoch_from_elsewhere_give_no_number_twice(store: Store) -> None:
    """The run's `drivers/` was deleted, and the first driver's worker continues meanwhile."""
    there = [9_000_003]
    numbers = []
    for epoch in (1, 2, 3):
        attempts = Attempts(store, epoch, {})
        attempts.note_found("job", there)
        numbers += [attempts.begin("job")[0], attempts.begin("job")[0]]
        if epoch == 2:
            there = [9_000_003, numbers[-1]]  # the first driver's left no file
    assert [*there[:1], *numbers] == sorted({*there[:1], *numbers})


def test_attempts_that_leave_no_file_are_counted_over_drivers(store: Store) -> None:
    first = Attempts.read(store, 1)
    assert [first.begin("kills")[1], first.begin("kills")[1], first.begin("done")[1]] == [1, 2, 1]
    first.finish("done")
    kept(first)
    second = Attempts.read(store, 2)
    assert second.begin("kills") == (2_000_001, 3)
    assert list(second.counted()) == ["kills"]
    assert Attempts.read(store, 3).count("kills") == 2  # the second driver was killed before any write
    kept(second)
    assert store.list(FOLDER) == ["0002.json"]
    assert Attempts.read(store, 3).count("kills") == 3


def test_strikes_are_kept_over_drivers_until_a_job_finishes(store: Store) -> None:
    first = Attempts.read(store, 1)
    for job_id in ("kills", "other"):
        first.begin(job_id)
    kept(first)
    first.note_strikes("kills", Strikes(2, 30))
    first.note_strikes("other", Strikes(1, 0))
    kept(first)
    second = Attempts.read(store, 2)
    assert [second.strikes(job_id) for job_id in ("kills", "other", "third")] == [(2, 30, 1), (1, 0, 1), None]
    second.note_strikes("kills", None)
    second.finish("other")
    kept(second)
    third = Attempts.read(store, 3)
    assert third.strikes("kills") is third.strikes("other") is None
    assert third.count("kills") == 1


def test_nothing_is_kept_of_a_run_whose_jobs_have_all_finished(store: Store) -> None:
    attempts = Attempts.read(store, 1)
    attempts.begin("job")
    kept(attempts)
    attempts.finish("job")
    attempts.end()
    assert store.list(FOLDER) == []


def test_a_damaged_file_is_named_and_the_one_before_counts(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    attempts = Attempts.read(store, 1)
    attempts.begin("job")
    kept(attempts)
    store.write(f"{FOLDER}/0002.json", store.read(f"{FOLDER}/0001.json").replace(b":1", b":7"))
    assert Attempts.read(store, 3).count("job") == 1
    assert f"skipped {FOLDER}/0002.json" in caplog.text


def test_the_loop_goes_on_while_a_store_takes_long_for_the_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatched, driver = with_driver(tmp_path / "run", num_jobs := 6, monkeypatch)
    write, all_handed_out, count = Store.write, threading.Event(), dispatched.count
    waited = []

    def slowly(store: Store, path: str, data: bytes) -> None:
        if path.startswith(FOLDER):
            waited.append(all_handed_out.wait(SECONDS))
        write(store, path, data)

    def counted() -> None:
        count()
        if dispatched.num_handed_out == num_jobs:
            all_handed_out.set()

    monkeypatch.setattr(Store, "write", slowly)
    monkeypatch.setattr(dispatched, "count", counted)
    driver._context.attempts.begin("another")
    driver._context.attempts.keep()
    assert driver.run() == "finished"
    assert waited[0]


def test_a_store_that_fails_for_good_stops_the_loop(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(store: Store, path: str, data: bytes) -> None:
        raise StoreError("cannot write")

    monkeypatch.setattr(Store, "write", broken)
    attempts = Attempts.read(store, 1)
    attempts.begin("job")
    kept(attempts)
    with pytest.raises(StoreError, match="cannot write"):
        attempts.keep()


def test_a_job_that_is_tried_again_gets_all_its_attempts_wherever_its_driver_died(store: Store) -> None:
    """The driver was killed between the job's error and its next heartbeat."""
    killed = Attempts(store, 1, {})
    for job_id in ("failed", "other"):
        killed.begin(job_id)
        killed.note_strikes(job_id, Strikes(4, 10))
    kept(killed)
    forget_strikes(store, 2, {"failed", "unknown"})
    found = Attempts.read(store, 2)
    assert (found.strikes("failed"), found.strikes("other")) == (None, Strikes(4, 10))
    assert (found.count("failed"), found.count("other")) == (1, 1)
