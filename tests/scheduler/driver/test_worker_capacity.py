from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.scheduler.cluster.worker_actor import WorkerInfo
from swiftbatch.scheduler.driver.dispatch import MEMORY_SHARE, LoadBalancer, WorkerCapacity
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.worker_fleet import StepPace, Worker
from swiftbatch.worker.kernels.kernel_sizes import MOST_SLOTS
from swiftbatch.worker.kv.kv_capacity import PAGE, Growth, HeldPositions, PoolSize, WindowPages, most_pages

SHORT, LONG = Growth(10, 60), Growth(10, 2000)


def worker(num_pages: int, node: str = "node", num_slots: int | None = None, num_state_positions: int = 0) -> Worker:
    num_free_positions = -int(-num_pages * PAGE // MEMORY_SHARE)
    sizes = (num_free_positions, num_slots, num_state_positions)
    return Worker("w", None, None, WorkerInfo("host", 1, None, node, "", *sizes))


def slots(num_slots: int | None, *workers: Worker) -> WorkerCapacity:
    nodes = [each.info.node_id if each.info else None for each in workers]
    fleet: Any = SimpleNamespace(num_sharing=lambda node: nodes.count(node) + nodes.count(None))
    return WorkerCapacity(num_slots, fleet)


@pytest.mark.parametrize("num_slots", [1, 3, 200])
def test_a_worker_never_has_more_jobs_than_were_asked_for(num_slots: int) -> None:
    one = worker(10**9)
    assert not slots(num_slots, one).is_full(one, num_slots - 1)
    assert slots(num_slots, one).is_full(one, num_slots)


def test_what_was_asked_for_is_a_bound_and_makes_no_room() -> None:
    one = worker(most_pages([LONG, LONG]))
    assert slots(9, one).has_room(one, [LONG], LONG)
    assert not slots(9, one).has_room(one, [LONG, LONG], LONG)


def test_one_job_is_always_taken() -> None:
    one = worker(0)
    assert slots(None, one).has_room(one, [], LONG)
    assert not slots(None, one).is_full(one, 0)
    assert not slots(None, one).has_room(one, [SHORT], SHORT)


def test_caches_take_no_more_than_was_asked_for_and_no_more_than_there_is() -> None:
    """Caches have at most so many positions, whatever is free."""
    fleet: Any = SimpleNamespace(num_sharing=lambda node: 1)
    one = worker(100)
    assert [WorkerCapacity(None, fleet, most).num_pages(one) for most in (None, 50 * PAGE, 1000 * PAGE)] == [
        100,
        50,
        100,
    ]


def test_a_long_job_leaves_room_for_short_ones_that_end_before_it_is_long() -> None:
    one = worker(most_pages([LONG]))
    assert slots(None, one).has_room(one, [LONG] + [SHORT] * 4, SHORT)
    assert not slots(None, one).has_room(one, [LONG], LONG)
    assert not slots(None, one).has_room(one, [Growth(1950, 2000)], SHORT)


def test_a_long_job_begins_when_it_will_only_be_long_after_others_have_ended() -> None:
    one = worker(most_pages([LONG]) + 20)
    assert slots(None, one).has_room(one, [Growth(1500, 2000)], LONG)
    assert not slots(None, one).has_room(one, [Growth(500, 2000)], LONG)


def test_workers_of_one_machine_share_its_memory() -> None:
    one, starting = worker(most_pages([SHORT, SHORT]) + 1), Worker("w", None, None)
    assert slots(None, one, worker(9, "other")).has_room(one, [SHORT], SHORT)
    for other in (worker(9), starting):
        assert not slots(None, one, other).has_room(one, [SHORT], SHORT)


def test_there_are_no_more_than_gain() -> None:
    one = worker(10**9)
    assert not slots(None, one).is_full(one, MOST_SLOTS - 1)
    assert slots(None, one).is_full(one, MOST_SLOTS)


def test_a_gpu_takes_as_many_as_it_has_slots_whatever_their_lengths() -> None:
    one = worker(0, num_slots=40)
    assert slots(None, one).num_pages(one) is None
    assert slots(None, one).has_room(one, [LONG] * 39, LONG)
    assert not slots(None, one).is_full(one, 39)
    assert slots(None, one).is_full(one, 40)
    assert slots(3, one).is_full(one, 3)


def test_a_gpu_with_a_pool_takes_what_its_pages_may_be_expected_to_hold() -> None:
    page = 1024
    info = WorkerInfo(
        "host", 1, None, "node", "", 0, num_slots=4, pool_size=PoolSize(most_pages([LONG, LONG], page), page)
    )
    one = Worker("w", None, None, info)
    assert slots(None, one).num_pages(one) == most_pages([LONG, LONG], page)
    assert slots(None, one, worker(9)).has_room(one, [LONG], LONG), "nobody else has its pages"
    assert not slots(None, one).has_room(one, [LONG, LONG], LONG)
    assert slots(None, one).has_room(one, [], Growth(10, 10**6))
    assert slots(None, one).is_full(one, 4)


def test_a_gpu_whose_layers_with_a_window_have_pages_of_their_own_takes_what_both_pools_hold() -> None:
    held = HeldPositions(500, 0.0)
    whole, windowed = most_pages([LONG] * 3, PAGE), most_pages([LONG] * 2, PAGE, held)
    for num_windowed, most in ((windowed, 2), (10 * windowed, 3)):
        pool = PoolSize(whole, PAGE, WindowPages(num_windowed, held))
        one = Worker("w", None, None, WorkerInfo("host", 1, None, "node", "", 0, num_slots=9, pool_size=pool))
        assert slots(None, one).has_room(one, [LONG] * (most - 1), LONG)
        assert not slots(None, one).has_room(one, [LONG] * most, LONG)
        assert slots(None, one).has_room(one, [], Growth(10, 10**6))


def test_a_worker_whose_memory_ran_out_takes_none_until_one_of_the_others_has_left() -> None:
    one = worker(10**9)
    one.num_fitting = 3
    assert slots(None, one).is_full(one, 3)
    assert not slots(None, one).is_full(one, 2)


def test_each_worker_has_room_for_one_where_none_has_a_job_left_of_those_that_its_memory_held() -> None:
    """Each returned a job just before the last of its others ended."""
    workers = [worker(10**9), worker(10**9)]
    for one in workers:
        one.num_fitting = 0
    queue, fleet = JobQueue(5), SimpleNamespace(workers=workers, pace=StepPace())
    queue.add(JobEntry("job", "job", 0, 1, 1000))
    most = WorkerCapacity(None, fleet).most_anywhere()
    assert most == 1
    assert LoadBalancer(queue, fleet, 2).plan(most) is None, "one job needs no plan"


def test_what_layers_with_windows_forget_is_room_for_more_jobs() -> None:
    one = worker(most_pages([LONG]))
    assert not slots(None, one).has_room(one, [LONG], LONG)
    one.info = replace(one.info, held_positions=HeldPositions(500, 0.25))
    assert slots(None, one).has_room(one, [LONG], LONG)
    assert not slots(None, one).has_room(one, [LONG] * 2, LONG)
    alike = LONG._replace(num_shared=1800)
    assert not slots(None, one).has_room(one, [alike], alike), "they hold a prompt that others have as well"


def test_states_take_room_beside_the_positions_of_each_job() -> None:
    for num_state_positions, is_taken in ((0, True), (PAGE, False)):
        one = worker(most_pages([SHORT, SHORT]), num_state_positions=num_state_positions)
        assert slots(None, one).has_room(one, [SHORT], SHORT) == is_taken
