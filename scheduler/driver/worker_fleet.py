"""The workers of a run: start, wait, replace; their speed and the duration of their steps."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from swiftbatch.jobs.storage.retries import Backoff
from swiftbatch.scheduler.cluster import ray_actors
from swiftbatch.scheduler.cluster.ray_actors import last_words
from swiftbatch.scheduler.cluster.ray_cluster import AwakeClock
from swiftbatch.scheduler.cluster.worker_actor import RefusedGPUs, WorkerInfo, WorkerSpec
from swiftbatch.scheduler.cluster.worker_code import Code, own_code
from swiftbatch.scheduler.driver.run_limits import monotonic
from swiftbatch.worker.session.work_messages import Orders, WorkReport

if TYPE_CHECKING:
    from swiftbatch.scheduler.cluster.ray_cluster import Cluster

DECAY = 0.99  # weight of a report after each newer one
JOB_SHARE = 0.6  # prior share of a step's time that grows with its jobs
DOUBT = 4.0  # variance of job numbers at which reports weigh as much as the prior

RATE_SECONDS = 20.0  # the speed covers this time


class Speed:
    """Recent tokens per second; `now` is in `time.monotonic()` seconds."""

    def __init__(self, now: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])

    def add(self, num_tokens: int, now: float) -> None:
        if self._samples[0][1] == self._samples[-1][1]:  # starts, prompts and replays so far, which are no sample
            self._samples = deque([self._samples[-1]])
        self._samples.append((now, self._samples[-1][1] + num_tokens))
        while len(self._samples) > 2 and self._samples[1][0] < now - RATE_SECONDS:
            self._samples.popleft()

    def tokens_per_second(self, now: float) -> float:
        first, last = self._samples[0], self._samples[-1]
        return (last[1] - first[1]) / max(now - first[0], 1e-3)


class StepPace:
    """A linear fit to workers' reports: seconds per token as a function of the number of jobs on a worker."""

    def __init__(self) -> None:
        self._weight = self._num_jobs = self._seconds = self._num_jobs_squared = self._product = 0.0

    def add(self, num_jobs: float, num_tokens: int, seconds: float) -> None:
        """Add a report: `num_jobs` jobs at a time drew `num_tokens` tokens in total within `seconds`."""
        if not num_jobs or not num_tokens:
            return
        per_token = num_jobs * seconds / num_tokens
        sums = (self._weight, self._num_jobs, self._seconds, self._num_jobs_squared, self._product)
        news = (1.0, num_jobs, per_token, num_jobs**2, num_jobs * per_token)
        (self._weight, self._num_jobs, self._seconds, self._num_jobs_squared, self._product) = (
            DECAY * total + new for total, new in zip(sums, news, strict=True)
        )

    def seconds_per_token(self, num_jobs: int) -> float:
        """Return a job's seconds per token on a worker with `num_jobs` jobs, or 0.0 without reports."""
        if not self._weight:
            return 0.0
        mean_jobs, mean_seconds = self._num_jobs / self._weight, self._seconds / self._weight
        spread = self._num_jobs_squared / self._weight - mean_jobs**2
        together = self._product / self._weight - mean_jobs * mean_seconds
        slope = (together + DOUBT * JOB_SHARE * mean_seconds / mean_jobs) / (spread + DOUBT)
        least = (1 - JOB_SHARE) / 2 * mean_seconds
        return max(least, mean_seconds + max(0.0, slope) * (num_jobs - mean_jobs))


NUM_WORKERS = 1  # the default of --workers
WORKER_TIMEOUT = 120.0  # seconds without a report until a worker is replaced
STORE_SLACK_SECONDS = 30.0  # lets a worker report that it waits for the store
RESTART_BACKOFF = Backoff(first=1.0, longest=30.0)
MAX_FAILED_STARTS = 3  # in a row, over all workers
MAX_STARTS_WITHOUT_MEMORY = 6  # about a minute: a killed worker's GPU memory is freed late
DEATH_REASONS = ("worker_died", "worker_unreachable")  # its own or its node's
MAX_GPU_FAILURES = 2  # in a run; then the GPU gets no more workers, unless it is the last one
SILENCE_CHECK_SECONDS = 1.0  # each check visits all workers
SLICE_SECONDS = 0.5  # work between two reports
SECONDS_PER_WORKER = 0.002  # slice per worker: many workers report less often
PATIENCE_FACTOR = 10  # more patience while a worker reads prompts or checkpoints before it reports


def worker_patience(worker_timeout: float | None, store_retry_seconds: float) -> float:
    return max(WORKER_TIMEOUT, store_retry_seconds + STORE_SLACK_SECONDS) if worker_timeout is None else worker_timeout


@dataclass(eq=False)
class Worker:
    """One worker and its pending orders; a worker without a `call` is idle."""

    id: str
    actor: Any  # handle of a `WorkerProcess`; Ray only types decorated classes
    call: Any  # reference to a WorkerInfo or WorkReport, or None
    info: WorkerInfo | None = None  # None until it has started
    ready_at: float = 0.0  # in `time.monotonic()` seconds, once there is an `info`
    orders: Orders = field(default_factory=Orders)  # besides new jobs, until its next report
    patience: float = math.inf  # seconds for the present call; a start is unlimited
    silent_since: float = 0.0  # time on the fleet's clock
    drain_reason: str | None = None  # a label for metrics; None while it takes work
    num_fitting: int | None = None  # jobs it kept when memory ran out, until one leaves
    drain_by: float = 0.0  # in `time.monotonic()` seconds
    speed: Speed = field(default_factory=lambda: Speed(time.monotonic()))
    num_failed_before: int = 0  # the fleet's failed starts in a row when this one began

    @property
    def state(self) -> str:
        """Return the worker's state for metrics; only a ready worker takes work."""
        return "draining" if self.drain_reason else "ready" if self.info else "starting"

    def cancel(self, job_ids: Iterable[str]) -> None:
        self.orders = replace(self.orders, cancelled=(*self.orders.cancelled, *job_ids))

    def ask_back(self, job_id: str) -> None:
        self.orders = replace(self.orders, released=(*self.orders.released, job_id))

    def recall(self, job_ids: Iterable[str]) -> None:
        """Order the worker to return these reserved jobs."""
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
    """A lost worker, as in `WorkerLostError`; `gpus` are its GPUs, if one of them failed.

    Those that are `left_out` get no more workers from now on; `is_last` says that no others are left for a worker.
    """

    worker: Worker
    reason: str
    message: str
    gpus: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    is_last: bool = False


Event = Started | Reported | Lost


def slice_seconds(num_workers: int) -> float:
    """Return the seconds between a worker's reports, which grow with the number of workers."""
    return max(SLICE_SECONDS, SECONDS_PER_WORKER * num_workers)


class Calls(Protocol):
    """Calls to workers: `scheduler.cluster.ray_actors` or a substitute."""

    def create_actor(self, worker_id: str, spec: WorkerSpec, code: Code, *, num_cpus: int, num_gpus: int) -> Any: ...

    def wait(self, calls: list[Any], seconds: float) -> list[Any]: ...

    def answer(self, call: Any) -> WorkerInfo | RefusedGPUs | WorkReport: ...

    def kill(self, actor: Any) -> None: ...


class Fleet:
    """Keeps a number of workers alive, with one call to each.

    A started worker without an answer for `timeout` seconds is lost.
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
        self.num_failed_starts = 0  # in a row; a successful start resets it
        self.speed = Speed(clock())  # speed of all workers, also lost ones
        self.pace = StepPace()
        self.workers: list[Worker] = []
        self.idle: dict[Worker, None] = {}  # without a call, in the order of their answers
        self._calls_out: dict[Any, Worker] = {}
        self._num_draining = self._num_starting = 0
        self._num_on_nodes: Counter[str] = Counter()  # started workers
        self._ended_seconds = 0.0  # of workers that have ended
        self._looked = 0.0
        self.gpu_failures: Counter[str] = Counter()  # by UUID
        self._gpus: set[str] = set()  # UUIDs of all that had a worker
        self._failed_gpus: set[str] = set()  # those that get no more workers
        self._placeholders: list[Any] = []  # actors that hold failed GPUs, so that no worker gets them

    def fill(self, num_workers: int, now: float) -> None:
        """Start workers up to `num_workers`; after failed starts, with growing pauses."""
        num_staying = len(self.workers) - self._num_draining
        num_wanted = min(num_workers, self._most_workers()) - num_staying
        for _ in range(num_wanted if now >= self._restart_not_before else 0):
            self._num_created += 1
            worker_id = f"w{self._num_created}"
            num_cpus, num_gpus = self._cluster.num_cpus_per_worker(), self.num_gpus_per_worker()
            actor = self._calls.create_actor(worker_id, self._spec, self._code, num_cpus=num_cpus, num_gpus=num_gpus)
            call = actor.start.remote(frozenset(self._failed_gpus))
            worker = Worker(worker_id, actor, call, speed=Speed(self._now()))
            worker.num_failed_before = self.num_failed_starts
            self.workers.append(worker)
            self._calls_out[worker.call] = worker
            self._num_starting += 1

    def _most_workers(self) -> int:
        """Return how many workers there can be; a running cluster may get more GPUs."""
        if not self._placeholders or not self._cluster.is_embedded:
            return sys.maxsize
        return self._cluster.num_gpus // self.num_gpus_per_worker() - len(self._placeholders)

    def num_sharing(self, node_id: str) -> int:
        """Count the workers that share a node's memory, and all starting ones."""
        return self._num_on_nodes[node_id] + self._num_starting

    def worker_seconds(self, now: float) -> float:
        """Return the seconds from each worker's readiness to its end, or to `now`, summed over all workers so far."""
        return self._ended_seconds + sum(now - worker.ready_at for worker in self.workers if worker.info)

    def num_gpus_per_worker(self) -> int:
        config = self._spec.config
        return config.num_gpus_per_worker if self._cluster.gives_gpus(config.device) else 0

    def leaving(self) -> list[tuple[Worker, float]]:
        """Return working workers on leaving nodes, with the seconds left.

        Raises ClusterLostError.
        """
        if self._cluster.watch is None:
            return []
        self._cluster.watch.check()
        if not (draining := self._cluster.watch.draining()):
            return []
        staying = [(worker, worker.info) for worker in self.workers if worker.info and worker.state == "ready"]
        return [(worker, draining[info.node_id]) for worker, info in staying if info.node_id in draining]

    def begin_drain(self, worker: Worker, reason: str, seconds: float) -> None:
        """Drain a worker; `reason` is a label for metrics."""
        if worker.drain_reason is None:
            worker.drain_reason, worker.drain_by = reason, time.monotonic() + seconds
            self._num_draining += 1

    def work(self, worker: Worker, orders: Orders, seconds: float, *, has_backlog: bool = False) -> None:
        """Send orders to an idle worker."""
        is_longer = orders.assignments or has_backlog or orders.released
        self._await(
            worker, worker.actor.work.remote(orders, seconds), self._timeout * (PATIENCE_FACTOR if is_longer else 1)
        )

    def drain(self, worker: Worker) -> None:
        """Let an idle worker write checkpoints and return its jobs."""
        seconds = max(0.0, worker.drain_by - time.monotonic())
        self._await(worker, worker.actor.drain.remote(seconds), seconds + self._timeout)

    def wait(self, seconds: float, now: float) -> list[Event]:
        if not self._calls_out:
            return []
        answered = self._calls.wait(list(self._calls_out), seconds)
        events = [self._event(self._calls_out.pop(call), now) for call in answered]
        return [*(event for event in events if event is not None), *self._silent()]

    def retire(self, worker: Worker) -> None:
        """Kill a worker that is no longer wanted, unreachable or broken."""
        self._calls.kill(worker.actor)
        self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self.idle.pop(worker, None)
        self._calls_out.pop(worker.call, None)
        self._num_draining -= worker.drain_reason is not None
        if worker.info is None:
            self._num_starting -= 1
        else:
            self._num_on_nodes[worker.info.node_id] -= 1
            self._ended_seconds += self._now() - worker.ready_at

    def stop(self) -> None:
        """Kill all workers; a resume recomputes unwritten tokens."""
        for worker in list(self.workers):
            self.retire(worker)
        while self._placeholders:
            self._calls.kill(self._placeholders.pop())

    def _await(self, worker: Worker, call: Any, patience: float) -> None:
        self._calls_out.pop(worker.call, None)
        self._calls_out[call] = worker
        worker.call, worker.patience, worker.silent_since = call, patience, self._clock.now()
        self.idle.pop(worker, None)

    def _silent(self) -> list[Event]:
        now = self._clock.now()
        if now - self._looked < SILENCE_CHECK_SECONDS:
            return []
        self._looked = now
        waited_for = self._calls_out.values()
        overdue = [worker for worker in waited_for if now - worker.silent_since > worker.patience]
        for worker in overdue:
            self.retire(worker)
        return [Lost(worker, "worker_silent", f"it has not reported for {worker.patience:.0f} s") for worker in overdue]

    def _event(self, worker: Worker, now: float) -> Event | None:
        call, worker.call = worker.call, None
        try:
            answer = self._calls.answer(call)
        except ray_actors.WorkerLostError as error:
            return self._lose(worker, error, now)
        if isinstance(answer, RefusedGPUs):
            self._forget(worker)
            self._placeholders.append(worker.actor)
            self._failed_gpus.update(answer.gpus)  # the others of the process are held as well
            return None
        self.idle[worker] = None
        if isinstance(answer, WorkerInfo):
            worker.info, worker.ready_at = answer, self._now()
            self.num_failed_starts = 0
            self._num_starting -= 1
            self._num_on_nodes[answer.node_id] += 1
            self._gpus.update(answer.gpus)
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
            self.num_failed_starts += self._blames_the_start(worker, error)
            self._restart_not_before = now + RESTART_BACKOFF.seconds(max(1, self.num_failed_starts))
        gpus = error.gpus if worker.info is None else worker.info.gpus
        if not gpus or error.reason != ray_actors.GPU_FAILED:
            return Lost(worker, error.reason, message)
        return self._lose_gpus(worker, message, gpus)

    def _lose_gpus(self, worker: Worker, message: str, gpus: tuple[str, ...]) -> Lost:
        """Count a failure of each GPU; behind two it gets no more workers, unless too few others are left for one."""
        self.gpu_failures.update(gpus)
        self._gpus.update(gpus)
        num_unseen = max(0, self._cluster.num_gpus - len(self._gpus))
        is_last = num_unseen + len(self._gpus - self._failed_gpus - set(gpus)) < self.num_gpus_per_worker()
        failed = [] if is_last else [gpu for gpu in gpus if self.gpu_failures[gpu] == MAX_GPU_FAILURES]
        self._failed_gpus.update(failed)
        return Lost(worker, ray_actors.GPU_FAILED, message, gpus, tuple(failed), is_last)

    def _blames_the_start(self, worker: Worker, error: ray_actors.WorkerLostError) -> bool:
        """Return whether a loss counts as a failed start.

        Lost nodes and known GPUs do not count; of workers started together, only the first does.
        """
        reason = error.reason
        if reason in (ray_actors.NODE_LOST, ray_actors.NODE_DRAINED) or error.gpus:
            return False
        return reason not in DEATH_REASONS or worker.num_failed_before == self.num_failed_starts
