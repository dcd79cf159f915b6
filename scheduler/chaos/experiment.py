"""The chaos run as a whole: the same jobs undisturbed and disturbed on the same cluster, then the comparison."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.object_stores import local_path
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.chaos.chaos_options import STORE_RETRIES, ChaosError, ChaosOptions, write_jobs
from swiftbatch.scheduler.chaos.chaos_report import ChaosReport, RunOutput, compare
from swiftbatch.scheduler.chaos.disturbed_run import ENDED_WELL, DisturbedDriver, DisturbedRun, Kill
from swiftbatch.scheduler.chaos.hosts import namespace_hosts
from swiftbatch.scheduler.chaos.kills import DRIVER_KINDS, KINDS, Kind, Way, local_ways, plan_kills, remote_ways
from swiftbatch.scheduler.chaos.local_cluster import local_cluster
from swiftbatch.scheduler.chaos.node_faults import NoTroubles, Troubles

Show = Callable[[str], None]


@dataclass(frozen=True)
class Arena:
    """A running cluster, the environment of those who may talk to it, and what may happen on it."""

    address: str
    environment: Mapping[str, str]
    ways: Mapping[Kind, Way]
    troubles: Troubles | NoTroubles = field(default_factory=NoTroubles)


def run_chaos(options: ChaosOptions, show: Show) -> ChaosReport:
    """Run the jobs twice and compare. Raises ChaosError when one of the runs does not come to its end."""
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
    """Both runs in one arena; `folder` is for the job file and what the drivers print."""

    def __init__(self, options: ChaosOptions, arena: Arena, folder: Path, show: Show) -> None:
        self._options = options
        self._arena = arena
        self._folder = folder
        self._show = show
        self._num_drivers = 0
        self._jobs_file = folder / "jobs.jsonl"
        self.custom_ids = write_jobs(self._jobs_file, options)
        self.undisturbed = f"{options.run_uri.rstrip('/')}/undisturbed"
        self.disturbed = f"{options.run_uri.rstrip('/')}/disturbed"

    def run_undisturbed(self) -> float:
        """Run the jobs undisturbed; returns the seconds that it took."""
        self._show(f"undisturbed run: {self._options.num_jobs} jobs of {self._options.num_tokens:,} tokens")
        started = time.monotonic()
        driver = self.submit(self.undisturbed)
        try:
            driver.expect(*ENDED_WELL)
        finally:
            driver.kill()
        return round(time.monotonic() - started, 1)

    def run_disturbed(self, random: Random) -> tuple[float, list[Kill]]:
        """Run the jobs with kills; returns the seconds that it took, and the kills that were done."""
        kinds = [kind for kind in KINDS if kind in self._arena.ways or kind in DRIVER_KINDS]
        plan = plan_kills(self._options.num_kills, kinds, self._options.num_run_tokens, random)
        self._show(f"disturbed run: {len(plan)} kills of {', '.join(kinds)}")
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


@contextlib.contextmanager
def _folder(run_uri: str) -> Iterator[Path]:
    """A folder beside the runs if they are on this machine, else a temporary one."""
    local = local_path(run_uri)
    if local is None:
        with tempfile.TemporaryDirectory(prefix="swiftbatch-chaos-") as name:
            yield Path(name)
        return
    Path(local).mkdir(parents=True, exist_ok=True)
    yield Path(local)


@contextlib.contextmanager
def _open_arena(options: ChaosOptions, random: Random, show: Show) -> Iterator[Arena]:
    """The cluster at the user's address; without one, a cluster that is ended with the context.

    Raises ChaosError if that one does not start.
    """
    if options.address is not None:
        if options.num_nodes is not None:
            raise ChaosError("--nodes starts a cluster of its own: leave it or --address out")
        yield Arena(options.address, os.environ, remote_ways(options.address, random))
        return
    show("starting a Ray cluster of its own on this machine")
    if options.num_nodes is None:
        with local_cluster(num_cpus=options.num_workers) as cluster:
            yield Arena(cluster.address, cluster.environment, local_ways(cluster, random))
        return
    with (
        namespace_hosts() as hosts,
        local_cluster(options.num_workers, options.num_nodes, hosts) as cluster,
    ):
        troubles = Troubles(cluster, hosts, random)
        ways = {**local_ways(cluster, random), **troubles.ways()}
        yield Arena(cluster.address, cluster.environment, ways, troubles)
