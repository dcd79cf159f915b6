"""Runs the same jobs undisturbed and disturbed, compares them and reports."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from pydantic import computed_field

from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.folder_uri import local_path
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.chaos.chaos_options import STORE_RETRIES, ChaosError, ChaosOptions, write_jobs
from swiftbatch.scheduler.chaos.disturbed_run import ENDED_WELL, DisturbedDriver, DisturbedRun, Kill
from swiftbatch.scheduler.chaos.faults import (
    DRIVER_KINDS,
    KINDS,
    Kind,
    NodeFaults,
    NoNodeFaults,
    Way,
    local_ways,
    plan_kills,
    remote_ways,
)
from swiftbatch.scheduler.chaos.local_cluster import local_cluster, namespace_hosts
from swiftbatch.scheduler.display.progress_line import duration

SECONDS_PER_KILL = 2.0  # of work: a heartbeat shows that a kill is due only after a second
MOST_TOKENS = 50_000  # that chaos gives to a job by itself


class JobComparison(Frozen):
    """The SHA-256 of one job's tokens, undisturbed and disturbed, or None if a run has no output of it."""

    custom_id: str
    undisturbed_sha256: str | None
    disturbed_sha256: str | None
    num_lines: int  # lines of the job in the disturbed output; must be 1
    is_identical: bool  # tokens, text, finish reason and usage


class RunOutput:
    def __init__(self, run: Run) -> None:
        """Raise ChaosError if the run has no output."""
        data = run.store.read("output.jsonl")
        if data is None:
            raise ChaosError(f"{run.store.shown_uri} has no output.jsonl: expected the output of a run that has ended")
        self._lines = [json.loads(line) for line in data.splitlines()]
        self._bodies = {line["custom_id"]: line["response"]["body"] for line in self._lines if line["response"]}
        self.num_lines = Counter(line["custom_id"] for line in self._lines)

    def told(self, custom_id: str) -> dict[str, Any] | None:
        """Return the choice and the token usage in a job's output, or None if the job is unfinished."""
        body = self._bodies.get(custom_id)
        return None if body is None else body["choices"][0] | {"usage": body["usage"]}

    def num_tokens(self) -> int:
        return sum(body["usage"]["completion_tokens"] for body in self._bodies.values())

    def decode_seconds(self) -> float:
        paces = [
            (body["usage"]["completion_tokens"], body["metrics"]["ms_per_token"]) for body in self._bodies.values()
        ]
        return float(sum(num_tokens * pace for num_tokens, pace in paces) / 1000)

    def num_recomputed_tokens(self) -> int:
        return sum(body["metrics"]["num_recomputed_tokens"] for body in self._bodies.values())

    def resumes(self) -> dict[str, int]:
        attempts = [attempt for body in self._bodies.values() for attempt in body["metrics"]["attempts"]]
        return dict(Counter(attempt["resume"]["kind"] for attempt in attempts if attempt["resume"]))


def compare(custom_ids: Sequence[str], undisturbed: RunOutput, disturbed: RunOutput) -> tuple[JobComparison, ...]:
    """Compare both runs job by job; each job must have exactly one output."""
    return tuple(_compare_job(custom_id, undisturbed, disturbed) for custom_id in custom_ids)


def _compare_job(custom_id: str, undisturbed: RunOutput, disturbed: RunOutput) -> JobComparison:
    before, after = undisturbed.told(custom_id), disturbed.told(custom_id)
    num_lines = disturbed.num_lines[custom_id]
    return JobComparison(
        custom_id=custom_id,
        undisturbed_sha256=before["token_ids_sha256"] if before else None,
        disturbed_sha256=after["token_ids_sha256"] if after else None,
        num_lines=num_lines,
        is_identical=before is not None and before == after and num_lines == 1,
    )


def long_enough(options: ChaosOptions, seconds: float) -> int:
    """Return the tokens per job that let all kills happen, if jobs with `options` keep workers busy for `seconds`."""
    needed = options.num_kills * SECONDS_PER_KILL
    if seconds >= needed:
        return options.num_tokens
    return max(options.num_tokens, min(MOST_TOKENS, math.ceil(options.num_tokens * needed / max(seconds, 0.01))))


class ChaosReport(Frozen):
    """The result of a chaos run; times in seconds."""

    seed: int
    jobs: tuple[JobComparison, ...]
    num_tokens: int  # generated tokens in the output
    num_planned_kills: int
    kills: tuple[Kill, ...]
    num_recomputed_tokens: int
    tokens_per_checkpoint: int  # tokens of the whole run between two checkpoints
    resumes: dict[str, int]  # kind -> number
    undisturbed_seconds: float
    disturbed_seconds: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def is_identical(self) -> bool:
        """Return whether every job has one output, equal to the undisturbed one."""
        return all(job.is_identical for job in self.jobs)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def missing(self) -> list[str]:
        return [job.custom_id for job in self.jobs if job.disturbed_sha256 is None]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def duplicates(self) -> list[str]:
        return [job.custom_id for job in self.jobs if job.num_lines > 1]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def kills_by_kind(self) -> dict[str, int]:
        return {kind: sum(kill.kind == kind for kill in self.kills) for kind in KINDS}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def max_recomputed_tokens(self) -> int:
        """Return the largest allowed number of lost tokens: one checkpoint interval per kill."""
        return len(self.kills) * self.tokens_per_checkpoint

    @computed_field  # type: ignore[prop-decorator]
    @property
    def seconds_lost(self) -> float:
        return round(self.disturbed_seconds - self.undisturbed_seconds, 1)

    @property
    def has_passed(self) -> bool:
        """Return whether all kills were done and no output changed."""
        return self.is_identical and len(self.kills) == self.num_planned_kills

    def lines(self) -> list[str]:
        num_identical = sum(job.is_identical for job in self.jobs)
        by_kind = ", ".join(f"{count} {kind}" for kind, count in self.kills_by_kind.items() if count) or "none"
        resumes = ", ".join(f"{count} {kind}" for kind, count in sorted(self.resumes.items())) or "none"
        return [
            f"outputs identical: {'yes' if self.is_identical else 'NO'} (SHA-256 of {num_identical} of "
            f"{len(self.jobs)} jobs; {len(self.missing)} missing, {len(self.duplicates)} duplicate)",
            f"kills survived: {len(self.kills)} of {self.num_planned_kills} ({by_kind})",
            f"tokens computed again: {self.num_recomputed_tokens:,} of {self.num_tokens:,}, at most "
            f"{self.max_recomputed_tokens:,} ({len(self.kills)} kills x {self.tokens_per_checkpoint:,} tokens "
            "of the whole run from checkpoint to checkpoint)",
            f"resumes: {resumes}",
            f"time: {duration(self.undisturbed_seconds)} undisturbed, {duration(self.disturbed_seconds)} disturbed, "
            f"{self.seconds_lost:,.1f} s lost",
        ]


# The whole chaos run: undisturbed, disturbed, comparison.


Show = Callable[[str], None]


@dataclass(frozen=True)
class ChaosSetup:
    """A running cluster, its clients' environment, and its possible faults."""

    address: str
    environment: Mapping[str, str]
    ways: Mapping[Kind, Way]
    troubles: NodeFaults | NoNodeFaults = field(default_factory=NoNodeFaults)


def run_chaos(options: ChaosOptions, show: Show) -> ChaosReport:
    """Run the jobs twice and compare. Raises ChaosError."""
    if Store(options.run_uri).list(""):
        raise ChaosError(f"{options.run_uri} is not empty: expected a new folder; name another one with --run")
    random = Random(options.seed)
    with _folder(options.run_uri) as folder, _open_arena(options, random, show) as arena:
        experiment = Experiment(options, arena, folder, show)
        undisturbed_seconds = experiment.run_undisturbed()
        disturbed_seconds, kills = experiment.run_disturbed(random)
    undisturbed, disturbed = (
        RunOutput(Run.open(uri, STORE_RETRIES)) for uri in (experiment.undisturbed, experiment.disturbed)
    )
    return ChaosReport(
        seed=options.seed,
        jobs=compare(experiment.custom_ids, undisturbed, disturbed),
        num_tokens=disturbed.num_tokens(),
        num_planned_kills=options.num_kills,
        kills=tuple(kills),
        num_recomputed_tokens=disturbed.num_recomputed_tokens(),
        tokens_per_checkpoint=options.tokens_per_checkpoint,
        resumes=disturbed.resumes(),
        undisturbed_seconds=undisturbed_seconds,
        disturbed_seconds=disturbed_seconds,
    )


class Experiment:
    """Both runs on one cluster."""

    def __init__(self, options: ChaosOptions, arena: ChaosSetup, folder: Path, show: Show) -> None:
        self._options = options
        self._arena = arena
        self._folder = folder
        self._show = show
        self._num_drivers = 0
        self._kinds = kinds_of(options.kinds, arena.ways)
        self._jobs_file = folder / "jobs.jsonl"
        self.custom_ids = write_jobs(self._jobs_file, options)
        self.undisturbed = f"{options.run_uri.rstrip('/')}/undisturbed"
        self.disturbed = f"{options.run_uri.rstrip('/')}/disturbed"

    def run_undisturbed(self) -> float:
        """Run the jobs; if they end too soon for all kills, run longer ones. Return the seconds of the last run."""
        seconds = self._run_undisturbed()
        output, options = RunOutput(Run.open(self.undisturbed, STORE_RETRIES)), self._options
        num_tokens = long_enough(options, output.decode_seconds() / options.num_at_a_time)
        if num_tokens <= options.num_tokens:
            return seconds
        self._show(f"these jobs end too soon for {options.num_kills} kills: now with longer ones")
        self._options = replace(options, num_tokens=num_tokens)
        self.custom_ids = write_jobs(self._jobs_file, self._options)
        self.undisturbed += "-longer"
        return self._run_undisturbed()

    def _run_undisturbed(self) -> float:
        self._show(f"undisturbed run: {self._options.num_jobs} jobs of {self._options.num_tokens:,} tokens")
        started = time.monotonic()
        driver = self.submit(self.undisturbed)
        try:
            driver.expect(*ENDED_WELL)
        finally:
            driver.kill()
        return round(time.monotonic() - started, 1)

    def run_disturbed(self, random: Random) -> tuple[float, list[Kill]]:
        """Run with kills; return the seconds and the kills done."""
        plan = plan_kills(self._options.num_kills, self._kinds, self._options.num_run_tokens, random)
        self._show(f"disturbed run: {len(plan)} kills of {', '.join(self._kinds)}")
        started = time.monotonic()
        run = DisturbedRun(self.disturbed, self, self._arena.ways, self._arena.troubles, random, self._show)
        kills = run.run(plan)
        return round(time.monotonic() - started, 1), kills

    def submit(self, run_uri: str) -> DisturbedDriver:
        return self._start(self._options.submit_args(self._jobs_file, run_uri, self._arena.address))

    def resume(self, run_uri: str) -> DisturbedDriver:
        return self._start(self._options.resume_args(run_uri, self._arena.address))

    def take_over(self, run_uri: str) -> DisturbedDriver:
        return self._start(self._options.takeover_args(run_uri, self._arena.address))

    def _start(self, args: list[str]) -> DisturbedDriver:
        self._num_drivers += 1
        log, prefix = self._folder / f"driver-{self._num_drivers}.log", self._arena.troubles.driver_prefix()
        return DisturbedDriver(args, self._arena.environment, log, prefix)


def kinds_of(asked: Sequence[str], ways: Mapping[Kind, Way]) -> list[Kind]:
    """Return the kinds of kills, all possible ones if none is asked for. Raises ChaosError."""
    possible = [kind for kind in KINDS if kind in ways or kind in DRIVER_KINDS]
    if unknown := set(asked).difference(possible):
        raise ChaosError(f"--kind {min(unknown)}: expected one of: {', '.join(possible)} (some need --nodes)")
    return [kind for kind in possible if not asked or kind in asked]


@contextlib.contextmanager
def _folder(run_uri: str) -> Iterator[Path]:
    local = local_path(run_uri)
    if local is None:
        with tempfile.TemporaryDirectory(prefix="swiftbatch-chaos-") as name:
            yield Path(name)
        return
    Path(local).mkdir(parents=True, exist_ok=True)
    yield Path(local)


@contextlib.contextmanager
def _open_arena(options: ChaosOptions, random: Random, show: Show) -> Iterator[ChaosSetup]:
    """Raise ChaosError."""
    if options.address is not None:
        if options.num_nodes is not None:
            raise ChaosError("--nodes starts a cluster of its own: leave it or --address out")
        yield ChaosSetup(options.address, os.environ, remote_ways(options.address, random))
        return
    show("starting a Ray cluster of its own on this machine")
    if options.num_nodes is None:
        with local_cluster(num_cpus=options.num_workers) as cluster:
            yield ChaosSetup(cluster.address, cluster.environment, local_ways(cluster, random))
        return
    with (
        namespace_hosts() as hosts,
        local_cluster(options.num_workers, options.num_nodes, hosts) as cluster,
    ):
        troubles = NodeFaults(cluster, hosts, random)
        ways = {**local_ways(cluster, random), **troubles.ways()}
        yield ChaosSetup(cluster.address, cluster.environment, ways, troubles)
