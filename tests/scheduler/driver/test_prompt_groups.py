"""Jobs whose prompts begin alike come to the same worker, as far as no other has to wait for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.shared_prompts import SharedPrompt, prompt_keys
from swiftbatch.scheduler.cluster.actors import WorkerInfo
from swiftbatch.scheduler.driver.backlog import load_queue
from swiftbatch.scheduler.driver.dispatch import Dispatcher
from swiftbatch.scheduler.driver.fleet import Worker
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.worker.session.work import Orders
from tests.jobs.run.run_parts import MANIFEST
from tests.scheduler.driver.driver_parts import make_context
from tests.scheduler.driver.test_job_queue import record, take


def queue_of(*jobs: tuple[str, int, int | None]) -> JobQueue:
    """Jobs of (name, tokens, group), in file order."""
    queue = JobQueue(max_attempts=5)
    for line_number, (name, max_tokens, group) in enumerate(jobs, start=1):
        queue.add(record(name, max_tokens, line_number), prompt=SharedPrompt(group, 64))
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
        queue.add(record(name, 90, line_number), priority=priority, prompt=SharedPrompt(group, 64))
    assert [take(queue, "w1", 0.0) for _ in range(4)] == ["a1", "c", "b", "a2"]


def test_a_job_that_comes_back_waits_among_its_group_again() -> None:
    queue = queue_of(("a1", 90, 1), ("b1", 90, 2), ("a2", 90, 1))
    assert take(queue, "w1", 0.0) == "a1"
    queue.release("a1")
    assert [take(queue, worker, 0.0) for worker in ("w2", "w1", "w1", "w1")] == ["b1", "a1", "a2", None]


def test_a_worker_hears_how_much_of_a_prompt_other_jobs_of_the_run_have(tmp_path: Path) -> None:
    run, book = Run.create_or_open(str(tmp_path), MANIFEST), list(range(100))
    keys = [prompt_keys(book), prompt_keys([*book, 1]), prompt_keys([1, *book])]
    run.add_jobs([replace(record(f"j{i}", 10, i), prompt_keys=each) for i, each in enumerate(keys)])
    told: list[Orders] = []
    worker = Worker("w1", None, None, WorkerInfo("host", 1, None, "node", "", num_free_positions=100_000))
    fleet: Any = SimpleNamespace(workers=[worker], work=lambda worker, orders, seconds: told.append(orders))
    Dispatcher(make_context(run, fleet, load_queue(run, 5), slots=4)).hand_out(0.0)
    [orders] = told
    assert [each.num_shared_tokens for each in orders.assignments] == [64, 64, 0]


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
