"""Runs a run's unfinished jobs: cluster, driver loop, signals, output files."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run import MANIFEST, Run
from swiftbatch.jobs.run.run_records import RunManifest, RunState
from swiftbatch.jobs.storage.folder_uri import local_path
from swiftbatch.jobs.storage.retries import STORE_BACKOFF_SECONDS, Retries
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.metrics.counters import DriverCounters
from swiftbatch.metrics.exporter import EVERYWHERE, Labels, driver_families, registry_of, textfile_writer
from swiftbatch.scheduler.cluster.embedded_ray import LOOPBACK
from swiftbatch.scheduler.cluster.ray_cluster import (
    Cluster,
    ClusterError,
    ClusterLostError,
    connect,
    refuse_unreachable,
)
from swiftbatch.scheduler.cluster.worker_actor import WorkerSpec
from swiftbatch.scheduler.display.display import Display
from swiftbatch.scheduler.display.events import (
    FewGpus,
    GpusShareModel,
    LimitReached,
    LineDamaged,
    ShardWritten,
    SlowOnGpu,
    StoreAway,
)
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.driver import Driver, DriverError
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.queue_loading import count_jobs, load_queue, put_logs_in_place
from swiftbatch.scheduler.driver.run_lease import RunLease
from swiftbatch.scheduler.driver.run_limits import Spending
from swiftbatch.scheduler.driver.run_progress import DriverContext, served_metrics, target_labels
from swiftbatch.scheduler.driver.shard_writing import finish_shards
from swiftbatch.scheduler.driver.worker_fleet import Fleet
from swiftbatch.scheduler.process.signals import held
from swiftbatch.scheduler.runs.gpu_sharing import gpus_per_worker
from swiftbatch.scheduler.runs.run_manifest import computation_of, with_absolute_folders
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.worker.config import Computation, EngineConfig
from swiftbatch.worker.drafters.catalogue import check_parts
from swiftbatch.worker.forward.hardware import has_cuda
from swiftbatch.worker.forward.nvml import own_gpus
from swiftbatch.worker.kernels.gpu_kernel_choice import refuse_several_gpus
from swiftbatch.worker.kv.kv_capacity import GB, KVRoomError, bytes_per_position, check_folder, refuse_other_caches
from swiftbatch.worker.model.compute_path import path_on, refuse_on_gpu
from swiftbatch.worker.model.decoder_config import read_decoder_config
from swiftbatch.worker.model.lora import locate_loras, with_absolute_places
from swiftbatch.worker.model.model_files import CONFIG_FILES, locate_model, model_folder, read_config
from swiftbatch.worker.model.rank_faults import ranks_fault

AWAY_SECONDS = 2.0  # shorter failures pass unseen
TOLD_SECONDS = 60.0
MADE_FOR_CUDA = "the run was made for cuda, and this machine has no GPU; use --address or another run"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a driver: the run's state when the driver ends."""

    state: RunState
    jobs: dict[str, int]
    num_tokens: int  # tokens of its jobs
    reached_limit: str | None = None  # why it is unfinished, for people

    @property
    def num_without_result(self) -> int:
        return sum(count for state, count in self.jobs.items() if state != "finished")


def refuse_start(run_uri: str, settings: Settings) -> None:
    """Raise ClusterError or ModelError if a new run could not start: no cluster answers, or GPUs lack here.

    Raises StoreError.
    """
    if Store(run_uri, settings.start_retries).exists(MANIFEST):
        return
    if settings.address is not None:
        refuse_unreachable(settings.address)
    refuse_without_gpus(settings.said.get("device", Computation.device), settings)


def refuse_without_gpus(device: str, settings: Settings) -> None:
    """Raise ClusterError or ModelError if this machine lacks the GPUs that workers would have."""
    is_here, num_each = settings.address is None, settings.num_gpus_per_worker or 1
    has_gpus = device != "cpu" and (not is_here or has_cuda())
    if device == "cuda" and not has_gpus:
        raise ClusterError("--device cuda: this machine has no GPU; use --address or --device cpu")
    if not has_gpus:
        refuse_several_gpus(num_each, "the device is a CPU")
    elif is_here and (gpus := own_gpus()):  # none without NVML
        _refuse_few_gpus(num_each, len(gpus))


def _refuse_few_gpus(num_wanted: int, num_gpus: int) -> None:
    """Raise ClusterError if a machine has too few GPUs for a worker."""
    if num_wanted > num_gpus:
        raise ClusterError(
            f"--gpus-per-worker {num_wanted}: this machine has {num_gpus}; use fewer, or --address of a cluster"
        )


def refuse_runs(settings: Settings) -> None:
    """Raise ClusterError or ModelError if no run with these settings could start: its model, adapters or GPUs lack."""
    refuse_without_gpus(settings.said.get("device", Computation.device), settings)
    locate_model(settings.said.get("model", Computation.model), is_whole=False)
    locate_loras(with_absolute_places(settings.said.get("lora", ())), {})


def refuse_launch(run: Run, settings: Settings) -> None:
    """Raise ClusterError, KVRoomError or ModelError if workers of a run could not start, before jobs are added."""
    if run.manifest.device == "cuda" and settings.address is None and not has_cuda():
        raise ClusterError(MADE_FOR_CUDA)
    config = _engine_config(run.manifest, run.longest_job(), settings)
    refuse_without_gpus(run.manifest.device, settings)
    if config.num_gpus_per_worker > 1:
        _refuse_unshared(run.manifest.stored_model, config)


def launch(hold: RunLease, settings: Settings, display: Display) -> Outcome:
    """Run the held run's unfinished jobs and write its outputs.

    Raises ClusterError, DriverError, KVRoomError, MetricsError, ModelError, RunTakenError and StoreError.
    """
    counters, seconds = DriverCounters(), settings.checkpoints.store_retry_seconds
    told = StoreWatch(hold.epoch.run.store.shown_uri, seconds, counters.count_store_retry, display)
    run = Run.open(hold.epoch.run.store.uri, Retries(seconds, told.note_retry))
    hold.go_on_through(run)
    if settings.price_per_worker_hour is not None:
        hold.price_per_worker_hour = settings.price_per_worker_hour
    with _told_how_to_go_on(run):
        attempts = Attempts.read(run.store, hold.epoch.number)
        put_logs_in_place(run)
        queue = load_queue(run, settings.max_attempts, attempts)
        for path, problem, kept in run.set_damaged_aside(queue.unfinished()):
            display.note(LineDamaged(path, problem, kept))
        spent = Spending.so_far(hold.before, queue.num_generated_tokens)
        reached = settings.limits.reached(spent) if queue.num_unfinished else None
        if queue.num_unfinished and reached is None:
            config = _engine_config(run.manifest, run.longest_job(), settings)
            with connect(settings.address, settings.num_workers) as cluster:
                state, reached = _drive(run, hold, queue, attempts, spent, config, settings, cluster, display, counters)
        else:
            state = _end(run, hold, queue, reached, display)
        return Outcome(state, count_jobs(run), queue.num_generated_tokens, reached)


def _end(run: Run, hold: RunLease, queue: JobQueue, reached: str | None, display: Display) -> RunState:
    """Write the outputs of a run with nothing to do, or nothing within its limits."""
    state: RunState = "finished" if reached is None else "interrupted"
    if reached is not None:
        display.note(LimitReached(reached))
    for shard in finish_shards(run, hold.epoch, is_end=reached is None):
        display.note(ShardWritten(shard.path, shard.num_rows))
    run.write_output(hold.epoch.check)
    hold.end(state, queue.num_generated_tokens, reached)
    return state


class StoreWatch:
    """Counts retries of the run's store, and tells once a minute that it is away."""

    def __init__(self, place: str, seconds: float, count: Callable[[], None], display: Display) -> None:
        self._event, self._count, self._display = StoreAway(place, seconds), count, display
        self._first = self._last = self._told = -math.inf  # of these retries, in `time.monotonic()`

    def note_retry(self) -> None:
        """Count a retry; call it before each pause, from any thread."""
        self._count()
        now = time.monotonic()
        if now - self._last > 2 * STORE_BACKOFF_SECONDS:  # it has answered meanwhile
            self._first = now
        self._last = now
        if now - self._first >= AWAY_SECONDS and now - self._told >= TOLD_SECONDS:
            self._told = now
            self._display.note(self._event)


def _drive(
    run: Run,
    hold: RunLease,
    queue: JobQueue,
    attempts: Attempts,
    spent: Spending,
    config: EngineConfig,
    settings: Settings,
    cluster: Cluster,
    display: Display,
    counters: DriverCounters,
) -> tuple[RunState, str | None]:
    _look_at_gpus(run, config, settings, cluster, display)
    metrics_host = settings.metrics_host or (LOOPBACK if cluster.is_embedded else EVERYWHERE)
    worker_host = metrics_host if cluster.is_embedded else EVERYWHERE  # one node's address is invalid on the others
    spec = WorkerSpec(
        config=config,
        run_uri=run.store.uri,
        metrics_host=None if settings.metrics_port is None else worker_host,
        log_folder=_log_folder(run, cluster),
    )
    most_positions = _most_positions(run.manifest, settings, cluster)
    with contextlib.ExitStack() as stack:
        fleet = Fleet(spec, cluster, settings.patience)
        labels = Labels(model_name=config.model, drafter=config.engine, worker="driver")
        context = DriverContext(
            run,
            queue,
            attempts,
            fleet,
            display,
            counters,
            num_workers=settings.num_workers,
            num_slots=settings.num_slots,
            grace_seconds=settings.checkpoints.grace_seconds,
            limits=settings.limits,
            spent=spent,
            most_positions=most_positions,
            write_metrics=_textfile_writer(run, counters, labels, settings.metrics_textfile),
        )
        scrapes = None
        if settings.metrics_port is not None:
            scrapes = stack.enter_context(served_metrics(context, labels, metrics_host, settings.metrics_port))
        driver = Driver(context, hold)
        stack.enter_context(held(driver.request_stop))
        state = driver.run()
        if scrapes is not None:
            scrapes.wait_for_last(lambda: driver.is_stopping)
        return state, driver.reached_limit


def _textfile_writer(run: Run, counters: DriverCounters, labels: Labels, path: str | None) -> Callable[[], None]:
    """Return what writes the driver's metrics, if there is a path. Raises MetricsError."""
    if path is None:
        return lambda: None
    return textfile_writer(path, registry_of(lambda: driver_families(counters, labels, target_labels(run))))


def _look_at_gpus(run: Run, config: EngineConfig, settings: Settings, cluster: Cluster, display: Display) -> None:
    """Tell what is slow or lacks GPUs. Raises ClusterError and ModelError for workers that could not start."""
    num_each = config.num_gpus_per_worker
    if config.device == "cuda" and cluster.is_embedded and cluster.num_gpus == 0:
        raise ClusterError(MADE_FOR_CUDA)
    if not cluster.gives_gpus(config.device):
        refuse_several_gpus(num_each, "the device is a CPU")
        return
    if cluster.is_embedded:
        _refuse_few_gpus(num_each, cluster.num_gpus)
    slow = _refuse_unshared(run.manifest.stored_model, config)
    if num_each > 1 and settings.num_gpus_per_worker is None:
        display.note(GpusShareModel(num_each))
    if slow is not None:
        display.note(slow)
    if cluster.is_embedded and settings.num_workers > cluster.num_gpus // num_each:
        display.note(FewGpus(settings.num_workers, cluster.num_gpus, num_each))


def _most_positions(manifest: RunManifest, settings: Settings, cluster: Cluster) -> int | None:
    """Return the positions that fit a worker's requested cache memory. Raises KVRoomError."""
    if settings.kv_memory is None:
        return None
    asked = f"--kv-memory {settings.kv_memory:g}"
    if cluster.gives_gpus(manifest.device):
        raise KVRoomError(f"{asked}: found workers on GPUs, which share their own memory out; leave the option away")
    read = read_config(manifest.model, model_folder(manifest.stored_model, CONFIG_FILES))
    num_bytes = bytes_per_position(read, manifest.dtype, manifest.kv_dtype)
    if num_bytes is None:
        raise KVRoomError(f"{asked}: the model's config does not say what a position takes; use --slots instead")
    return int(settings.kv_memory * GB / num_bytes)


def _refuse_unshared(model: str, config: EngineConfig) -> SlowOnGpu | None:
    """Return a warning as `slow_on_gpu` does. Raises ModelError if a worker's GPUs cannot share a run."""
    if config.num_gpus_per_worker > 1 and config.linear == "cublas":
        raise ModelError(
            f"--gpus-per-worker {config.num_gpus_per_worker}: this run multiplies with cuBLAS, which sums a GPU's part "
            "in another order; leave it away, or give another run --linear triton"
        )
    return slow_on_gpu(model, config.num_gpus_per_worker)


def slow_on_gpu(model: str, num_gpus_per_worker: int) -> SlowOnGpu | None:
    """Return a warning if the GPUs lack kernels for the model. Raises ModelError if it does not run on these GPUs."""
    config = read_config(model, model_folder(model, CONFIG_FILES))
    refuse_on_gpu(model, config)
    if (reason := path_on("cuda", config).reason) is not None:
        refuse_several_gpus(num_gpus_per_worker, f"they do not know the model {model}: {reason}")
        return SlowOnGpu(reason)
    if num_gpus_per_worker > 1 and (fault := ranks_fault(read_decoder_config(config), num_gpus_per_worker)):
        raise ModelError(f"--gpus-per-worker {num_gpus_per_worker}: the GPUs cannot share the model {model}: {fault}")
    return None


def _engine_config(manifest: RunManifest, longest_job: int, settings: Settings) -> EngineConfig:
    """Return the settings of the workers' engines. Raises ModelError, KVRoomError."""
    computation = computation_of(manifest, settings)
    check_parts(
        computation.engine,
        manifest.stored_model,
        manifest.model_fingerprint,
        computation.draft_model,
        computation.engine_options,
    )
    if manifest.kv_dtype is not None or computation.kv_offload is not None:
        config = read_config(manifest.model, model_folder(manifest.stored_model, CONFIG_FILES))
        refuse_other_caches(manifest.model, config, manifest.kv_dtype, computation.kv_offload)
    if settings.address is None:  # a cluster's workers check their own
        check_folder(computation.kv_offload)
    computed, checkpoints = asdict(with_absolute_folders(computation)), asdict(settings.checkpoints)
    num_gpus = gpus_per_worker(manifest, longest_job, settings)
    return EngineConfig(**computed, **checkpoints, num_gpus_per_worker=num_gpus)


@contextlib.contextmanager
def _told_how_to_go_on(run: Run) -> Iterator[None]:
    """Append to an error that ends the run how the user can continue the run."""
    hint = f"nothing is lost, go on with: swiftbatch resume {run.store.shown_uri}"
    try:
        yield
    except (ClusterLostError, DriverError, StoreError) as error:
        raise DriverError(f"{error}; {hint}") from error
    except KeyboardInterrupt:  # outside the driver's own signal handling
        raise KeyboardInterrupt(hint) from None


def _log_folder(run: Run, cluster: Cluster) -> str | None:
    """Return the folder for workers' logs below the run folder, or None if workers are not on this machine."""
    folder = local_path(run.store.uri)
    return f"{folder}/logs" if folder is not None and cluster.is_embedded else None
