"""Stub workers on a simulated clock, so that a driver with a thousand of them fits one core."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from swiftbatch.metrics.counters import EngineCounters
from swiftbatch.scheduler.cluster.worker_actor import WorkerInfo, WorkerSpec
from swiftbatch.scheduler.cluster.worker_code import Code
from swiftbatch.worker.session.work_messages import Assignment, JobOutcome, Orders, OutcomeKind, WorkReport

TOKENS_PER_SECOND = 200.0  # per job
ENDS: tuple[OutcomeKind, ...] = ("ended", "finished")
COUNTERS_SECONDS = 2.0  # between two reports with counters, as in real workers
NUM_POSITIONS = 10_000_000  # per worker machine


class SimulatedClock:
    """Counts this process's CPU time without the stubs', and skips waits."""

    def __init__(self) -> None:
        self._of_stubs = 0.0
        self._skipped = -self.cpu_seconds()

    def now(self) -> float:
        return self._skipped + self.cpu_seconds()

    def cpu_seconds(self) -> float:
        return time.process_time() - self._of_stubs

    def skip_to(self, then: float) -> None:
        self._skipped += max(0.0, then - self.now())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the block's CPU time."""
        began = time.process_time()
        try:
            yield
        finally:
            self._of_stubs += time.process_time() - began


@dataclass(frozen=True, eq=False)
class Call:
    """A reference to an answer that is ready at `due`."""

    due: float
    answer: WorkerInfo | WorkReport


@dataclass(frozen=True)
class Method:
    """A method of a stub Ray actor."""

    clock: SimulatedClock
    function: Callable[..., Call]

    def remote(self, *args: Any) -> Call:
        with self.clock.stopped():
            return self.function(*args)


@dataclass(frozen=True)
class StubJob:
    """A job with `num_tokens` at `begin` that ends at `most`."""

    job_id: str
    begin: float
    num_tokens: int
    most: int

    @property
    def end(self) -> float:
        return self.begin + (self.most - self.num_tokens) / TOKENS_PER_SECOND

    def tokens(self, now: float) -> int:
        return min(self.most, self.num_tokens + int((now - self.begin) * TOKENS_PER_SECOND))


@dataclass(eq=False)
class StubWorker:
    """Runs every job at one speed to its limit."""

    calls: StubCalls
    node_id: str
    _jobs: dict[str, StubJob] = field(default_factory=dict)
    _backlog: dict[str, Assignment] = field(default_factory=dict)
    _num_slots: int = 1
    _counters: EngineCounters = field(default_factory=EngineCounters)
    _counted: float = 0.0  # time of the last report with counters

    def __post_init__(self) -> None:
        info = WorkerInfo("simulated", 0, None, self.node_id, "", NUM_POSITIONS)
        functions = (lambda failed_gpus: self.calls.after(0.0, info), self._work, self._drain)
        self.start, self.work, self.drain = (Method(self.calls.clock, function) for function in functions)

    def _work(self, orders: Orders, seconds: float) -> Call:
        now = self.calls.clock.now()
        outcomes = self._given_back(orders.released, now)
        recalled = [job_id for job_id in orders.recalled if self._backlog.pop(job_id, None)]
        outcomes += [JobOutcome("unbegun", job_id) for job_id in recalled]
        for job_id in orders.cancelled:
            self._jobs.pop(job_id, None)
            self._backlog.pop(job_id, None)
        self._num_slots = orders.num_slots or 1
        self._backlog |= {each.job_id: each for each in orders.reserve}
        for assignment in orders.assignments:
            self._begin(assignment, now)
        end, ended = self._run(now, now + seconds, goes_on=orders.seals)
        outcomes += [JobOutcome(kind, job.job_id, job.most) for job in ended for kind in ENDS]
        outcomes += [JobOutcome("running", job.job_id, job.tokens(end)) for job in self._jobs.values()]
        job_seconds = sum(end - max(now, job.begin) for job in self._jobs.values())
        job_seconds += sum(job.end - max(now, job.begin) for job in ended)
        num_tokens, num_steps = (int(each * TOKENS_PER_SECOND) for each in (job_seconds, end - now))
        counters = self._due_counters(now)
        report = WorkReport(outcomes, num_tokens, counters=counters, num_steps=num_steps, num_job_steps=num_tokens)
        self.calls.num_finished += len(ended)
        return self.calls.after(end - now, report)

    def _run(self, now: float, deadline: float, *, goes_on: bool) -> tuple[float, list[StubJob]]:
        ended = list[StubJob]()
        self._refill(now)
        most_jobs = len(self._jobs)
        while self._jobs and (job := min(self._jobs.values(), key=lambda job: job.end)).end <= deadline:
            now = max(now, job.end)
            ended.append(self._jobs.pop(job.job_id))
            self._refill(now)
            if not goes_on and 2 * len(self._jobs) <= most_jobs:
                return now, ended
        return deadline if self._jobs else now, ended

    def _refill(self, now: float) -> None:
        while self._backlog and len(self._jobs) < self._num_slots:
            self._begin(self._backlog.pop(next(iter(self._backlog))), now)

    def _begin(self, assignment: Assignment, now: float) -> None:
        record = assignment.record
        most = record.job.sampling.max_tokens
        self._jobs[record.job_id] = StubJob(record.job_id, now, assignment.num_reported_tokens, most)

    def _due_counters(self, now: float) -> EngineCounters | None:
        if self._jobs and now - self._counted < COUNTERS_SECONDS:
            return None
        self._counted = now
        return self._counters

    def _drain(self, seconds: float) -> Call:
        outcomes = self._given_back(list(self._jobs), self.calls.clock.now())
        outcomes += [JobOutcome("unbegun", job_id) for job_id in self._backlog]
        self._backlog = {}
        return self.calls.after(0.0, WorkReport(outcomes, is_draining=True))

    def _given_back(self, job_ids: Iterable[str], now: float) -> list[JobOutcome]:
        jobs = [self._jobs.pop(job_id) for job_id in job_ids if job_id in self._jobs]
        return [JobOutcome("released", job.job_id, job.tokens(now)) for job in jobs]


class StubCalls:
    """Calls to stub workers; `at_turn` is called when one is due."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock = clock
        self.at_turn: Callable[[], None] = lambda: None
        self.num_finished = self.num_reports = 0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Call]] = []

    def after(self, seconds: float, answer: WorkerInfo | WorkReport) -> Call:
        call = Call(self.clock.now() + seconds, answer)
        heappush(self._due, (call.due, next(self._order), call))
        return call

    def create_actor(self, worker_id: str, spec: WorkerSpec, code: Code, *, num_cpus: int, num_gpus: int) -> StubWorker:
        return StubWorker(self, f"node of {worker_id}")

    def wait(self, calls: list[Call], seconds: float) -> list[Call]:
        self.at_turn()
        if self._due:
            self.clock.skip_to(min(self._due[0][0], self.clock.now() + seconds))
        now, ended = self.clock.now(), []
        while self._due and self._due[0][0] <= now:
            ended.append(heappop(self._due)[2])
        self.num_reports += len(ended)
        return ended

    def answer(self, call: Call) -> WorkerInfo | WorkReport:
        return call.answer

    def kill(self, actor: StubWorker) -> None:
        pass
