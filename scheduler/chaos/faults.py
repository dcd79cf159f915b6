"""The faults of a chaos run: kills, hangs and lost networks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal, get_args

from swiftbatch.jobs.run.run_records import WorkerStatus
from swiftbatch.scheduler.chaos.chaos_options import WORKER_TIMEOUT
from swiftbatch.scheduler.chaos.local_cluster import Host, LocalCluster, NamespaceHosts, Node
from swiftbatch.scheduler.cluster.ray_cluster import SILENT_SECONDS, connect

Kind = Literal[
    "worker", "raylet", "driver", "stop", "hangup",  # kills; "stop" stops a worker, "hangup" closes a driver's terminal
    "rival",  # another driver takes over from a stopped one, which then wakes
    "hang", "cut", "drain",  # a node stops, is cut off, gets notice
    "freeze", "isolate",  # the head stops, the driver is cut off
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
DRIVER_KINDS: tuple[Kind, ...] = ("driver", "hangup", "rival")  # possible on any cluster

QUIET_END = 0.15  # last share of the tokens without kills, so that each kill comes in time
Way = Callable[[Sequence[WorkerStatus]], str | None]


@dataclass(frozen=True)
class PlannedKill:
    """A kill due at `num_tokens` of the whole run."""

    kind: Kind
    num_tokens: int


def plan_kills(num_kills: int, kinds: Sequence[Kind], num_tokens: int, random: Random) -> list[PlannedKill]:
    """Plan one kill in each of `num_kills` equal parts of the run, with all kinds equally often."""
    drawn = [kinds[index % len(kinds)] for index in range(num_kills)]
    random.shuffle(drawn)
    stretch = num_tokens * (1 - QUIET_END) / max(1, num_kills)
    return [PlannedKill(kind, int(stretch * (index + random.random()))) for index, kind in enumerate(drawn)]


def local_ways(cluster: LocalCluster, random: Random) -> Mapping[Kind, Way]:
    victims = LocalVictims(cluster, random)
    return {
        "worker": partial(victims.hit_worker, signal.SIGKILL),
        "raylet": victims.kill_raylet,
        "stop": partial(victims.hit_worker, signal.SIGSTOP),  # it exists but no longer answers
    }


def remote_ways(address: str, random: Random) -> Mapping[Kind, Way]:
    """Return the faults for the user's cluster, whose nodes we must not kill."""

    def hit_worker(number: signal.Signals, workers: Sequence[WorkerStatus]) -> str | None:
        worker = random.choice(workers)
        is_done = _signal_worker_on(address, worker.node_id, worker.pid, number)
        return f"{worker.id}, process {worker.pid} on {worker.host}" if is_done else None

    return {"worker": partial(hit_worker, signal.SIGKILL), "stop": partial(hit_worker, signal.SIGSTOP)}


class LocalVictims:
    """The workers and nodes of a local cluster that still run."""

    def __init__(self, cluster: LocalCluster, random: Random) -> None:
        self._cluster = cluster
        self._random = random
        self._dead_pids: set[int] = set()  # the driver's next heartbeat may still list them

    def hit_worker(self, number: signal.Signals, workers: Sequence[WorkerStatus]) -> str | None:
        worker = self._choose(workers)
        if worker is None or not signal_worker(worker.pid, number):
            return None
        self._dead_pids.add(worker.pid)
        return f"{worker.id}, process {worker.pid}"

    def kill_raylet(self, workers: Sequence[WorkerStatus]) -> str | None:
        """Kill a worker's node with SIGKILL and start another node."""
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
    """Send a signal to a Ray worker on this machine; return False if `pid` is not a running Ray worker."""
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


# Faults of nodes that are temporary or announced: hang, cut and notice.


LONGEST_SECONDS = 2.5 * WORKER_TIMEOUT  # some end unnoticed, others after the jobs moved
LONGEST_HEAD_SECONDS = 1.5 * SILENT_SECONDS  # long enough for the driver to give up sometimes
NOTICE_SECONDS = 10.0  # time from notice to end
AFTERWARDS_SECONDS = 60.0  # a driver may still give up within this time


class NoNodeFaults:
    """No faults, for nodes without networks of their own."""

    def tend(self) -> None:
        pass

    def may_end_a_driver(self) -> bool:
        return False

    def driver_prefix(self) -> tuple[str, ...]:
        return ()


class NodeFaults:
    """The current faults of a cluster of namespaces, and the next driver's host."""

    def __init__(
        self,
        cluster: LocalCluster,
        hosts: NamespaceHosts,
        random: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._hosts, self._random, self._clock = cluster, hosts, random, clock
        self._due: list[tuple[float, Callable[[], object]]] = []  # the end of each fault
        self._troubled: set[Node | Host] = set()
        self._is_head_troubled_until = 0.0
        self._driver_hosts = [cluster.head_host, hosts.add()]  # the newest driver's is last

    def ways(self) -> Mapping[Kind, Way]:
        return {
            "hang": self._hang,
            "cut": self._cut,
            "drain": self._drain,
            "freeze": self._freeze_head,
            "isolate": self._isolate_driver,
        }

    def tend(self) -> None:
        """End due faults and replace dead nodes."""
        now = self._clock()
        over = [entry for entry in self._due if entry[0] <= now]
        self._due = [entry for entry in self._due if entry[0] > now]
        for _, end in over:
            end()
        self._cluster.replace_ended()

    def may_end_a_driver(self) -> bool:
        """Return whether a driver may end because the head was recently unreachable."""
        return self._clock() < self._is_head_troubled_until + AFTERWARDS_SECONDS

    def driver_prefix(self) -> tuple[str, ...]:
        """Return the command prefix of the next driver's host, preferably another host than before."""
        head_host = self._cluster.head_host
        host = self._driver_hosts[0] if self._driver_hosts[0] not in self._troubled else head_host
        self._driver_hosts.remove(host)
        self._driver_hosts.append(host)
        return host.prefix

    def _hang(self, _workers: Sequence[WorkerStatus]) -> str | None:
        node = self._choose()
        if node is None:
            return None
        node.signal(signal.SIGSTOP)
        seconds = self._begin(LONGEST_SECONDS, lambda: node.signal(signal.SIGCONT), node)
        return f"{node.host.address} for {seconds:.0f} s"

    def _cut(self, _workers: Sequence[WorkerStatus]) -> str | None:
        """Cut a node off from the network for a while; its workers continue."""
        node = self._choose()
        if node is None:
            return None
        self._hosts.cut(node.host)
        seconds = self._begin(LONGEST_SECONDS, lambda: self._hosts.mend(node.host), node)
        return f"{node.host.address} for {seconds:.0f} s"

    def _drain(self, _workers: Sequence[WorkerStatus]) -> str | None:
        node = self._choose()
        if node is None:
            return None
        node.process.terminate()
        is_cut = self._random.random() < 0.5
        if is_cut:
            self._hosts.cut(node.host)
        seconds = self._begin(NOTICE_SECONDS, lambda: node.signal(signal.SIGKILL), node)
        return f"{node.host.address}, {seconds:.0f} s of notice{', cut off' if is_cut else ''}"

    def _freeze_head(self, _workers: Sequence[WorkerStatus]) -> str | None:
        """Suspend the head's processes for a while."""
        head = self._cluster.head
        if head is None or head in self._troubled:
            return None
        head.signal(signal.SIGSTOP)
        seconds = self._begin(LONGEST_HEAD_SECONDS, lambda: head.signal(signal.SIGCONT), head)
        self._may_end_a_driver_for(seconds)
        return f"for {seconds:.0f} s"

    def _isolate_driver(self, _workers: Sequence[WorkerStatus]) -> str | None:
        """Cut the driver's host off for a while."""
        host = self._driver_hosts[-1]
        if host in self._troubled:
            return None
        self._hosts.cut(host)
        seconds = self._begin(LONGEST_HEAD_SECONDS, lambda: self._hosts.mend(host), host)
        self._may_end_a_driver_for(seconds)
        return f"{host.address} for {seconds:.0f} s"

    def _may_end_a_driver_for(self, seconds: float) -> None:
        self._is_head_troubled_until = max(self._is_head_troubled_until, self._clock() + seconds)

    def _begin(self, longest: float, end: Callable[[], object], troubled: Node | Host) -> float:
        """Schedule a fault's end within `longest` seconds; return after how many seconds it ends."""
        seconds = self._random.uniform(1, longest)

        def end_it() -> None:
            end()
            self._troubled.discard(troubled)

        self._troubled.add(troubled)
        self._due.append((self._clock() + seconds, end_it))
        return seconds

    def _choose(self) -> Node | None:
        fine = [node for node in self._cluster.raylets if node not in self._troubled]
        return self._random.choice(fine) if fine else None
