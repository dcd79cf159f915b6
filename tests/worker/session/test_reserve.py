"""A worker begins reserved jobs in the step in which another leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swiftbatch.worker.kv.cache_room import CachedJob, CacheRoom
from swiftbatch.worker.kv.kv_capacity import PAGE, Growth, PoolSize, most_pages, pages_of
from swiftbatch.worker.session.work_messages import Assignment, Backlog, JobOutcome, Orders
from tests.worker.session.session_parts import claimed, digest, make_run, record, session, undisturbed_digest

NO_ROOM_MATTERS = CacheRoom()


def assignment(name: str, num_tokens: int = 10) -> Assignment:
    return Assignment(name, 1, 5, b"", 1, num_expected_tokens=num_tokens)


def running(num_tokens: int, num_expected: int) -> CachedJob:
    cache: Any = None  # only full pools of a GPU look at it
    return CachedJob(cache, assignment("running", num_expected).growth(5, num_tokens))


def next_of(reserve: Backlog, jobs: list[CachedJob], room: CacheRoom = NO_ROOM_MATTERS) -> str | None:
    found = reserve.next(len(jobs), lambda each: room.has_room(jobs, each.growth(5, 0)))
    return found.job_id if found else None


def test_jobs_begin_in_order_and_never_more_than_there_are_slots() -> None:
    reserve = Backlog()
    reserve.follow(Orders(reserve=(assignment("a"), assignment("b")), num_slots=2))
    assert next_of(reserve, [running(0, 9), running(0, 9)]) is None
    assert [next_of(reserve, [running(0, 9)]) for _ in range(3)] == ["a", "b", None]


def test_what_is_recalled_is_handed_back_unless_it_has_begun_and_what_is_cancelled_is_dropped() -> None:
    reserve = Backlog()
    reserve.follow(Orders(reserve=tuple(assignment(name) for name in "abcd")))
    assert next_of(reserve, []) == "a"
    assert reserve.follow(Orders(recalled=("a", "b"), cancelled=("c",))) == ["b"]
    assert reserve.give_up() == ["d"]
    assert not reserve


def test_where_the_first_has_no_room_a_shorter_one_begins_and_alone_every_job_does() -> None:
    reserve, half_done = Backlog(), running(500, 1000)
    reserve.follow(Orders(reserve=(assignment("long", 2000), assignment("short", 10))))
    room = CacheRoom(PoolSize(most_pages([Growth(505, 1005), Growth(5, 15)]), PAGE))
    assert next_of(reserve, [half_done], room) == "short"
    assert next_of(reserve, [half_done], room) is None
    assert next_of(reserve, [], room) == "long"


def test_none_begins_where_memory_has_run_out_until_one_of_the_others_has_left() -> None:
    reserve = Backlog()
    reserve.follow(Orders(reserve=(assignment("a"),), num_slots=9))
    reserve.keep_to(1)
    assert next_of(reserve, [running(0, 9)]) is None
    assert next_of(reserve, []) == "a"


def test_jobs_fit_while_their_pages_do_and_one_alone_always_does() -> None:
    jobs = [running(495, 495)] * 3
    room = CacheRoom(PoolSize(2 * pages_of(500), PAGE))
    assert [room.can_fit(jobs[:count]) for count in (1, 2, 3)] == [True, True, False]
    assert [room.num_without_room(jobs[:count]) for count in (1, 2, 3)] == [0, 0, 1]
    assert [CacheRoom(PoolSize(1, PAGE)).can_fit(jobs[:count]) for count in (1, 2)] == [True, False]


def test_a_slot_is_taken_by_the_next_job_within_the_slice_and_all_tokens_stay(tmp_path: Path, tiny_model: Path) -> None:
    run, jobs = make_run(tmp_path / "run"), [record(name, 20) for name in ("fox", "dog", "cat")]
    worker = session(run, tiny_model)
    first, *others = (claimed(run, job) for job in jobs)
    report = worker.work(Orders((first,), reserve=tuple(others), num_slots=1), 600.0)
    assert [outcome.job_id for outcome in report.of("ended")] == [job.job_id for job in jobs]
    assert [outcome.num_generated_tokens for outcome in report.of("ended")] == [20] * 3
    assert {outcome.job_id for outcome in report.of("finished")} == {job.job_id for job in jobs}
    assert (report.num_jobs, report.of("unbegun")) == (1.0, [])
    undisturbed = [undisturbed_digest(tmp_path / job.job_id, tiny_model, job) for job in jobs]
    assert [digest(run, job) for job in jobs] == undisturbed


def test_the_mean_of_jobs_that_ran_at_a_time_counts_each_of_the_steps_taken_at_once(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = make_run(tmp_path / "run")
    short, long = claimed(run, record("fox", 4)), claimed(run, record("dog", 80))
    worker = session(run, tiny_model)
    report = worker.work(Orders((short, long)), 600.0)
    num_steps = worker.engine.counters.num_steps
    assert report.num_jobs == pytest.approx((num_steps + 4) / num_steps)


def test_a_worker_that_is_ended_hands_its_reserve_back_as_not_begun(tmp_path: Path, tiny_model: Path) -> None:
    run, worker = make_run(tmp_path / "run"), session(make_run(tmp_path / "run"), tiny_model)
    fox, dog = (claimed(run, record(name)) for name in ("fox", "dog"))
    worker.request_drain()
    report = worker.work(Orders((fox,), reserve=(dog,), num_slots=1), 600.0)
    assert [outcome.job_id for outcome in report.of("released")] == [fox.record.job_id]
    assert report.of("unbegun") == [JobOutcome("unbegun", dog.record.job_id)]


def test_a_worker_that_is_half_empty_reports_at_once_where_more_jobs_wait(tmp_path: Path, tiny_model: Path) -> None:
    run = make_run(tmp_path / "run")
    worker = session(run, tiny_model)
    short, long = claimed(run, record("fox", 5)), claimed(run, record("dog"))
    report = worker.work(Orders((short, long), seals=False), 600.0)
    assert [outcome.job_id for outcome in report.of("running")] == [long.record.job_id]
    assert [outcome.job_id for outcome in report.of("ended")] == [short.record.job_id]
