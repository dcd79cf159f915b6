"""Each job stays in one shard under kills and takeovers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from swiftbatch.jobs.run import shards
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.shards import DATA, Shards
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.scheduler.driver.run_lease import RunLease, RunTakenError
from swiftbatch.scheduler.driver.shard_writing import finish_shards
from tests.jobs.shards.shard_parts import all_rows, fail, files, finish, job_ids, leftovers, make_run, shards_of
from tests.scheduler.runs.test_killed_extend import as_a_process_that_is_no_more
from tests.scheduler.runs.test_killed_submit import Files, States, put

pytestmark = pytest.mark.long

LINES = {"a": 1, "b": 2, "c": 1, "d": 1, "e": 1}
MOMENTS = {"disk": 25, "s3": 10}  # the least number of them


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a kill leaves what was written


def drive(uri: str) -> None:
    """Write shards when five of six jobs have ended, and at the end, with one failed."""
    run = Run.open(uri)
    *most, last = run.jobs()
    with RunLease(run) as hold:
        finish(run, *most)
        finish_shards(run, hold.epoch, is_end=False)
        fail(run, last)
        finish_shards(run, hold.epoch, is_end=True)


def go_on(uri: str) -> None:
    run = Run.open(uri)
    with RunLease(run) as hold:
        ended = set().union(*run.ended())
        finish(run, *(record for record in run.jobs() if record.job_id not in ended))
        finish_shards(run, hold.epoch, is_end=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("place", "kind", "step"), [("disk", "parquet:2", 2), ("disk", "jsonl:2", 5), ("s3", "jsonl:2", 6)]
)
def test_after_a_kill_at_any_moment_the_next_driver_completes_the_shards(
    place: str, kind: str, step: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    uri, states = str(tmp_path) if place == "disk" else str(request.getfixturevalue("s3_uri")), States()
    run = make_run(f"{uri}/run", LINES, kind)
    with as_a_process_that_is_no_more() as patch:
        if place == "disk":
            states.watch_disk(tmp_path / "run", patch)
        else:
            paths = [name for name in run.store.list("") if run.store.exists(name)]
            states.watch_objects({path: run.store.read(path) or b"" for path in paths}, patch)
        drive(f"{uri}/run")
    moments: list[Files] = [state for state in states.seen.values() if "shards.json" in state and "run.json" in state]
    assert len(moments) >= MOMENTS[place]
    for number, left in enumerate(moments[::step]):
        copy = f"{uri}/copy-{number}"
        put(left, copy)
        before = files(Store(copy))
        go_on(copy)
        store = Store(copy)
        assert {name: files(store)[name] for name in before} == before
        assert sorted(job_ids(all_rows(store))) == sorted(record.job_id for record in Run.open(copy).jobs())
    assert leftovers(tmp_path / "copy-0") == []


class Interrupted:
    """Calls something before the `number`th operation of a driver on a store or claim."""

    def __init__(self, number: int, call: Callable[[], None]) -> None:
        self.left, self._call = number, call

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            self._call()

    def watch(self, shards: Shards, patch: pytest.MonkeyPatch, has_exclusive_create: bool) -> None:
        store = shards._run.store
        for name in ("write_new", "write_new_from", "read", "sizes", "list", "exists"):
            real = getattr(store, name)

            def stepped(*args: Any, real: Callable[..., Any] = real) -> Any:
                self.step()
                return real(*args)

            patch.setattr(store, name, stepped)
        if not has_exclusive_create:  # as in an object store, where both look before either writes

            def overwrite(path: str, source: BinaryIO) -> None:
                self.step()
                store.write_from(path, source)

            patch.setattr(store, "write_new_from", overwrite)


def overtaken(run: Run, number: int, has_exclusive_create: bool) -> tuple[bool, bool]:
    """Let a second driver claim the run before the first one's `number`th step; return whether it did and the first
    noticed.
    """
    first_job, *most, last = run.jobs()
    finish(run, *most)
    is_claimed = was_noticed = False
    seen = dict[str, bytes]()

    def check() -> None:
        watching.step()
        if is_claimed:
            raise RunTakenError("taken over")

    def overtake() -> None:
        nonlocal is_claimed
        is_claimed = True
        finish(run, first_job)  # which changes all unplanned shards
        shards_of(run, 2).catch_up(is_end=False)
        seen.update(files(run.store))

    watching, first = Interrupted(number, overtake), shards_of(run, 1, check)
    with pytest.MonkeyPatch.context() as patch:
        watching.watch(first, patch, has_exclusive_create)
        try:
            first.catch_up(is_end=False)
        except RunTakenError:
            was_noticed = True
    assert {name: files(run.store)[name] for name in seen} == seen
    finish(run, first_job, last)
    shards_of(run, 3).catch_up(is_end=True)
    assert {name: files(run.store)[name] for name in seen} == seen
    assert sorted(job_ids(all_rows(run.store))) == sorted(record.job_id for record in run.jobs())
    return is_claimed, was_noticed


@pytest.mark.sample(2)
@pytest.mark.parametrize("has_exclusive_create", [True, False])
def test_a_driver_that_is_overtaken_at_any_moment_adds_nothing_and_changes_nothing(
    tmp_path: Path, has_exclusive_create: bool
) -> None:
    num_noticed = 0
    for number in itertools.count(1):
        run = make_run(str(tmp_path / f"run-{number}"), LINES, "parquet:2")
        is_claimed, was_noticed = overtaken(run, number, has_exclusive_create)
        num_noticed += was_noticed
        if not is_claimed:
            break
    assert number > 12
    assert num_noticed > 5


def test_plans_of_overtaken_drivers_do_not_count_in_whatever_order_they_come(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), LINES, "parquet:2")
    a, b0, b1, *others = run.jobs()
    finish(run, b0, b1)
    first, second = (shards_of(run, epoch, lambda: (_ for _ in ()).throw(RunTakenError("taken"))) for epoch in (1, 2))
    write, before = shards.write_plan, dict[str, bytes]()

    def write_late(store: Store, epoch: int, *planned: Any) -> None:
        if epoch != 2:
            write(store, epoch, *planned)
            return
        finish(run, a)
        with pytest.raises(RunTakenError):
            first.catch_up(is_end=False)
        shards_of(run, 3).catch_up(is_end=False)
        before.update(files(run.store))
        write(store, epoch, *planned)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "write_plan", write_late)
        with pytest.raises(RunTakenError):
            second.catch_up(is_end=False)
    names = ["00000-0001.json", "00000-0002.json", "00000-0003.json", "00001-0003.json"]
    assert run.store.list("shard-plans") == names
    finish(run, *others)
    shards_of(run, 4).catch_up(is_end=True)
    assert {name: files(run.store)[name] for name in before} == before
    assert sorted(job_ids(all_rows(run.store))) == sorted(record.job_id for record in run.jobs())


def test_a_store_that_fails_before_any_write_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    for number in range(1, 6):
        run = make_run(str(tmp_path / f"run-{number}"), LINES, "jsonl:2")
        finish(run, *run.jobs())
        shards = shards_of(run)
        failing = Interrupted(number, lambda: (_ for _ in ()).throw(StoreError("cannot write")))
        with pytest.MonkeyPatch.context() as patch:
            failing.watch(shards, patch, has_exclusive_create=True)
            with pytest.raises(StoreError):
                shards.catch_up(is_end=True)
        before = files(run.store)
        shards_of(run, 2).catch_up(is_end=True)
        assert {name: files(run.store)[name] for name in before} == before
        assert sorted(job_ids(all_rows(run.store))) == sorted(record.job_id for record in run.jobs())
        assert run.store.list(DATA)
