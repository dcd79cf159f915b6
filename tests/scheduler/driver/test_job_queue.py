from __future__ import annotations

import random

import pytest

from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.shared_prompts import NOT_SHARED, SharedPrompt
from swiftbatch.scheduler.driver.job_queue import FIRST_ORDER, JobQueue
from tests.scheduler.driver.queue_parts import untouched


def entry(custom_id: str, max_tokens: int, line_number: int = 1) -> JobEntry:
    return JobEntry(custom_id, custom_id, line_number, 10, max_tokens)


def take(queue: JobQueue, worker_id: str, now: float) -> str | None:
    taken = queue.take(worker_id, now)
    return taken.job_id if taken else None


def held(queue: JobQueue, worker_id: str) -> list[str]:
    return sorted(queue.of(worker_id).running)


def give_other(queue: JobQueue, worker_id: str, now: float) -> None:
    queue.add(entry("other", 1000))
    assert take(queue, worker_id, now) == "other"


def test_the_longest_job_is_taken_first_and_equals_in_file_order() -> None:
    queue = JobQueue(max_attempts=5)
    for line_number, (name, max_tokens) in enumerate([("b", 50), ("a", 50), ("long", 200)], start=1):
        queue.add(entry(name, max_tokens, line_number))
    assert [take(queue, "w1", 0.0) for _ in range(4)] == ["long", "b", "a", None]


def test_jobs_like_those_that_ended_soon_are_taken_last_once_enough_have_ended() -> None:
    asked = [JobEntry(f"{kind} {n}", "", n, tokens, 1000) for n in range(60) for kind, tokens in KINDS.items()]
    queue = JobQueue(5, untouched(asked, [NOT_SHARED] * len(asked), [0] * len(asked)))
    for _ in range(FIRST_ORDER):
        name = take(queue, "w1", 0.0) or ""
        assert name.startswith("classified"), "a longer prompt with the same limit may need most positions"
        queue.finish(name, 5)
    assert (take(queue, "w1", 0.0) or "").startswith("story")
    rest = [take(queue, "w1", 0.0) or "" for _ in range(queue.num_unfinished)]
    assert [name for name in rest if name.startswith("story")] == rest[:59]
    assert 0 < queue.num_expected_left < queue.num_tokens_left


KINDS = {"story": 20, "classified": 900}  # with the tokens of their prompts


def test_the_lowest_priority_is_taken_before_any_longer_job_also_after_it_was_put_back() -> None:
    queue = JobQueue(max_attempts=5)
    for line_number, (name, max_tokens, priority) in enumerate(
        [("later", 900, 7), ("longest", 500, 0), ("plain", 50, 0), ("soon", 10, -1), ("first", 20, -(2**63))], start=1
    ):
        queue.add(entry(name, max_tokens, line_number), priority=priority)
    assert queue.take("w1", 0.0, lambda growth: growth.end != 30) is None  # only it is asked about, and stays
    assert [take(queue, "w1", 0.0) for _ in range(2)] == ["first", "soon"]
    queue.release("soon")
    assert [take(queue, "w1", 0.0) for _ in range(5)] == ["soon", "longest", "plain", "later", None]


def test_where_the_longest_has_no_room_a_shorter_one_goes_first_and_the_longest_is_asked_for_again() -> None:
    queue = JobQueue(max_attempts=5)
    for line_number, (name, max_tokens) in enumerate([("huge", 9000), ("long", 5000), ("short", 90)], start=1):
        queue.add(entry(name, max_tokens, line_number))
    assert queue.take("w1", 0.0, lambda growth: growth.end < 6000).job_id == "long"
    assert queue.take("w1", 0.0, lambda growth: False) is None
    assert [take(queue, "w1", 0.0) for _ in range(3)] == ["huge", "short", None]


def test_no_job_goes_first_for_its_length_before_one_of_a_lower_priority() -> None:
    queue = JobQueue(max_attempts=5)
    queue.add(entry("long", 5000), priority=0)
    queue.add(entry("short", 90), priority=1)
    assert queue.take("w1", 0.0, lambda growth: growth.end < 1000) is None


def test_a_job_keeps_the_seniority_of_its_first_attempt() -> None:
    queue = JobQueue(max_attempts=5)
    for line_number, name in enumerate("abc"):
        queue.add(entry(name, 100, line_number))
    assert [take(queue, "w1", 0.0) for _ in range(2)] == ["a", "b"]
    queue.release("a")
    assert [take(queue, "w2", 0.0) for _ in range(2)] == ["a", "c"]
    assert [queue.find(name).seniority for name in "abc"] == [0, 1, 2]


def test_jobs_are_expected_to_become_as_long_as_those_that_have_ended() -> None:
    queue = JobQueue(max_attempts=5)
    for number in range(200):
        queue.add(entry(f"j{number}", 6400, number))
    assert take(queue, "w1", 0.0) == "j0"
    assert queue.growths("w1") == [(10, 6410, 0)]
    for _ in range(150):
        queue.finish(queue.take("w2", 0.0).job_id, 640)
    [(now, end, _)] = queue.growths("w1")
    assert now == 10
    assert 600 < end < 1000
    queue.progress("j0", 3000)  # longer than any that has ended
    assert queue.growths("w1") == [(3010, 6410, 0)]


def test_the_tokens_that_others_have_too_are_told_of_a_job_that_grows() -> None:
    queue = JobQueue(max_attempts=5)
    queue.add(entry("a", 90), prompt=SharedPrompt(1, 64))
    take(queue, "w1", 0.0)
    assert queue.growths("w1") == [(10, 100, 64)]


def test_a_lost_job_waits_longer_each_time_and_has_its_attempts() -> None:
    queue = JobQueue(max_attempts=3)
    queue.add(entry("a", 100))
    assert queue.take("w1", 0.0)
    assert queue.lose("a", 100.0)
    assert queue.take("w1", 100.4) is None
    assert queue.take("w1", 100.5)
    assert queue.lose("a", 200.0)
    assert queue.take("w1", 200.9) is None
    assert queue.take("w1", 201.0)
    assert not queue.lose("a", 300.0)


def test_a_job_that_moves_on_between_losses_is_never_given_up() -> None:
    queue = JobQueue(max_attempts=2)
    queue.add(entry("a", 1000), num_generated_tokens=100)
    for num_tokens in range(110, 1000, 10):
        assert queue.take("w1", 1e9)
        queue.progress("a", num_tokens)
        assert queue.lose("a", 0.0)
    queue.take("w1", 1e9)
    queue.progress("a", 995)  # less than a hundredth of the job
    assert not queue.lose("a", 0.0)


def test_a_job_lost_twice_by_itself_runs_alone_until_it_moves_on() -> None:
    queue = JobQueue(max_attempts=5)
    queue.add(entry("struck", 500))
    queue.add(entry("good", 100))
    taken = []
    for now in (0.0, 10.0):
        taken += [take(queue, "w1", now), take(queue, "w1", now)]
        queue.progress("good", int(now) + 10)
        queue.lose("struck", now)
        queue.lose("good", now)
    assert taken == ["struck", "good"] * 2  # after one loss nobody is struck
    give_other(queue, "w2", 20.0)
    assert take(queue, "w2", 20.0) == "good"  # the longer struck job is skipped beside a job that may be at fault
    assert take(queue, "w1", 20.0) == "struck"
    queue.add(entry("new", 10))
    assert queue.take("w1", 20.0) is None
    queue.progress("struck", 50)
    assert take(queue, "w1", 20.0) == "new"
    assert (held(queue, "w1"), held(queue, "w2")) == (["new", "struck"], ["good", "other"])


@pytest.mark.parametrize(("num_lost", "joins"), [(1, False), (4, True)])
def test_a_struck_job_joins_jobs_that_have_moved_on_unless_it_must_run_alone(num_lost: int, joins: bool) -> None:
    queue = JobQueue(max_attempts=5)
    queue.add(entry("struck", 500))
    for now in (0.0, 10.0):
        assert take(queue, "w1", now) == "struck"
        queue.lose("struck", now, num_lost)
    give_other(queue, "w2", 20.0)
    assert take(queue, "w2", 20.0) is None
    queue.progress("other", 10)
    assert take(queue, "w2", 20.0) == ("struck" if joins else None)


def lose_all(queue: JobQueue, job_ids: list[str], now: float) -> list[str]:
    """Lose a worker with these jobs; return those that have no attempt left."""
    num_lost = sum(not job.has_progressed for job in queue.jobs(job_ids))
    return [job_id for job_id in job_ids if not queue.lose(job_id, now, num_lost)]


def test_of_256_jobs_that_are_lost_twice_half_run_at_once_and_the_others_as_soon_as_those_have_moved_on() -> None:
    queue = JobQueue(max_attempts=5)
    for number in range(256):
        queue.add(entry(f"j{number}", 8000, number))
    for now in (0.0, 100.0):
        assert lose_all(queue, taken_by(queue, "w1", now), now) == []
    first = taken_by(queue, "w1", 200.0)
    assert len(first) == 128
    for job_id in first[:64]:
        queue.progress(job_id, 80)
    assert len(taken_by(queue, "w1", 200.0)) == 64
    for job_id in first[64:]:
        queue.progress(job_id, 80)
    assert len(taken_by(queue, "w1", 200.0)) == 64
    assert len(held(queue, "w1")) == 256


@pytest.mark.parametrize("max_attempts", [2, 5])
def test_the_one_job_of_256_that_ends_its_worker_is_given_up_after_halvings_and_no_other_is(max_attempts: int) -> None:
    queue = JobQueue(max_attempts)
    for number in range(256):
        queue.add(entry(f"j{number}", 8000, number))
    num_losses, given_up, now = 0, list[str](), 0.0
    while not given_up:
        now += 100.0
        while "j77" not in (held_now := taken_by(queue, "w1", now) and held(queue, "w1")):
            for job_id in held_now:
                queue.finish(job_id, 8000)
        num_losses += 1
        given_up = lose_all(queue, held_now, now)
    assert given_up == ["j77"]
    assert num_losses == max_attempts - 1 + 8  # the last of those with 128, 64, ... 1 job is an attempt of its own


def taken_by(queue: JobQueue, worker_id: str, now: float) -> list[str]:
    return list(iter(lambda: take(queue, worker_id, now), None))


def test_a_rereserved_job_is_at_hand_at_once_and_without_a_strike() -> None:
    queue = JobQueue(max_attempts=1)
    queue.add(entry("a", 100))
    for _ in range(3):
        assert take(queue, "w1", 0.0) == "a"
        queue.progress("a", 0)
        queue.release("a")
        assert queue.counts()["running"] == 0
    give_other(queue, "w2", 0.0)
    assert take(queue, "w2", 0.0) == "a"  # not a suspect either
    queue.release("a")
    queue.release("a")  # waiting already
    queue.release("unknown")
    assert held(queue, "w2") == ["other"]
    assert [take(queue, "w1", 0.0) for _ in range(2)] == ["a", None]
    assert not queue.lose("a", 0.0)  # a real loss still counts
    queue.release("a")  # and is waited for
    assert queue.take("w1", 0.4) is None


def test_a_suspect_that_proves_itself_late_may_have_neighbours_again() -> None:
    queue = JobQueue(max_attempts=5)
    queue.add(entry("a", 100))
    for now in (0.0, 10.0):
        queue.take("w1", now)
        queue.lose("a", now)
    give_other(queue, "w2", 20.0)
    assert take(queue, "w2", 20.0) is None
    queue.progress("a", 50)  # the report of an attempt believed lost
    assert take(queue, "w2", 20.0) == "a"
    assert take(queue, "w1", 20.0) is None


def test_a_job_that_ended_while_it_waited_is_not_taken() -> None:
    queue = JobQueue(max_attempts=5)
    for name in ("a", "b", "c", "d"):
        queue.add(entry(name, 100))
    assert take(queue, "w1", 0.0) == "a"
    queue.lose("a", 0.0)
    queue.finish("a", 30)
    queue.drop("b", "cancelled")
    queue.drop("c", "failed")
    queue.drop("c", "cancelled")  # it has ended already
    queue.finish("c", 100)
    assert [take(queue, "w1", 100.0) for _ in range(2)] == ["d", None]
    assert queue.counts() == {"pending": 0, "running": 1, "finished": 1, "failed": 1, "cancelled": 1}
    assert queue.num_generated_tokens == 30


def test_order_and_totals_hold_over_any_sequence_of_events() -> None:
    """Compares with the plain rules, computed anew over all jobs."""
    rng = random.Random(5)
    queue = JobQueue(max_attempts=100)
    left = {f"j{i}": entry(f"j{i}", rng.choice([5, 50, 500]), line_number=i) for i in range(60)}
    tokens, num_left, running = dict.fromkeys(left, 0), {n: r.max_tokens for n, r in left.items()}, set()
    priorities = {name: rng.choice([-3, 0, 0, 5]) for name in left}
    for job in left.values():
        queue.add(job, priority=priorities[job.job_id])
    holders: dict[str, str] = {}
    for step in range(1500):
        name, event = rng.choice(sorted(tokens)), rng.choice(["take", "take", "progress", "lose", "release", "finish"])
        if event == "take":
            waiting = [n for n in left if n not in running]
            first = max(
                waiting,
                key=lambda n: (-priorities[n], left[n].max_tokens, -left[n].line_number),
                default=None,
            )
            assert take(queue, f"w{step}", 0.0) == first
            running |= {first} if first else set()
            holders |= {first: f"w{step}"} if first else {}
        elif event == "progress" and name in left:
            tokens[name] = rng.randrange(left[name].max_tokens + 1)
            queue.progress(name, tokens[name])
        elif event in ("lose", "release") and name in running:
            running.remove(name)
            queue.release(name) if event == "release" else queue.lose(name, -1e6)
        elif event == "finish" and name in left and rng.random() < 0.3:
            tokens[name] = rng.randrange(left.pop(name).max_tokens + 1)
            queue.finish(name, tokens[name])
            running.discard(name)
        assert held(queue, holders.get(name, "")) == [name] * (name in running)
        assert queue.unfinished() == list(left)
        assert queue.num_generated_tokens == sum(tokens.values())
        assert queue.num_tokens_left == sum(num_left[n] - tokens[n] for n in left)
        assert {job.job_id: job.num_generated_tokens for job in queue.running()} == {n: tokens[n] for n in running}
        by_state = {"pending": len(left) - len(running), "running": len(running), "finished": 60 - len(left)}
        assert queue.counts() == by_state | {"failed": 0, "cancelled": 0}
    assert 10 < len(left) < 50


def test_a_job_that_has_ended_takes_no_room_and_runs_again_if_its_result_is_never_written() -> None:
    queue = JobQueue(max_attempts=5)
    for name in "abc":
        queue.add(entry(name, 100))
    assert [take(queue, "w1", 0.0) for _ in range(2)] == ["a", "b"]
    queue.end("a", 40)
    assert held(queue, "w1") == ["b"]
    assert list(queue.of("w1").unsealed) == ["a"]
    assert (queue.of("w1").num_left, queue.num_tokens_left, queue.num_to_run) == (100, 200, 2)
    assert queue.counts()["running"] == 2  # it has not finished yet
    assert queue.lose("a", 0.0)
    assert (queue.of("w1").unsealed, queue.num_tokens_left, queue.num_to_run) == ({}, 260, 3)
    assert {take(queue, "w2", 9.0), take(queue, "w2", 9.0)} == {"a", "c"}
    queue.end("a", 40)
    queue.finish("a", 40)
    assert (queue.of("w2").unsealed, queue.num_tokens_left, queue.num_to_run) == ({}, 200, 2)
    assert queue.counts()["finished"] == 1


def reserve(queue: JobQueue, worker_id: str) -> str | None:
    reserved = queue.reserve(worker_id, 100.0)
    return reserved.job_id if reserved else None


def test_a_job_in_reserve_is_pending_until_it_begins_and_goes_back_as_it_was() -> None:
    queue = JobQueue(max_attempts=1)
    for line_number, (name, max_tokens) in enumerate([("a", 90), ("b", 80), ("c", 70)], start=1):
        queue.add(entry(name, max_tokens, line_number))
    assert (take(queue, "w1", 0.0), reserve(queue, "w1"), reserve(queue, "w1")) == ("a", "b", "c")
    assert (queue.counts()["running"], queue.counts()["pending"], queue.num_waiting) == (1, 2, 0)
    assert (held(queue, "w1"), list(queue.of("w1").reserve)) == (["a"], ["b", "c"])
    assert (queue.of("w1").num_left, queue.num_to_run, queue.num_tokens_left) == (240, 3, 240)
    assert queue.begin("b") is not None
    assert queue.begin("b") is None
    assert (held(queue, "w1"), queue.counts()["running"], queue.num_in_backlog) == (["a", "b"], 2, 1)
    queue.release("c")
    assert (queue.num_waiting, queue.num_in_backlog, take(queue, "w2", 0.0)) == (1, 0, "c")
    queue.end("b", 80)
    assert list(queue.of("w1").unsealed) == ["b"]
    queue.stop_running()
    assert (queue.num_waiting, queue.handed_out(), queue.num_tokens_left) == (3, set(), 160)


def test_a_cancelled_job_leaves_its_reserve() -> None:
    queue = JobQueue(max_attempts=5)
    queue.add(entry("a", 90))
    assert reserve(queue, "w1") == "a"
    queue.drop("a", "cancelled")
    assert (len(queue.of("w1").reserve), queue.num_in_backlog, queue.num_unfinished) == (0, 0, 0)


def test_no_job_that_may_have_to_run_alone_waits_in_a_reserve() -> None:
    queue = JobQueue(max_attempts=5)
    queue.add(entry("lost", 90))
    for _ in range(2):
        assert take(queue, "w1", 100.0) == "lost"
        assert queue.lose("lost", 0.0)
    assert reserve(queue, "w1") is None  # it runs alone
    give_other(queue, "w2", 100.0)
    queue.add(entry("suspect", 80))
    assert reserve(queue, "w2") == "suspect"
    queue.find("suspect").is_suspect = True
    queue.release("suspect")
    assert reserve(queue, "w2") is None
    assert take(queue, "w3", 100.0) == "lost"
    queue.add(entry("more", 10))
    assert reserve(queue, "w3") is None  # nobody beside it
    assert reserve(queue, "w2") == "more"


def test_what_is_known_of_a_worker_s_jobs_is_what_a_look_at_each_would_tell() -> None:
    """Compares the queue's incremental knowledge with a look at each job."""
    rng, queue, now = random.Random(2), JobQueue(max_attempts=50), 0.0
    for number in range(300):
        queue.add(entry(f"j{number}", rng.randint(20, 900), number))
    workers = ["w1", "w2", "w3"]
    for _ in range(1500):
        now, worker = now + 100.0, rng.choice(workers)
        held = sorted(queue.of(worker).running)
        reserved = list(queue.of(worker).reserve)
        job_id = rng.choice([*held, *reserved, "j0"])
        if job_id in held:
            num_tokens = queue.find(job_id).num_generated_tokens + rng.randint(0, 9)
            match rng.randint(0, 4):
                case 0:
                    queue.release(job_id)
                case 1:
                    queue.lose(job_id, now)
                case number:
                    (queue.progress, queue.end, queue.finish)[number - 2](job_id, num_tokens)
        elif job_id in reserved:
            rng.choice([queue.begin, queue.release])(job_id)
        for give in rng.choices([queue.take, queue.reserve], k=rng.randint(0, 2)):
            give(worker, now)
        told = [(queue.growths(name), queue.mean_length(name), queue.of(name).num_left) for name in workers]
        queue._expected._outlooks.clear()
        jobs = [[*queue.of(name).running.values(), *queue.of(name).reserve.values()] for name in workers]
        num_left = [sum(job.entry.max_tokens - job.num_generated_tokens for job in own) for own in jobs]
        for name, (growths, mean_length, left), own_left in zip(workers, told, num_left, strict=True):
            assert sorted(growths) == sorted(queue.growths(name))
            assert [growth.left for growth in growths] == [growth.left for growth in queue.growths(name)]
            assert mean_length == pytest.approx(queue.mean_length(name))
            assert left == own_left
    num_living = len([job for job in queue.running() if not job.has_ended]) + queue.num_in_backlog
    assert queue._expected._living.num_jobs.sum() == num_living
    assert queue._expected._living.num_jobs.min() >= 0
