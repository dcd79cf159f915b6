"""How many jobs a worker takes: as many as were asked for, else as many as its memory has room for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.scheduler.cluster.actors import WorkerInfo
from swiftbatch.scheduler.driver.dispatch import MEMORY_SHARE, Slots
from swiftbatch.scheduler.driver.fleet import Worker
from swiftbatch.worker.kernels.sizes import MOST_SLOTS


def worker(num_free_positions: int, node: str = "node", num_state_positions: int = 0) -> Worker:
    info = WorkerInfo("host", 1, None, node, "", num_free_positions, num_state_positions=num_state_positions)
    return Worker("w", None, None, info)


def test_states_take_room_beside_the_positions_of_each_job() -> None:
    one = worker(round(1000 / MEMORY_SHARE), num_state_positions=100)
    assert slots(None, one).has_room(one, jobs(400), SHORT)
    assert not slots(None, one).has_room(one, jobs(401), SHORT)


def jobs(*lengths: int) -> list[JobEntry]:
    return [JobEntry(str(number), str(number), number, 10, length - 10) for number, length in enumerate(lengths)]


SHORT = jobs(20)[0]


def slots(num_slots: int | None, *workers: Worker) -> Slots:
    fleet: Any = SimpleNamespace(workers=workers)
    return Slots(num_slots, fleet)


@pytest.mark.parametrize("num_slots", [1, 3, 20])
def test_what_was_asked_for_holds_whatever_the_memory(num_slots: int) -> None:
    one = worker(0)
    assert slots(num_slots, one).has_room(one, jobs(*[500] * (num_slots - 1)), SHORT)
    assert not slots(num_slots, one).has_room(one, jobs(*[500] * num_slots), SHORT)


def test_one_job_is_always_taken() -> None:
    one = worker(0)
    assert slots(None, one).has_room(one, [], SHORT)
    assert not slots(None, one).has_room(one, jobs(50), SHORT)


def test_another_job_is_taken_while_one_as_long_as_the_longest_fits() -> None:
    one = worker(round(1000 / MEMORY_SHARE))
    assert slots(None, one).has_room(one, jobs(500), SHORT)
    assert not slots(None, one).has_room(one, jobs(501), SHORT)
    assert slots(None, one).has_room(one, jobs(400, 100, 100), SHORT)
    assert not slots(None, one).has_room(one, jobs(400, 100, 101), SHORT)


def test_a_longer_job_that_comes_later_has_room_or_waits() -> None:
    """As one does that was put back, or whose priority is behind that of shorter ones."""
    one = worker(round(1000 / MEMORY_SHARE))
    assert slots(None, one).has_room(one, jobs(100), jobs(900)[0])
    assert not slots(None, one).has_room(one, jobs(100), jobs(901)[0])
    assert slots(None, one).has_room(one, [], jobs(5000)[0])


def test_workers_of_one_machine_share_its_memory() -> None:
    one = worker(round(1000 / MEMORY_SHARE))
    starting = Worker("w", None, None)
    assert slots(None, one, worker(9, "other")).has_room(one, jobs(500), SHORT)
    for other in (worker(9), starting):
        assert not slots(None, one, other).has_room(one, jobs(500), SHORT)
        assert slots(None, one, other).has_room(one, jobs(250), SHORT)


def test_there_are_no_more_than_gain() -> None:
    one = worker(10**9)
    assert slots(None, one).has_room(one, jobs(*[50] * (MOST_SLOTS - 1)), SHORT)
    assert not slots(None, one).has_room(one, jobs(*[50] * MOST_SLOTS), SHORT)
