"""The counters of workers and driver, with their metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from swiftbatch.metrics.metric import Histogram, Summary, exported, metrics_of

MAX_POSITIONS_COUNTED = 16  # deeper draft positions are only in the sum

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
JOB_SECONDS_BOUNDS = (1.0, 5.0, 15.0, _MINUTE, 300.0, 900.0, _HOUR, 4 * _HOUR, 12 * _HOUR, _DAY, 3 * _DAY, 7 * _DAY)
JOB_TOKENS_BOUNDS = tuple(float(2**power) for power in range(7, 18))  # 128 .. 131,072 tokens
DRAFT_KINDS = ("none", "tree", "chain")
CHECKPOINT_KINDS = ("tokens", "state")
STATES_OF_ONE_WORKER = (  # a sum over workers makes no sense
    "last_checkpoint",
    "checkpoint_interval_seconds",
    "kv_cache_tokens",
    "kv_cache_pages",
    "kv_cache_pages_ratio",
    "kept_prefix_bytes",
)
CHECKPOINT_SECONDS_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - started


@dataclass
class EngineCounters:
    """One worker's counts since its start; times in seconds, sizes in bytes."""

    num_prompt_tokens: int = exported("prompt_tokens_total", "Prompt tokens of jobs taken in.")
    num_read_tokens: int = exported(
        "prefill_tokens_total", "Tokens read through the target before a job goes on: prompts, and replayed outputs."
    )
    num_copied_tokens: int = exported(
        "prefill_tokens_saved_total",
        "Tokens that did not have to be read, since another job of the worker with the same beginning had them.",
    )
    num_generation_tokens: int = exported(
        "generation_tokens_total", "Tokens generated; those that a resume recovered are apart."
    )
    num_drafts: int = exported("spec_decode_num_drafts_total", "Draft trees verified.")  # trees with at least one node
    num_draft_tokens: int = exported("spec_decode_num_draft_tokens_total", "Tokens drafted.")
    num_accepted_tokens: int = exported(
        "spec_decode_num_accepted_tokens_total", "Drafted tokens accepted; the bonus token of each step is apart."
    )
    num_accepted_tokens_per_pos: list[int] = exported(
        "spec_decode_num_accepted_tokens_per_pos_total",
        f"Drafted tokens accepted, by their position in the draft from 0 to {MAX_POSITIONS_COUNTED - 1}.",
        by="position",
        of=lambda c: {str(position): count for position, count in enumerate(c.num_accepted_tokens_per_pos)},
        start=lambda: [0] * MAX_POSITIONS_COUNTED,
    )
    num_tokens_by_draft: Counter[str] = exported(
        "generation_tokens_by_draft_total",
        "Tokens generated, by what the step verified: nothing drafted (none), a drafter's tree, or a chain that the "
        "target drew with a partial cache.",
        by="draft",
        known=DRAFT_KINDS,
    )
    kv_cache_tokens: int = exported("kv_cache_tokens", "Positions held in the full key-value caches.", kind="gauge")
    kv_cache_pages: dict[str, int] = exported(
        "kv_cache_pages",
        "Pages of 64 positions of a worker on a CPU: those that the caches of running jobs take, and those that are "
        "left of its memory for caches.",
        kind="gauge",
        by="state",
        start=dict,
    )
    kv_cache_pages_ratio: float | None = exported(
        "kv_cache_pages_used_ratio",
        "Pages that caches take, as a share of those there are.",
        kind="gauge",
        start=lambda: None,
    )
    kept_prefix_bytes: int = exported(
        "kept_prefix_bytes",
        "Keys and values of prompts whose jobs have ended, kept for others that begin alike.",
        kind="gauge",
    )
    num_steps: int = 0
    step_seconds: dict[str, float] = exported(
        "step_seconds",
        "Time of the engine's steps, by phase.",
        kind="summary",
        by="phase",
        of=lambda c: {phase: Summary(c.num_steps, seconds) for phase, seconds in c.step_seconds.items()},
        start=lambda: {"propose": 0.0, "verify": 0.0, "commit": 0.0},
    )
    num_resumes: Counter[str] = exported(
        "resumes_total",
        "Attempts that went on from a checkpoint: the cache was loaded (kv), or the tokens were run again (replay).",
        by="kind",
        known=("kv", "replay"),
    )
    num_tokens_recovered: int = exported("tokens_recovered_total", "Tokens that resumes read back.")
    num_tokens_recomputed: int = exported(
        "tokens_recomputed_total", "Tokens that were in no checkpoint yet when their worker was lost."
    )
    checkpoint_bytes: dict[str, int] = exported(
        "checkpoint_bytes_total",
        "Bytes written: token logs (tokens), caches and drafters' tables (state).",
        by="kind",
        start=lambda: dict.fromkeys(CHECKPOINT_KINDS, 0),
    )
    checkpoint_seconds: dict[str, Histogram] = exported(
        "checkpoint_seconds",
        "Time to write one file of a checkpoint, in the background.",
        kind="histogram",
        by="kind",
        start=lambda: {kind: Histogram(CHECKPOINT_SECONDS_BOUNDS) for kind in CHECKPOINT_KINDS},
    )
    last_checkpoint: float | None = exported(  # `time.time()`, or when the work began; None while nothing runs
        "checkpoint_age_seconds",
        "Time since the worker last wrote to a checkpoint, or since its work began; absent while it has no job.",
        kind="gauge",
        of=lambda c: None if c.last_checkpoint is None else max(0.0, time.time() - c.last_checkpoint),
        start=lambda: None,
    )
    checkpoint_interval_seconds: float = exported(
        "checkpoint_interval_seconds",
        "Time that should pass between two token logs of a job, as `--checkpoint-seconds` says.",
        kind="gauge",
    )
    num_out_of_memory: int = exported(
        "out_of_memory_total", "Steps and starts of jobs that found the GPU's memory full, and put a job back."
    )
    num_stale_attempt_rejections: int = exported(
        "stale_attempt_rejections_total", "Results that were not written, since a newer attempt had the job."
    )
    num_store_retries: int = exported(
        "store_retries_total", "Reads and writes of the run folder that were tried again."
    )
    jobs_finished: Counter[str] = exported(
        "jobs_finished_total",
        "Jobs that ended, by reason: all tokens (length), an end token or stop string (stop).",
        by="reason",
        known=("length", "stop"),
    )
    job_seconds: Histogram = exported(
        "job_seconds",
        "Time of a finished job's last attempt.",
        kind="histogram",
        start=lambda: Histogram(JOB_SECONDS_BOUNDS),
    )
    job_generation_tokens: Histogram = exported(
        "job_generation_tokens",
        "Tokens generated for a finished job.",
        kind="histogram",
        start=lambda: Histogram(JOB_TOKENS_BOUNDS),
    )

    @property
    def mean_acceptance_length(self) -> float:
        """Return the tokens per verification: 1 + accepted / drafts."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    def count_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verified draft tree; an empty one counts nothing."""
        if num_draft_tokens == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        if num_accepted_tokens:
            for position in range(min(num_accepted_tokens, MAX_POSITIONS_COUNTED)):
                self.num_accepted_tokens_per_pos[position] += 1

    def count_pages(self, num_used: int, num_pages: int | None) -> None:
        """Record the number of used pages; `num_pages` is the limit, or None if there is none."""
        if num_pages:
            self.kv_cache_pages = {"used": num_used, "free": max(0, num_pages - num_used)}
            self.kv_cache_pages_ratio = num_used / num_pages

    def count_resume(self, kind: str, num_tokens_recovered: int, num_tokens_recomputed: int) -> None:
        """Count a resume: `kv` loaded the cache, `replay` runs recovered tokens again."""
        self.num_resumes[kind] += 1
        self.num_tokens_recovered += num_tokens_recovered
        self.num_tokens_recomputed += num_tokens_recomputed

    def count_checkpoint(self, kind: str, num_bytes: int, seconds: float) -> None:
        """Count one written file: a token log or part of a state."""
        self.checkpoint_bytes[kind] += num_bytes
        self.checkpoint_seconds[kind].observe(seconds)
        if self.last_checkpoint is not None:  # a write may end after the last job left
            self.last_checkpoint = time.time()

    def note_work(self, is_running: bool) -> None:
        """Start the checkpoint age when the first job begins, and stop it when no job is left."""
        self.last_checkpoint = (self.last_checkpoint or time.time()) if is_running else None

    def count_store_retry(self) -> None:
        self.num_store_retries += 1

    def count_finished(self, reason: str, seconds: float, num_generation_tokens: int) -> None:
        self.jobs_finished[reason] += 1
        self.job_seconds.observe(seconds)
        self.job_generation_tokens.observe(num_generation_tokens)

    def add(self, other: EngineCounters, names: Collection[str] | None = None) -> None:
        for name in SUMMED if names is None else names:
            setattr(self, name, _sum(getattr(self, name), getattr(other, name)))


SUMMED = tuple(one.name for one in fields(EngineCounters) if one.name not in STATES_OF_ONE_WORKER)
WORKER_METRICS = metrics_of(EngineCounters)
TOTALS = tuple(metric for metric in WORKER_METRICS if metric.kind != "gauge")  # summed over all workers


def _sum(one: Any, other: Any) -> Any:
    """Add numbers, lists, histograms, or dicts of these."""
    if isinstance(one, dict):
        return {**one, **other, **{key: _sum(one[key], other[key]) for key in one.keys() & other.keys()}}
    if isinstance(one, list):
        return [_sum(*pair) for pair in zip(one, other, strict=True)]
    if isinstance(one, Histogram):
        return Histogram(one.bounds, _sum(one.counts, other.counts), one.total + other.total)
    return one + other


# A worker's GPU. A figure that the GPU does not tell is None, and absent.


THROTTLE_REASONS = ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal", "sw_power_cap")


@dataclass
class GPUFigures:
    """A GPU's present state, as the driver's library tells it."""

    uuid: str
    num_ecc_errors: int | None = exported(
        "gpu_ecc_uncorrected_errors_total",
        "Memory errors that ECC could not correct, since the driver was loaded or the GPU was reset.",
        start=lambda: None,
    )
    throttled: dict[str, int] | None = exported(
        "gpu_throttled",
        "1 while the GPU's clocks are held down, by reason. A power cap (sw_power_cap) is usual under load.",
        kind="gauge",
        by="reason",
        known=THROTTLE_REASONS,
        start=dict,
    )
    temperature: int | None = exported(
        "gpu_temperature_celsius", "Temperature of the GPU.", kind="gauge", start=lambda: None
    )
    used_bytes: int | None = exported(
        "gpu_memory_used_bytes", "Memory of the GPU that is taken, by any process.", kind="gauge", start=lambda: None
    )
    total_bytes: int | None = exported("gpu_memory_total_bytes", "Memory of the GPU.", kind="gauge", start=lambda: None)
    utilization: float | None = exported(
        "gpu_utilization_ratio",
        "Share of the last second or less in which a kernel ran.",
        kind="gauge",
        start=lambda: None,
    )


GPU_METRICS = metrics_of(GPUFigures)


# The driver's counters and the names of their metrics.


MEMORY_FULL = "memory_full"  # preemption reason of a worker without memory for all caches
PREEMPTION_REASONS = (
    *("attempt_failed", "cluster_lost", "driver_stopped", "gpu_failed", MEMORY_FULL, "migrated", "node_drained"),
    *("node_lost", "store_failed", "worker_died", "worker_error", "worker_out_of_memory", "worker_silent"),
    *("worker_terminated", "worker_unreachable"),
)


@dataclass
class DriverCounters:
    """The driver's figures: jobs by state, preemptions, failures, and all workers' counts."""

    jobs: dict[str, int] = exported(
        "jobs",
        "Jobs of the run, by state.",
        kind="gauge",
        by="state",
        known=("pending", "running", "finished", "failed", "cancelled"),
    )
    workers: dict[str, int] = exported(
        "workers",
        "Workers, by state: starting, ready, or writing their last checkpoints (draining).",
        kind="gauge",
        by="state",
        known=("starting", "ready", "draining"),
    )
    worker_seconds: dict[str, float] = exported(
        "worker_seconds_total",
        "Time from a worker's readiness to its end, by device. A worker has its GPUs to itself.",
        by="device",
        known=("cpu", "gpu"),
    )
    eta_seconds: float | None = exported(
        "eta_seconds",
        "Time left at the present speed if every job runs to its `max_tokens`; absent while nothing has a speed.",
        kind="gauge",
        start=lambda: None,
    )
    last_beat: float | None = exported(  # `time.time()`
        "driver_heartbeat_seconds",
        "Time of the driver's newest heartbeat, in seconds since the epoch; it stands still if the driver hangs.",
        kind="gauge",
        start=lambda: None,
    )
    has_ended: bool = exported(
        "driver_ended",
        "1 once the driver has ended as it should: no job is left, a limit is reached, or it was asked to stop.",
        kind="gauge",
        start=bool,
    )
    num_preemptions: Counter[str] = exported(
        "preemptions_total", "Jobs taken back from a worker, by reason.", by="reason", known=PREEMPTION_REASONS
    )
    num_gpu_failures: Counter[str] = exported(
        "gpu_failures_total", "Workers lost because a GPU failed, by the UUID of each GPU that they had.", by="gpu"
    )
    jobs_finished: Counter[str] = exported(
        "jobs_finished_total",
        "Jobs that ended without a result, by reason: given up after their attempts (failed), or cancelled.",
        by="reason",
        known=("failed", "cancelled"),
    )
    num_store_retries: int = exported(
        "store_retries_total", "Reads and writes of the run folder that the driver tried again."
    )
    by_worker: dict[str, EngineCounters] = field(default_factory=dict)  # newest counts, also of lost workers

    def count_store_retry(self) -> None:
        self.num_store_retries += 1

    def take_in(self, worker_id: str, counters: EngineCounters) -> None:
        """Keep a worker's counts by its unique id."""
        self.by_worker[worker_id] = counters

    def totals(self, names: Collection[str] | None = None) -> EngineCounters:
        """Sum the counts of the driver and all workers, lost ones included."""
        sums = EngineCounters(num_store_retries=self.num_store_retries, jobs_finished=Counter(self.jobs_finished))
        for counters in list(self.by_worker.values()):
            sums.add(counters, names)
        return sums


DRIVER_METRICS = metrics_of(DriverCounters)
