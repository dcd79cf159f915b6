"""Run a run's unfinished jobs: cluster up, driver loop, signals, output files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from jobs.run.records import RunState
from jobs.run.run import Run, RunManifest
from jobs.storage.retries import Retries
from jobs.storage.store import StoreError
from jobs.storage.uris import local_path
from metrics.counters import DriverCounters
from scheduler.cluster.actors import SESSION_FACTORY, WorkerSpec
from scheduler.cluster.cluster import Cluster, ClusterError, connect
from scheduler.cluster.watch import ClusterLostError
from scheduler.display.display import Display
from scheduler.display.job_events import LineDamaged
from scheduler.driver.backlog import count_jobs, load_queue
from scheduler.driver.context import Context
from scheduler.driver.driver import Driver, DriverError
from scheduler.driver.endpoint import served_metrics
from scheduler.driver.fleet import DEFAULT_TIMEOUT, Fleet
from scheduler.driver.hold import Hold
from scheduler.driver.job_queue import JobQueue
from scheduler.process.interruption import held
from worker.caches.room import check_folder
from worker.config import EngineConfig
from worker.drafters.parts import check_parts

STORE_SLACK_SECONDS = 30.0


@dataclass(frozen=True)
class LaunchOptions:
    """How to run, which changes no output: it may differ from one resume to the next."""

    num_workers: int = 1
    num_slots: int = 1
    address: str | None = None  # of a running cluster; None for an embedded Ray
    engine: str | None = None  # None for the run's own
    draft_model: str | None = None  # None for the run's own
    kv_offload: str | None = None  # None for the run's own
    max_attempts: int = 5
    checkpoint: str = "state"  # as in `EngineConfig`, like the next four
    checkpoint_tokens: int = 1024
    checkpoint_seconds: float = 5.0
    grace_seconds: float = 20.0
    store_retry_seconds: float = 120.0
    worker_timeout: float | None = None  # seconds without a report; None for the default
    metrics_port: int | None = None
    session_factory: str = SESSION_FACTORY


@dataclass(frozen=True)
class Outcome:
    """How a run stands when its driver ends."""

    state: RunState
    jobs: dict[str, int]

    @property
    def num_without_result(self) -> int:
        return sum(count for state, count in self.jobs.items() if state != "finished")


def launch(hold: Hold, options: LaunchOptions, display: Display) -> Outcome:
    """Run what is unfinished of the run that is held, and write the output files, also after an interruption.

    Raises ClusterError, DriverError, KVRoomError, MetricsError, ModelError, RunTakenError and StoreError, each with
    one line for the user.
    """
    counters = DriverCounters()
    run = Run.open(hold.epoch.run.store.uri, Retries(options.store_retry_seconds, counters.count_store_retry))
    hold.go_on_through(run)
    with _told_how_to_go_on(run):
        queue = load_queue(run, options.max_attempts)
        for path, problem, kept in run.set_damaged_aside(queue.unfinished()):
            display.note(LineDamaged(path, problem, kept))
        state: RunState = "finished"
        if queue.num_unfinished:
            config = _engine_config(run.manifest, options)
            with connect(options.address, options.num_workers) as cluster:
                state = _drive(run, hold, queue, config, options, cluster, display, counters)
        else:
            run.write_output(hold.epoch.check)
            hold.end(state)
        return Outcome(state, count_jobs(run))


def _drive(
    run: Run,
    hold: Hold,
    queue: JobQueue,
    config: EngineConfig,
    options: LaunchOptions,
    cluster: Cluster,
    display: Display,
    counters: DriverCounters,
) -> RunState:
    if config.device == "cuda" and cluster.is_embedded and cluster.num_gpus == 0:
        raise ClusterError("the run was made for cuda, and this machine has no GPU; use --address or another run")
    spec = WorkerSpec(
        config=config,
        run_uri=run.store.uri,
        metrics_port=None if options.metrics_port is None else 0,
        session_factory=options.session_factory,
        log_folder=_log_folder(run, cluster),
    )
    with contextlib.ExitStack() as stack:
        fleet = Fleet(spec, cluster, _worker_timeout(options))
        context = Context(
            run,
            queue,
            fleet,
            display,
            counters,
            num_workers=options.num_workers,
            num_slots=options.num_slots,
            grace_seconds=options.grace_seconds,
        )
        if options.metrics_port is not None:
            stack.enter_context(served_metrics(context, config, options.metrics_port))
        driver = Driver(context, hold)
        stack.enter_context(held(driver.request_stop))
        return driver.run()


def _engine_config(manifest: RunManifest, options: LaunchOptions) -> EngineConfig:
    """What the run's workers run with.

    Raises ModelError where the engine's trained parts are missing, KVRoomError where caches can't be kept in a folder.
    """
    engine = options.engine or manifest.engine
    draft_model = options.draft_model or manifest.draft_model
    kv_offload = options.kv_offload or manifest.kv_offload
    check_parts(engine, manifest.model, manifest.model_fingerprint, draft_model)
    if options.address is None:  # a cluster's workers look for themselves
        check_folder(kv_offload)
    return EngineConfig.model_validate(
        {
            "model": manifest.model,
            "engine": engine,
            "draft_model": draft_model and os.path.abspath(draft_model),
            "kv_offload": kv_offload and os.path.abspath(kv_offload),
            "dtype": manifest.dtype,
            "device": manifest.device,
            "num_threads": manifest.num_threads,
            "num_slots": options.num_slots,
            "checkpoint": options.checkpoint,
            "checkpoint_tokens": options.checkpoint_tokens,
            "checkpoint_seconds": options.checkpoint_seconds,
            "grace_seconds": options.grace_seconds,
            "store_retry_seconds": options.store_retry_seconds,
        }
    )


@contextlib.contextmanager
def _told_how_to_go_on(run: Run) -> Iterator[None]:
    """Add to what ends the run early that it can go on."""
    try:
        yield
    except (ClusterLostError, DriverError, StoreError) as error:
        hint = f"nothing is lost, go on with: swiftbatch resume {run.store.shown_uri}"
        raise DriverError(f"{error}; {hint}") from error


def _worker_timeout(options: LaunchOptions) -> float:
    """Seconds; a worker that waits for the store is to say so before it is given up."""
    if options.worker_timeout is not None:
        return options.worker_timeout
    return max(DEFAULT_TIMEOUT, options.store_retry_seconds + STORE_SLACK_SECONDS)


def _log_folder(run: Run, cluster: Cluster) -> str | None:
    """Workers on this machine log into the run folder; elsewhere it may not be there."""
    folder = local_path(run.store.uri)
    return f"{folder}/logs" if folder is not None and cluster.is_embedded else None
