from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.shared_prompts import SharedPrompt, prompt_keys
from swiftbatch.scheduler.cluster.worker_actor import WorkerInfo
from swiftbatch.scheduler.driver.dispatch import Dispatcher
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.queue_loading import load_queue
from swiftbatch.scheduler.driver.worker_fleet import StepPace, Worker
from swiftbatch.worker.session.work_messages import Orders
from tests.jobs.run.run_parts import MANIFEST, make_record
from tests.scheduler.driver.driver_parts import make_context
from tests.scheduler.driver.queue_parts import untouched
from tests.scheduler.driver.test_job_queue import entry, take


def queue_of(*jobs: tuple[str, int, int | None]) -> JobQueue:
    """Make jobs of (name, tokens, group) in file order."""
    queue = JobQueue(max_attempts=5)
    for line_number, (name, max_tokens, group) in enumerate(jobs, start=1):
        queue.add(entry(name, max_tokens, line_number), prompt=SharedPrompt(group, 64))
    return queue


def test_two_workers_have_a_book_each_though_its_jobs_stand_between_others() -> None:
    queue = queue_of(("a1", 90, 1), ("b1", 90, 2), ("a2", 90, 1), ("b2", 90, 2), ("a3", 90, 1), ("b3", 90, 2))
    assert [take(queue, worker, 0.0) for worker in ("w1", "w2") * 3] == ["a1", "b1", "a2", "b2", "a3", "b3"]
    queue = queue_of(("a1", 90, 1), ("a2", 90, 1), ("a3", 90, 1), ("b1", 90, 2), ("b2", 90, 2))
    assert [take(queue, worker, 0.0) for worker in ("w1", "w2", "w2", "w1", "w1")] == ["a1", "b1", "b2", "a2", "a3"]


def test_where_nothing_else_is_left_a_book_has_several_workers() -> None:
    queue = queue_of(*((f"a{i}", 90, 1) for i in range(4)), ("short", 10, None))
    taken = [take(queue, worker, 0.0) for worker in ("w1", "w2", "w2", "w1", "w3", "w3")]
    assert taken == ["a0", "a1", "a2", "a3", "short", None]


def test_a_long_job_does_not_wait_for_the_sake_of_a_much_shorter_one_s_prompt() -> None:
    queue = queue_of(("a1", 1000, 1), ("long", 900, None), ("a2", 600, 1), ("other", 400, None))
    assert [take(queue, "w1", 0.0) for _ in range(4)] == ["a1", "long", "a2", "other"]


def test_no_prompt_goes_before_a_priority() -> None:
    queue = JobQueue(max_attempts=5)
    for line_number, (name, priority, group) in enumerate([("a1", 0, 1), ("a2", 5, 1), ("b", 1, 2), ("c", 0, None)], 1):
        queue.add(entry(name, 90, line_number), priority=priority, prompt=SharedPrompt(group, 64))
    for expected in ("a1", "c", "b", "a2"):
        assert take(queue, "w1", 0.0) == expected


def test_a_job_that_comes_back_waits_among_its_group_again() -> None:
    queue = queue_of(("a1", 90, 1), ("b1", 90, 2), ("a2", 90, 1))
    assert take(queue, "w1", 0.0) == "a1"
    queue.release("a1")
    assert [take(queue, worker, 0.0) for worker in ("w2", "w1", "w1", "w1")] == ["b1", "a1", "a2", None]


def test_a_worker_hears_how_much_of_a_prompt_other_jobs_of_the_run_have(tmp_path: Path) -> None:
    run, book = Run.planned(str(tmp_path), MANIFEST).made(), list(range(100))
    keys = [prompt_keys(book), prompt_keys([*book, 1]), prompt_keys([1, *book])]
    run.add_jobs([replace(make_record(f"j{i}", i), prompt_keys=each) for i, each in enumerate(keys)])
    told: list[Orders] = []
    worker = Worker("w1", None, None, WorkerInfo("host", 1, None, "node", "", num_free_positions=100_000))
    fleet: Any = SimpleNamespace(
        workers=[worker],
        idle=[worker],
        num_sharing=lambda node_id: 1,
        pace=StepPace(),
        work=lambda worker, orders, seconds, has_backlog: told.append(orders),
    )
    Dispatcher(make_context(run, fleet, load_queue(run, 5), slots=4)).hand_out(0.0)
    [orders] = told
    assert [each.num_shared_tokens for each in orders.assignments] == [64, 64, 0]


@given(
    jobs=st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(0, 3), st.integers(-1, 1)), max_size=12),
    events=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=40),
)
def test_jobs_that_wait_in_arrays_are_taken_as_those_that_were_added_one_by_one(
    jobs: list[tuple[int, int | None, int]], events: list[tuple[int, int]]
) -> None:
    entries = [entry(f"j{i}", num_tokens, i // 2) for i, (num_tokens, *_) in enumerate(jobs)]
    prompts = [SharedPrompt(group, 0 if group is None else 64) for _, group, _ in jobs]
    one_by_one, from_arrays = JobQueue(2), JobQueue(2, untouched(entries, prompts, [priority for *_, priority in jobs]))
    for each, prompt, (*_, priority) in zip(entries, prompts, jobs, strict=True):
        one_by_one.add(each, priority=priority, prompt=prompt)
    running: list[str] = []
    for now, (worker, action) in enumerate([*events, *((0, 0) for _ in jobs)]):
        for queue in (one_by_one, from_arrays):
            if action == 1 and running:
                queue.release(running[0])
            elif action == 2 and running:
                queue.lose(running[0], now)
            elif action == 3 and jobs:
                queue.drop(f"j{now % len(jobs)}", "cancelled")
        if action == 3 and jobs and f"j{now % len(jobs)}" in running:
            running.remove(f"j{now % len(jobs)}")
        elif action in (1, 2) and running:
            running.pop(0)
        longest = 5 if action == 4 else 9  # tokens that fit
        entries_taken = [
            queue.take(f"w{worker}", now, lambda growth, longest=longest: growth.end <= 10 + longest)
            for queue in (one_by_one, from_arrays)
        ]
        taken = [each.job_id if each else None for each in entries_taken]
        assert taken[0] == taken[1]
        running += [name for name in taken[:1] if name is not None]
        assert one_by_one.counts() == from_arrays.counts()
        assert one_by_one.num_tokens_left == from_arrays.num_tokens_left
    assert sorted(one_by_one.unfinished()) == sorted(from_arrays.unfinished())


@given(
    jobs=st.lists(st.tuples(st.integers(1, 40), st.none() | st.integers(0, 3)), max_size=20),
    events=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40),
)
def test_every_job_is_taken_once_and_none_before_one_that_is_much_longer(
    jobs: list[tuple[int, int | None]], events: list[tuple[int, bool]]
) -> None:
    queue = queue_of(*((f"j{i}", num_tokens, group) for i, (num_tokens, group) in enumerate(jobs)))
    waiting = {f"j{i}": 10 + num_tokens for i, (num_tokens, _) in enumerate(jobs)}  # a prompt has 10 tokens
    lengths, running = dict(waiting), []
    for worker, is_put_back in [*events, *((0, False) for _ in (*jobs, *events))]:
        if is_put_back and running:
            name = running.pop(0)
            queue.release(name)
            waiting[name] = lengths[name]
            continue
        taken = take(queue, f"w{worker}", 0.0)
        assert (taken is None) == (not waiting)
        if taken is not None:
            assert waiting[taken] >= 0.75 * max(waiting.values())
            del waiting[taken]
            running.append(taken)
    assert not waiting
