"""No slot waits for the driver, and unbegun jobs have no attempt."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptStart
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.dispatch import WorkerCapacity
from swiftbatch.scheduler.driver.queue_loading import load_queue
from swiftbatch.scheduler.driver.run_progress import DriverContext
from swiftbatch.scheduler.driver.worker_fleet import Lost, Reported, Worker
from swiftbatch.scheduler.driver.worker_reports import AttemptSettlement, ReportIntake
from swiftbatch.worker.session.work_messages import JobOutcome, Orders, OutcomeKind, WorkReport
from tests.scheduler.driver.driver_parts import RecordingDisplay, job_id, make_context, make_run
from tests.scheduler.driver.simulated_fleet import SimulatedRun, StepModel

STEP = StepModel(base=0.02, per_job=0.001)
ROOMY = 10**6  # pages


def simulated(folder: Path, limits: dict[str, int], lengths: dict[str, int]) -> SimulatedRun:
    return SimulatedRun(folder, limits, lengths, num_workers=2, num_pages=ROOMY, step=STEP)


def test_short_jobs_leave_no_slot_empty_while_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftbatch.scheduler.driver.dispatch.MOST_SLOTS", 4)
    rng = random.Random(3)
    lengths = {f"job {number}": rng.randint(4, 12) for number in range(400)}
    least = sum(lengths.values()) / (2 * 4) * STEP.seconds(4)
    assert simulated(tmp_path / "with", lengths, lengths).to_the_end() < 1.2 * least
    monkeypatch.setattr(WorkerCapacity, "num_for_backlog", lambda *_: 0)
    assert simulated(tmp_path / "without", lengths, lengths).to_the_end() > 2 * least


def test_at_the_end_nobody_waits_for_the_reserve_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker's jobs are long, the other's end at once."""
    monkeypatch.setattr("swiftbatch.scheduler.driver.dispatch.MOST_SLOTS", 1)
    monkeypatch.setattr(WorkerCapacity, "num_for_backlog", lambda *_: 3)
    limits = {f"job {number}": 200 for number in range(8)}
    recalled: list[str] = []
    note_call = SimulatedRun.note_call

    def noted(run: SimulatedRun, worker: Worker, orders: Orders) -> None:
        recalled.extend(orders.recalled)
        note_call(run, worker, orders)

    monkeypatch.setattr(SimulatedRun, "note_call", noted)
    run = simulated(tmp_path, limits, {name: 200 if number % 2 else 5 for number, name in enumerate(limits)})
    seconds = run.to_the_end()
    assert recalled
    assert run.num_ended == 8
    assert seconds < 2 * 200 * STEP.seconds(1) + 4  # four long ones on two workers
    assert not sum(run.counters.num_preemptions.values())


class Parts:
    """A worker that runs job a and has b and c in reserve."""

    def __init__(self, folder: Path) -> None:
        self.run: Run = make_run(folder, {"a": 90, "b": 80, "c": 70})
        self.a, self.b, self.c = (job_id(self.run, name) for name in "abc")
        self.display, self.attempts = RecordingDisplay(), Attempts(self.run.store, 1, {})
        self.queue = load_queue(self.run, 5)
        fleet: Any = SimpleNamespace(retire=lambda worker: None)
        self.context: DriverContext = make_context(self.run, fleet, self.queue, self.display, tries=self.attempts)
        self.settlement = AttemptSettlement(self.context)
        self.intake, self.worker = ReportIntake(self.context, self.settlement), Worker("w1", None, None)
        assert self.queue.take("w1", 0.0) is not None
        self.attempts.begin(self.a)
        for each in (self.b, self.c):
            assert self.queue.reserve("w1", 0.0) is not None
            self.attempts.number(each)

    def counted(self) -> list[int]:
        return [self.attempts.count(each) for each in (self.a, self.b, self.c)]

    def lose_worker(self) -> None:
        self.intake.take_in(Lost(self.worker, "worker_died", "its process ended"))
        while self.queue.num_in_backlog:
            self.intake.settle()
            time.sleep(0.01)

    def report(self, *outcomes: JobOutcome, is_draining: bool = False) -> None:
        self.intake.take_in(Reported(self.worker, WorkReport(list(outcomes), is_draining=is_draining)))


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def test_an_attempt_counts_once_its_worker_has_begun_it(parts: Parts) -> None:
    assert parts.counted() == [1, 0, 0]
    parts.report(JobOutcome("running", parts.a, 5), JobOutcome("running", parts.b, 3))
    assert parts.counted() == [1, 1, 0]
    assert parts.queue.find(parts.b).num_generated_tokens == 3
    number = parts.attempts.newest(parts.c)
    parts.report(JobOutcome("running", parts.a, 9), JobOutcome("running", parts.b, 7), JobOutcome("unbegun", parts.c))
    assert (parts.queue.num_waiting, parts.counted()) == (1, [1, 1, 0])
    assert parts.attempts.begin(parts.c) == (number, 1)  # nobody has used it
    assert not sum(parts.context.counters.num_preemptions.values())
    assert not any("goes back" in note for note in parts.display.notes)


@pytest.mark.parametrize(
    ("kind", "state", "preemption"),
    [
        ("running", "running", None),
        ("ended", "running", None),
        ("finished", "finished", None),
        ("failed", "pending", "attempt_failed"),
        ("refused", "failed", None),
        ("released", "pending", "migrated"),
        ("evicted", "pending", "memory_full"),
        ("unbegun", "pending", None),
    ],
)
def test_each_outcome_of_a_job_has_its_end_and_all_but_one_tell_that_it_has_begun(
    parts: Parts, kind: OutcomeKind, state: str, preemption: str | None
) -> None:
    before = Counter(parts.queue.counts())
    parts.report(JobOutcome(kind, parts.b, 3, "why", "too_long"))
    assert Counter(parts.queue.counts()) - before == ({} if state == "pending" else {state: 1})
    assert parts.queue.num_waiting == (state == "pending")
    assert parts.context.counters.num_preemptions == (Counter() if preemption is None else Counter({preemption: 1}))
    assert parts.attempts.count(parts.b) == (kind not in ("unbegun", "finished"))  # a finished job's are not counted


def test_of_a_lost_worker_s_reserve_those_are_blamed_that_have_left_files(parts: Parts) -> None:
    start = AttemptStart(worker_id="w1", claimed=1.0, numerics="", attempt=1)
    CheckpointStore.of(parts.run).begin(parts.b, parts.attempts.newest(parts.b), start)
    number = parts.attempts.newest(parts.c)
    parts.lose_worker()
    assert parts.counted() == [1, 1, 0]
    assert [note for note in parts.display.notes if "goes back" in note] == [
        f"job {name} goes back, to resume from its checkpoint" for name in "ab"
    ]
    assert parts.context.counters.num_preemptions["worker_died"] == 2
    assert (parts.queue.num_waiting, parts.queue.num_in_backlog) == (3, 0)
    assert parts.attempts.begin(parts.c)[0] > number  # a lost worker may still work
    assert parts.queue.reserve("w2", 0.0) is None  # c is never reserved again, and the others wait a while
    assert parts.queue.take("w2", 0.0) is not None


def test_a_job_in_reserve_is_cancelled_once_its_worker_has_heard_of_it(parts: Parts) -> None:
    parts.run.request_cancel(parts.c)
    parts.settlement.take_cancel_requests()
    assert parts.queue.counts()["cancelled"] == 0
    parts.report(JobOutcome("running", parts.a, 5))
    assert parts.queue.counts()["cancelled"] == 1
    assert parts.worker.orders.cancelled == (parts.c,)
    parts.run.request_cancel(parts.b)
    parts.settlement.take_cancel_requests()
    parts.report(JobOutcome("unbegun", parts.b), is_draining=True)
    assert parts.queue.counts()["cancelled"] == 2


def test_a_worker_that_leaves_gives_back_what_it_had_not_heard_of(parts: Parts) -> None:
    parts.report(JobOutcome("released", parts.a, 5), is_draining=True)
    assert (parts.queue.num_waiting, parts.queue.num_in_backlog) == (3, 0)
    assert parts.counted() == [1, 0, 0]
    assert parts.queue.find(parts.a).num_generated_tokens == 5


def test_a_job_that_had_ended_on_a_lost_worker_is_not_blamed(parts: Parts) -> None:
    parts.report(JobOutcome("running", parts.b, 3), JobOutcome("ended", parts.a, 9))
    parts.lose_worker()
    assert [parts.queue.find(each).strikes.num for each in (parts.a, parts.b)] == [0, 1]
    assert parts.attempts.strikes(parts.a) is None
    assert parts.attempts.strikes(parts.b) == parts.queue.find(parts.b).strikes  # read by the next driver
