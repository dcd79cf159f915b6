"""Workers that only say that they work, on a clock of their own: a driver with a thousand of them fits one core.

The driver is the real one, with its queue, its attempts and its heartbeat. Left out are Ray, and what workers write.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from swiftbatch.metrics.worker_counters import EngineCounters
from swiftbatch.scheduler.cluster.actors import WorkerInfo, WorkerSpec
from swiftbatch.scheduler.cluster.bootstrap import Code
from swiftbatch.worker.session.work import JobProgress, Orders, WorkReport

TOKENS_PER_SECOND = 200.0  # of each job
NUM_POSITIONS = 10_000_000  # that a worker has room for


class SimulatedClock:
    """Counts this process's CPU time, and skips over what it would wait for."""

    def __init__(self) -> None:
        self._skipped = -time.process_time()

    def now(self) -> float:
        return self._skipped + time.process_time()

    def skip_to(self, then: float) -> None:
        self._skipped += max(0.0, then - self.now())


@dataclass(frozen=True, eq=False)
class Call:
    """Stands for a reference to an answer, which is there at `due`."""

    due: float
    answer: WorkerInfo | WorkReport


@dataclass(frozen=True)
class Method:
    """Called as a method of a Ray actor is."""

    function: Callable[..., Call]

    def remote(self, *args: Any) -> Call:
        return self.function(*args)


@dataclass(eq=False)
class StubWorker:
    """Has every job generate at one speed, and finishes it after as many tokens as it may have."""

    calls: StubCalls
    _jobs: dict[str, tuple[float, int, int]] = field(default_factory=dict)  # begin, tokens then, tokens at the end
    _counters: EngineCounters = field(default_factory=EngineCounters)

    def __post_init__(self) -> None:
        info = WorkerInfo("simulated", 0, None, "node", "", NUM_POSITIONS)
        self.start = Method(lambda: self.calls.after(0.0, info))
        self.work, self.drain = Method(self._work), Method(self._drain)

    def _work(self, orders: Orders, seconds: float) -> Call:
        now = self.calls.clock.now()
        released = self._given_back(orders.released, now)
        for job_id in orders.cancelled:
            self._jobs.pop(job_id, None)
        for assignment in orders.assignments:
            record = assignment.record
            self._jobs[record.job_id] = (now, assignment.num_reported_tokens, record.job.sampling.max_tokens)
        progress = [self._progress(job_id, now + seconds) for job_id in self._jobs]
        finished = tuple(each for each in progress if each.num_generated_tokens == self._jobs[each.job_id][2])
        for each in finished:
            del self._jobs[each.job_id]
        self.calls.num_finished += len(finished)
        self._counters.num_generation_tokens += (num_new := int(len(progress) * seconds * TOKENS_PER_SECOND))
        running = tuple(each for each in progress if each.job_id in self._jobs)
        report = WorkReport(running, finished, (), num_new, released, counters=self._counters, ended=finished)
        return self.calls.after(seconds if progress else 0.0, report)

    def _drain(self, seconds: float) -> Call:
        released = self._given_back(list(self._jobs), self.calls.clock.now())
        return self.calls.after(0.0, WorkReport(released=released, is_draining=True))

    def _given_back(self, job_ids: Iterable[str], now: float) -> tuple[JobProgress, ...]:
        progress = tuple(self._progress(job_id, now) for job_id in job_ids)
        for each in progress:
            del self._jobs[each.job_id]
        return progress

    def _progress(self, job_id: str, now: float) -> JobProgress:
        begin, num_tokens, most = self._jobs[job_id]
        return JobProgress(job_id, min(most, num_tokens + int((now - begin) * TOKENS_PER_SECOND)))


class StubCalls:
    """The way to stub workers, see `scheduler.driver.worker_fleet.Calls`. `at_turn` is called whenever one is due."""

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
        return StubWorker(self)

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
