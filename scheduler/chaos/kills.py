"""The kills of a chaos run: their times, drawn from a seed so that the run can be repeated, and the ways to do them.

Signals hit a worker or a node on a cluster of our own, a Ray task on the user's. A way takes the workers that have jobs
(one at least), kills or stops one of them or kills its node, and says which; None if that was gone already.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal, get_args

from swiftbatch.jobs.run.run_records import WorkerStatus
from swiftbatch.scheduler.chaos.local_cluster import LocalCluster
from swiftbatch.scheduler.cluster.ray_cluster import connect

Kind = Literal[
    "worker", "raylet", "driver", "stop", "hangup",  # a stopped worker, a driver whose terminal closes
    "rival",  # a stopped driver whose run another one takes over before it goes on
    "hang", "cut", "drain",  # a node stopped, cut off, given notice
    "freeze", "isolate",  # the head stopped, the driver cut off
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
DRIVER_KINDS: tuple[Kind, ...] = ("driver", "hangup", "rival")  # wherever the workers are

QUIET_END = 0.15  # share of the run's tokens after which nothing is killed: a kill must not come too late to be done
Way = Callable[[Sequence[WorkerStatus]], str | None]


@dataclass(frozen=True)
class PlannedKill:
    """A kill that is due when the whole run has generated `num_tokens`."""

    kind: Kind
    num_tokens: int


def plan_kills(num_kills: int, kinds: Sequence[Kind], num_tokens: int, random: Random) -> list[PlannedKill]:
    """One kill in each of `num_kills` equal stretches of a run of `num_tokens`; every kind equally often, shuffled."""
    drawn = [kinds[index % len(kinds)] for index in range(num_kills)]
    random.shuffle(drawn)
    stretch = num_tokens * (1 - QUIET_END) / max(1, num_kills)
    return [PlannedKill(kind, int(stretch * (index + random.random()))) for index, kind in enumerate(drawn)]


def local_ways(cluster: LocalCluster, random: Random) -> Mapping[Kind, Way]:
    """Workers and raylets of a cluster of our own."""
    victims = LocalVictims(cluster, random)
    return {
        "worker": partial(victims.hit_worker, signal.SIGKILL),
        "raylet": victims.kill_raylet,
        "stop": partial(victims.hit_worker, signal.SIGSTOP),  # it is there, and says nothing any more
    }


def remote_ways(address: str, random: Random) -> Mapping[Kind, Way]:
    """Workers of the user's cluster; its nodes are not ours to kill."""

    def hit_worker(number: signal.Signals, workers: Sequence[WorkerStatus]) -> str | None:
        worker = random.choice(workers)
        is_done = _signal_worker_on(address, worker.node_id, worker.pid, number)
        return f"{worker.id}, process {worker.pid} on {worker.host}" if is_done else None

    return {"worker": partial(hit_worker, signal.SIGKILL), "stop": partial(hit_worker, signal.SIGSTOP)}


class LocalVictims:
    """The workers and nodes of a local cluster that are not killed yet."""

    def __init__(self, cluster: LocalCluster, random: Random) -> None:
        self._cluster = cluster
        self._random = random
        self._dead_pids: set[int] = set()  # the driver's next beat may still name them

    def hit_worker(self, number: signal.Signals, workers: Sequence[WorkerStatus]) -> str | None:
        """Signal a worker's process."""
        worker = self._choose(workers)
        if worker is None or not signal_worker(worker.pid, number):
            return None
        self._dead_pids.add(worker.pid)
        return f"{worker.id}, process {worker.pid}"

    def kill_raylet(self, workers: Sequence[WorkerStatus]) -> str | None:
        """SIGKILL the node of a worker, and start another node in its place."""
        worker = self._choose(workers)
        node = None if worker is None else self._cluster.node_of(worker.pid)
        if node is None:
            return None
        hit = [worker for worker in workers if self._cluster.node_of(worker.pid) is node]
        self._dead_pids |= {worker.pid for worker in hit}
        self._cluster.kill_raylet(node)
        self._cluster.add_raylet()
        return f"node of {', '.join(worker.id for worker in hit)}"

    def _choose(self, workers: Sequence[WorkerStatus]) -> WorkerStatus | None:
        living = [worker for worker in workers if worker.pid not in self._dead_pids]
        return self._random.choice(living) if living else None


def signal_worker(pid: int, number: signal.Signals) -> bool:
    """Signal a Ray worker of the machine that this is called on; False if no worker has this number any more."""
    try:
        if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            return False
        os.kill(pid, number)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True


def _signal_worker_on(address: str, node_id: str, pid: int, number: signal.Signals) -> bool:
    with connect(address, num_workers=1):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(signal_worker)
        try:
            return bool(ray.get(task.remote(pid, number)))
        except ray.exceptions.RayError:  # the node is gone as well
            return False
