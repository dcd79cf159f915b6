"""The workers of a run: started, waited for, replaced when lost. Which of them has which job, the queue knows."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from swiftbatch.jobs.storage.retries import Backoff
from swiftbatch.scheduler.cluster import ray_actors
from swiftbatch.scheduler.cluster.cluster_watch import AwakeClock
from swiftbatch.scheduler.cluster.ray_actors import last_words
from swiftbatch.scheduler.cluster.worker_actor import WorkerInfo, WorkerSpec
from swiftbatch.scheduler.cluster.worker_code import Code, own_code
from swiftbatch.scheduler.driver.throughput import Speed, StepPace, monotonic
from swiftbatch.worker.session.work_messages import Orders, WorkReport

if TYPE_CHECKING:
    from swiftbatch.scheduler.cluster.ray_cluster import Cluster

NUM_WORKERS = 1  # the default of --workers
WORKER_TIMEOUT = 120.0  # seconds without a report after which a worker is replaced
STORE_SLACK_SECONDS = 30.0  # a worker that waits for the store is to say so before it is given up
RESTART_BACKOFF = Backoff(first=1.0, longest=30.0)
MAX_FAILED_STARTS = 3  # in a row, of all workers
MAX_STARTS_WITHOUT_MEMORY = 6  # in about a minute: a worker that was killed gives a GPU's memory back late
DEATH_REASONS = ("worker_died", "worker_unreachable")  # for a reason of its own, or with its node
SILENCE_CHECK_SECONDS = 1.0  # between two looks for workers that are silent: each goes through all of them
SLICE_SECONDS = 0.5  # the work of a worker between two reports
SECONDS_PER_WORKER = 0.002  # of a slice: from so many workers on, each reports the more seldom the more there are
PATIENCE_FACTOR = 10  # times the patience, where a worker reads a prompt or gigabytes of checkpoints before it reports


def worker_patience(worker_timeout: float | None, store_retry_seconds: float) -> float:
    """Return the seconds without a report after which a worker is replaced."""
    return max(WORKER_TIMEOUT, store_retry_seconds + STORE_SLACK_SECONDS) if worker_timeout is None else worker_timeout


@dataclass(eq=False)
class Worker:
    """One worker and what it is to be told. `call` is its outstanding call; a worker without one is idle."""

    id: str
    actor: Any  # handle of a WorkerActor; Ray's types know handles of decorated classes only
    call: Any  # reference to a WorkerInfo or a WorkReport, or None
    info: WorkerInfo | None = None  # None until it has started
    orders: Orders = field(default_factory=Orders)  # beside new jobs; they stand until its next report
    patience: float = math.inf  # until its call is answered; a start takes as long as it takes
    silent_since: float = 0.0  # on the fleet's clock
    drain_reason: str | None = None  # the reason why it takes no more work: a word for the metrics
    num_fitting: int | None = None  # jobs that were left when its memory ran out, until one of them has left, too
    drain_by: float = 0.0  # in `time.monotonic()` seconds
    speed: Speed = field(default_factory=lambda: Speed(time.monotonic()))
    num_failed_before: int = 0  # starts of the fleet in a row, when this one began

    @property
    def state(self) -> str:
        """A word for the metrics; one that is ready takes work."""
        return "draining" if self.drain_reason else "ready" if self.info else "starting"

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Have it drop jobs that are no longer its own."""
        self.orders = replace(self.orders, cancelled=(*self.orders.cancelled, *job_ids))

    def ask_back(self, job_id: str) -> None:
        self.orders = replace(self.orders, released=(*self.orders.released, job_id))

    def recall(self, job_ids: Iterable[str]) -> None:
        """Have it hand jobs of its reserve back that it has not begun."""
        self.orders = replace(self.orders, recalled=(*self.orders.recalled, *job_ids))


@dataclass(frozen=True)
class Started:
    worker: Worker
    info: WorkerInfo


@dataclass(frozen=True)
class Reported:
    worker: Worker
    report: WorkReport


@dataclass(frozen=True)
class Lost:
    """A worker that is gone, as in `WorkerLostError`: a word for the metrics, and one line for the user."""

    worker: Worker
    reason: str
    message: str


Event = Started | Reported | Lost


def slice_seconds(num_workers: int) -> float:
    """The work of a worker between two reports: among many workers more, so that the driver keeps up with them."""
    return max(SLICE_SECONDS, SECONDS_PER_WORKER * num_workers)


class Calls(Protocol):
    """The way to workers: `scheduler.cluster.remote`, or what stands for it where there are none."""

    def create_actor(self, worker_id: str, spec: WorkerSpec, code: Code, *, num_cpus: int, num_gpus: int) -> Any: ...

    def wait(self, calls: list[Any], seconds: float) -> list[Any]: ...

    def answer(self, call: Any) -> WorkerInfo | WorkReport: ...

    def kill(self, actor: Any) -> None: ...


class Fleet:
    """Keeps up to a wished number of workers alive and carries one call to each at a time.

    A started worker that does not answer for `timeout` seconds is lost. What changes with events is kept up to date, so
    that a turn of the driver's loop need not go through all workers.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        cluster: Cluster,
        timeout: float,
        calls: Calls = ray_actors,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._spec, self._calls, self._now = spec, calls, clock
        self._code = own_code(is_sent=not cluster.is_embedded)
        self._cluster = cluster
        self._timeout = timeout
        self._clock = AwakeClock()
        self._num_created = 0
        self._restart_not_before = 0.0
        self.num_failed_starts = 0  # in a row; a worker that starts sets it back
        self.speed = Speed(clock())  # the speed of all workers, the lost ones too
        self.pace = StepPace()
        self.workers: list[Worker] = []
        self.idle: dict[Worker, None] = {}  # those without a call, in the order of their last answers
        self._calls_out: dict[Any, Worker] = {}
        self._num_draining = self._num_starting = 0
        self._num_on_nodes: Counter[str] = Counter()  # started workers
        self._looked = 0.0

    def fill(self, num_workers: int, now: float) -> None:
        """Start workers until there are `num_workers` that stay; after a failed start, wait longer each time."""
        num_staying = len(self.workers) - self._num_draining
        for _ in range(num_workers - num_staying if now >= self._restart_not_before else 0):
            self._num_created += 1
            worker_id = f"w{self._num_created}"
            num_cpus, num_gpus = self._cluster.num_cpus_per_worker(), self.num_gpus_per_worker()
            actor = self._calls.create_actor(worker_id, self._spec, self._code, num_cpus=num_cpus, num_gpus=num_gpus)
            worker = Worker(worker_id, actor, actor.start.remote(), speed=Speed(self._now()))
            worker.num_failed_before = self.num_failed_starts
            self.workers.append(worker)
            self._calls_out[worker.call] = worker
            self._num_starting += 1

    def num_sharing(self, node_id: str) -> int:
        """The workers that share a node's memory: those there, and those that start and may come to it."""
        return self._num_on_nodes[node_id] + self._num_starting

    def num_gpus_per_worker(self) -> int:
        """1 where each worker has a GPU to itself, 0 where they run on CPUs."""
        return self._cluster.num_gpus_per_worker(self._spec.config.device)

    def leaving(self) -> list[tuple[Worker, float]]:
        """Workers that take work on nodes that are about to go, with the seconds until then.

        Raises ClusterLostError if the cluster is gone.
        """
        if self._cluster.watch is None:
            return []
        self._cluster.watch.check()
        if not (draining := self._cluster.watch.draining()):
            return []
        staying = [(worker, worker.info) for worker in self.workers if worker.info and worker.state == "ready"]
        return [(worker, draining[info.node_id]) for worker, info in staying if info.node_id in draining]

    def begin_drain(self, worker: Worker, reason: str, seconds: float) -> None:
        """Let a worker take no more work, and hand all jobs back in `seconds`; `reason` is a word for the metrics."""
        if worker.drain_reason is None:
            worker.drain_reason, worker.drain_by = reason, time.monotonic() + seconds
            self._num_draining += 1

    def work(self, worker: Worker, orders: Orders, seconds: float, *, has_backlog: bool = False) -> None:
        """Have an idle worker follow orders; with a reserve, of earlier orders too, it may begin with jobs any time."""
        is_longer = orders.assignments or has_backlog or orders.released
        self._await(
            worker, worker.actor.work.remote(orders, seconds), self._timeout * (PATIENCE_FACTOR if is_longer else 1)
        )

    def drain(self, worker: Worker) -> None:
        """Have an idle worker write its checkpoints, in the time that it is to drain in, and hand its jobs back."""
        seconds = max(0.0, worker.drain_by - time.monotonic())
        self._await(worker, worker.actor.drain.remote(seconds), seconds + self._timeout)

    def wait(self, seconds: float, now: float) -> list[Event]:
        """Wait at most `seconds`, and return the events since."""
        if not self._calls_out:
            return []
        answered = self._calls.wait(list(self._calls_out), seconds)
        events = [self._event(self._calls_out.pop(call), now) for call in answered]
        return [*events, *self._silent()]

    def retire(self, worker: Worker) -> None:
        """End a worker that is no longer wanted, or out of reach, or broken inside: it must not work on."""
        self._calls.kill(worker.actor)
        self.workers.remove(worker)
        self.idle.pop(worker, None)
        self._calls_out.pop(worker.call, None)
        self._num_draining -= worker.drain_reason is not None
        if worker.info is None:
            self._num_starting -= 1
        else:
            self._num_on_nodes[worker.info.node_id] -= 1

    def stop(self) -> None:
        """End all workers at once; what they had not written yet is recomputed on resume."""
        for worker in list(self.workers):
            self.retire(worker)

    def _await(self, worker: Worker, call: Any, patience: float) -> None:
        self._calls_out.pop(worker.call, None)
        self._calls_out[call] = worker
        worker.call, worker.patience, worker.silent_since = call, patience, self._clock.now()
        self.idle.pop(worker, None)

    def _silent(self) -> list[Event]:
        """Give up the workers whose answer is overdue: stopped, hanging or cut off, they hold their jobs up."""
        now = self._clock.now()
        if now - self._looked < SILENCE_CHECK_SECONDS:
            return []
        self._looked = now
        waited_for = self._calls_out.values()
        overdue = [worker for worker in waited_for if now - worker.silent_since > worker.patience]
        for worker in overdue:
            self.retire(worker)
        return [Lost(worker, "worker_silent", f"it has not reported for {worker.patience:.0f} s") for worker in overdue]

    def _event(self, worker: Worker, now: float) -> Event:
        call, worker.call = worker.call, None
        try:
            answer = self._calls.answer(call)
        except ray_actors.WorkerLostError as error:
            return self._lose(worker, error, now)
        self.idle[worker] = None
        if isinstance(answer, WorkerInfo):
            worker.info = answer
            self.num_failed_starts = 0
            self._num_starting -= 1
            self._num_on_nodes[answer.node_id] += 1
            return Started(worker, answer)
        worker.orders = Orders()
        self.pace.add(answer.num_jobs, answer.num_generated_tokens, self._clock.now() - worker.silent_since)
        for speed in (self.speed, worker.speed):
            speed.add(answer.num_generated_tokens, self._now())
        return Reported(worker, answer)

    def _lose(self, worker: Worker, error: ray_actors.WorkerLostError, now: float) -> Lost:
        self.retire(worker)
        message = str(error)
        if worker.info is None:
            message += last_words(self._spec.log_folder, worker.id)
            self.num_failed_starts += self._blames_the_start(worker, error.reason)
            self._restart_not_before = now + RESTART_BACKOFF.seconds(max(1, self.num_failed_starts))
        return Lost(worker, error.reason, message)

    def _blames_the_start(self, worker: Worker, reason: str) -> bool:
        """Return whether a loss tells that workers do not start, so that a few of them end the run.

        A node that goes says nothing of that. It takes all its workers along, and Ray may not know yet why they died:
        of those that were started together, only the first counts.
        """
        if reason in (ray_actors.NODE_LOST, ray_actors.NODE_DRAINED):
            return False
        return reason not in DEATH_REASONS or worker.num_failed_before == self.num_failed_starts
