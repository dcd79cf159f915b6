"""Counting workers in simulated time.

Queue, dispatch, intake of reports and choice of evicted jobs are real.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftbatch.jobs.run.output_line import success_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.metrics.counters import DriverCounters
from swiftbatch.scheduler.cluster.worker_actor import WorkerInfo
from swiftbatch.scheduler.driver.dispatch import MEMORY_SHARE, Dispatcher
from swiftbatch.scheduler.driver.queue_loading import load_queue
from swiftbatch.scheduler.driver.worker_fleet import Reported, Speed, StepPace, Worker
from swiftbatch.scheduler.driver.worker_reports import AttemptSettlement, ReportIntake
from swiftbatch.worker.kv.cache_room import CachedJob, CacheRoom
from swiftbatch.worker.kv.kv_capacity import PAGE
from swiftbatch.worker.session.work_messages import Assignment, Backlog, JobOutcome, Orders, OutcomeKind, WorkReport
from tests.jobs.run.run_parts import write_result
from tests.scheduler.driver.driver_parts import make_context, make_run

SLICE = 0.5  # seconds between two reports of a worker


@dataclass(frozen=True)
class StepModel:
    """Seconds of a step that gives each job a token."""

    base: float
    per_job: float

    def seconds(self, num_jobs: int) -> float:
        return self.base + num_jobs * self.per_job


@dataclass(eq=False)
class SimulatedJob:
    """Its cache only has a length."""

    assignment: Assignment
    num_tokens: int
    num_final_tokens: int

    @property
    def cached(self) -> CachedJob:
        cache: Any = None  # only full pools of a GPU look at it
        return CachedJob(cache, self.assignment.growth(self.assignment.num_prompt_tokens, self.num_tokens))

    def outcome(self, kind: OutcomeKind) -> JobOutcome:
        return JobOutcome(kind, self.assignment.job_id, self.num_tokens)


@dataclass(eq=False)
class SimulatedWorker:
    """Advances its jobs and returns those that exceed its memory."""

    run: Run
    lengths: Mapping[str, int]  # final tokens by name
    step: StepModel
    jobs: dict[str, SimulatedJob] = field(default_factory=dict)
    reserve: Backlog = field(default_factory=Backlog)
    tokens: dict[str, int] = field(default_factory=dict)  # tokens of earlier jobs, as in checkpoints
    most_pages: int = 0  # in use at any time
    seconds_left: float = 0.0  # of a step begun in the last slice

    def work(self, orders: Orders, tokens: dict[str, int]) -> WorkReport:
        report = WorkReport([JobOutcome("unbegun", job_id) for job_id in self.reserve.follow(orders)])
        leaving = [job_id for job_id in orders.released if job_id in self.jobs]
        tokens |= {job_id: self.jobs[job_id].num_tokens for job_id in leaving}
        report.outcomes += [self.jobs.pop(job_id).outcome("released") for job_id in leaving]
        for each in orders.assignments:
            self._begin(each, tokens)
        self._refill(orders, tokens)
        self.seconds_left += SLICE
        while self.jobs and self.seconds_left >= (seconds := self.step.seconds(len(self.jobs))):
            self.seconds_left -= seconds
            report.outcomes += self._make_room(orders, tokens)
            report.count_steps(len(self.jobs), 1)
            for job in self._advance():
                report.outcomes += [job.outcome("ended"), job.outcome("finished")]
            self._refill(orders, tokens)
        report.outcomes += [job.outcome("running") for job in self.jobs.values()]
        report.num_generated_tokens = report.num_job_steps
        return report

    def _refill(self, orders: Orders, tokens: dict[str, int]) -> None:
        room = _room(orders)

        def has_room(each: Assignment) -> bool:
            growth = each.growth(each.num_prompt_tokens, each.num_reported_tokens)
            return room.has_room([job.cached for job in self.jobs.values()], growth)

        while (each := self.reserve.next(len(self.jobs), has_room)) is not None:
            self._begin(each, tokens)

    def _begin(self, assignment: Assignment, tokens: dict[str, int]) -> None:
        record = assignment.record
        length = self.lengths[record.job.custom_id]
        self.jobs[record.job_id] = SimulatedJob(assignment, tokens.get(record.job_id, 0), length)

    def _make_room(self, orders: Orders, tokens: dict[str, int]) -> list[JobOutcome]:
        running = sorted(self.jobs.values(), key=lambda job: job.assignment.seniority, reverse=True)
        leaving = running[: _room(orders).num_without_room([job.cached for job in running])]
        if leaving:
            self.reserve.keep_to(len(running) - len(leaving))
        for job in leaving:
            tokens[job.assignment.job_id] = job.num_tokens
            del self.jobs[job.assignment.job_id]
        staying = list(self.jobs.values())
        youngest = max(job.assignment.seniority for job in staying)
        assert all(job.assignment.seniority > youngest for job in leaving), "an older job had to leave"
        if leaving or len(staying) > 1:
            assert _room(orders).can_fit([job.cached for job in staying])
        self.most_pages = max(self.most_pages, CacheRoom().num_taken([job.cached for job in staying]))
        return [job.outcome("evicted") for job in leaving]

    def _advance(self) -> list[SimulatedJob]:
        for job in self.jobs.values():
            job.num_tokens += 1
        ended = [job for job in self.jobs.values() if job.num_tokens >= job.num_final_tokens]
        for job in ended:
            record = job.assignment.record
            fingerprint, ids = self.run.manifest.fingerprint, np.zeros(job.num_tokens, np.uint32)
            shown: dict[str, Any] = {"model": "none", "system_fingerprint": fingerprint, "token_ids": ids}
            write_result(self.run, record.job_id, success_line(record, "run", "", "length", metrics={}, **shown))
            del self.jobs[record.job_id]
        return ended


def _room(orders: Orders) -> CacheRoom:
    room = CacheRoom()
    room.limit(orders.num_pages)
    return room


class SimulatedRun:
    def __init__(
        self,
        folder: Path,
        limits: Mapping[str, int],
        lengths: Mapping[str, int],
        *,
        num_workers: int,
        num_pages: int,
        step: StepModel,
        prompts: Mapping[str, int] = {},
    ) -> None:
        """`limits` are `max_tokens` by job name, `lengths` the tokens at which they end."""
        self.run = make_run(folder, dict(limits), prompts=prompts)
        self.workers = {f"w{i}": SimulatedWorker(self.run, lengths, step) for i in range(num_workers)}
        self.speed, self.pace = Speed(0.0), StepPace()
        self.now = 0.0
        self.num_ended = self.num_slices_evicted = 0
        self.counters = DriverCounters()
        positions = -int(-num_pages * PAGE // MEMORY_SHARE)
        infos = [WorkerInfo("host", 1, None, f"node {name}", "", positions) for name in self.workers]
        self.fleet_workers = [
            Worker(name, None, None, info, speed=Speed(0.0)) for name, info in zip(self.workers, infos, strict=True)
        ]
        self._calls: list[tuple[Worker, Orders]] = []
        self._tokens: dict[str, int] = {}
        queue, fleet = load_queue(self.run, 5), _Fleet(self)
        context = make_context(self.run, fleet, queue, counters=self.counters, workers=num_workers)
        context = replace(context, num_slots=None)
        self.queue, self._dispatcher = queue, Dispatcher(context)
        self._intake = ReportIntake(context, AttemptSettlement(context))

    def to_the_end(self) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: None)  # the disk's time
            return self._to_the_end()

    def _to_the_end(self) -> float:
        while self.queue.num_unfinished:
            self._dispatcher.spread(self.now)
            self._dispatcher.hand_out(self.now)
            calls, self._calls = self._calls, []
            assert calls, "jobs wait, and nobody has any"
            self.now += SLICE
            for worker, orders in calls:
                self._report(worker, self.workers[worker.id].work(orders, self._tokens))
        return self.now

    def note_call(self, worker: Worker, orders: Orders) -> None:
        self._calls.append((worker, orders))

    def _report(self, worker: Worker, report: WorkReport) -> None:
        worker.orders = Orders()
        self.pace.add(report.num_jobs, report.num_generated_tokens, SLICE)
        for speed in (self.speed, worker.speed):
            speed.add(report.num_generated_tokens, self.now)
        self.num_ended += len(report.of("finished"))
        self.num_slices_evicted += bool(report.of("evicted"))
        self._intake.take_in(Reported(worker, report))


class _Fleet:
    def __init__(self, run: SimulatedRun) -> None:
        self._run, self.speed, self.pace = run, run.speed, run.pace

    @property
    def workers(self) -> Sequence[Worker]:
        return self._run.fleet_workers

    @property
    def idle(self) -> Sequence[Worker]:
        return self._run.fleet_workers

    def num_sharing(self, node_id: str) -> int:
        return 1

    def work(self, worker: Worker, orders: Orders, seconds: float, *, has_backlog: bool) -> None:
        self._run.note_call(worker, orders)
