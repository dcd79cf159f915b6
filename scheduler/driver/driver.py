"""The driver's loop.

The run folder holds all that the driver knows, so another driver can continue at any moment.
"""

from __future__ import annotations

import contextlib
import math
import time

from swiftbatch.jobs.errors import ModelError, UserError
from swiftbatch.jobs.python_processes import rare_garbage_collection
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError, RunState
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.scheduler.cluster.ray_actors import NO_MEMORY, OTHER_CODE, OTHER_MODEL
from swiftbatch.scheduler.cluster.ray_cluster import ClusterLostError
from swiftbatch.scheduler.display.events import DriverStarted, LimitReached, RunStopping, WorkerStopping
from swiftbatch.scheduler.driver.dispatch import Dispatcher
from swiftbatch.scheduler.driver.queue_loading import put_logs_in_place
from swiftbatch.scheduler.driver.run_lease import RunLease
from swiftbatch.scheduler.driver.run_progress import DriverContext, ProgressCounter
from swiftbatch.scheduler.driver.shard_writing import ShardWriter
from swiftbatch.scheduler.driver.worker_fleet import (
    MAX_FAILED_STARTS,
    MAX_STARTS_WITHOUT_MEMORY,
    Event,
    Lost,
    slice_seconds,
)
from swiftbatch.scheduler.driver.worker_reports import MAX_VAIN_GPU_FAILURES, AttemptSettlement, ReportIntake

WAIT_SECONDS = 0.2
DRAIN_SLACK_SECONDS = 1.0  # wait for a drained worker's report
LOST_CLUSTER_SECONDS = 20.0  # Ray ends a process 60 s after its head was lost, of which half has passed


class DriverError(UserError):
    """A run that can't go on."""


class Driver:
    def __init__(self, context: DriverContext, hold: RunLease) -> None:
        self._context = context
        self._hold, self._clock = hold, context.clock
        self._run, self._queue, self._fleet = context.run, context.queue, context.fleet
        self._settlement = AttemptSettlement(context)
        self._intake = ReportIntake(context, self._settlement)
        self._dispatcher = Dispatcher(context)
        self._census = ProgressCounter(context)
        self._sharding = ShardWriter(context.run, hold.epoch, context.display)
        self.is_stopping = False  # a signal asked for it
        self.reached_limit: str | None = None  # why the run is unfinished, for people

    def request_stop(self) -> None:
        """Ask the loop to end soon; safe in a signal handler."""
        self.is_stopping = True

    def run(self) -> RunState:
        """Run to the last job, a limit or a requested stop, then write the output files.

        Raises DriverError, RunTakenError, ClusterLostError, ModelError and StoreError.
        """
        state: RunState = "interrupted"
        try:
            self._hold.stop_beating()
            self._beat("running")
            epoch = self._hold.epoch
            self._context.display.note(DriverStarted(epoch.claim.host, epoch.claim.pid, epoch.number))
            with rare_garbage_collection():
                while self._queue.num_unfinished and not self._is_to_stop():
                    self._step()
            if self._queue.num_unfinished:
                self._context.display.note(LimitReached(self.reached_limit) if self.reached_limit else RunStopping())
                self._drain_all("driver_stopped")
            self._context.attempts.end()
            self._context.counters.has_ended = True
            state = self._write_output()
        except ClusterLostError:
            # calls reach workers even without the cluster's head
            self._drain_all("cluster_lost", LOST_CLUSTER_SECONDS)
            raise
        except StoreError:
            run = Run(Store(self._run.store.uri), self._run.manifest)  # without further retries
            self._hold.go_on_through(run)
            raise
        finally:
            self._context.attempts.stop()
            self._intake.stop()
            self._fleet.stop()
            self._sharding.stop()
            with contextlib.suppress(StoreError, RunError):  # the original error matters more
                self._beat(state)
        return state

    def _is_to_stop(self) -> bool:
        if not self.is_stopping:
            self.reached_limit = self._context.limits.reached(self._context.spent)
        return self.is_stopping or self.reached_limit is not None

    def _step(self) -> None:
        now = self._clock()
        # comes first, because it fails if another driver took the run
        if self._hold.is_due(now, slice_seconds(len(self._fleet.workers))):
            self._beat("running")
            self._context.attempts.keep()
            with self._hold.beating():  # there may be a hundred thousand
                self._settlement.take_cancel_requests()
            self._sharding.look(self._queue.counts()["finished"], self._queue.num_generated_tokens)
        for worker, seconds in self._fleet.leaving():
            self._context.display.note(WorkerStopping(worker.id, "node_drained"))
            self._fleet.begin_drain(worker, "node_drained", min(self._context.grace_seconds, seconds))
        self._fleet.fill(min(self._context.num_workers, self._queue.num_to_run), now)
        self._dispatcher.spread(now)
        self._dispatcher.hand_out(now)
        events = self._fleet.wait(WAIT_SECONDS, now)
        for event in events:
            self._intake.take_in(event)
        self._intake.settle()
        self._refuse_others(events)
        self._refuse_failed_gpus(events)
        self._refuse_endless_starts(events)
        if not events and len(self._fleet.idle) == len(self._fleet.workers):
            time.sleep(WAIT_SECONDS)  # every remaining job waits for its next attempt

    def _drain_all(self, reason: str, longest: float = math.inf) -> None:
        """Let workers return jobs within the grace period."""
        seconds = min(self._context.grace_seconds, longest)
        for worker in self._fleet.workers:
            self._fleet.begin_drain(worker, reason, seconds)
        last = self._clock() + seconds + DRAIN_SLACK_SECONDS
        while self._queue.handed_out() and (now := self._clock()) < last:
            self._dispatcher.hand_out(now)
            for event in self._fleet.wait(WAIT_SECONDS, now):
                self._intake.take_in(event)
            self._intake.settle()
            if self._hold.is_due(now):
                self._beat("running")

    def _refuse_others(self, events: list[Event]) -> None:
        """Raise DriverError if a worker's model or code differs, after the others returned their jobs."""
        for event in events:
            if isinstance(event, Lost) and event.reason in (OTHER_MODEL, OTHER_CODE):
                self._drain_all("driver_stopped")
                raise DriverError(event.message)

    def _refuse_failed_gpus(self, events: list[Event]) -> None:
        """Raise DriverError if GPUs fail again and again and no job gets on."""
        for event in events:
            if isinstance(event, Lost) and event.gpus and self._intake.num_vain_gpu_failures >= MAX_VAIN_GPU_FAILURES:
                self._drain_all("driver_stopped")
                self._context.attempts.end()
                failed = ", ".join(f"{gpu} ({num} times)" for gpu, num in sorted(self._fleet.gpu_failures.items()))
                raise DriverError(
                    f"no job gets on, since GPUs fail: {failed}, at last with: {event.message}; nothing is lost: mend "
                    "them, or resume elsewhere"
                )

    def _refuse_endless_starts(self, events: list[Event]) -> None:
        if any(worker.info for worker in self._fleet.workers):
            return
        for event in events:
            if isinstance(event, Lost) and event.reason == "model_refused":  # a retry would fail the same way
                raise ModelError(event.message)
            if not isinstance(event, Lost):
                continue
            most = MAX_STARTS_WITHOUT_MEMORY if event.reason == NO_MEMORY else MAX_FAILED_STARTS
            if self._fleet.num_failed_starts >= most:
                raise DriverError(f"no worker starts, {most} tries: {event.message}")

    def _write_output(self) -> RunState:
        """Write the output files and the last shards; return the run's state."""
        state = self._end_state()
        self._fleet.stop()
        with self._hold.beating():
            put_logs_in_place(self._run, have_all_gone=True)  # those of crashed workers
            self._sharding.finish(is_end=state != "interrupted")
            self._run.write_output(self._hold.epoch.check)
        return state

    def _end_state(self) -> RunState:
        if self._queue.num_unfinished:
            return "interrupted"
        self.reached_limit = None  # the remaining jobs finished meanwhile
        is_whole_run, _ = self._run.cancel_requests()
        self._run.clear_cancel()
        return "cancelled" if is_whole_run else "finished"

    def _beat(self, state: RunState) -> None:
        """Show and write the heartbeat. Raises RunTakenError."""
        self._hold.epoch.check()
        at_risk = self._intake.tokens_at_risk()
        if state != "running":
            self._queue.stop_running()
        figures = self._census.take(self._clock())
        limit = None if state == "running" else self.reached_limit
        self._context.display.update(self._hold.beat(state=state, running=at_risk, reached_limit=limit, **figures))
        self._context.counters.last_beat = time.time()
        self._context.write_metrics()
