"""Troubles of a cluster's nodes that pass, or announce themselves: nodes hang, are cut off, or get notice and go.

A trouble ends when it is due, in `tend`; a node that has ended meanwhile is replaced there: Ray ends a node that comes
back after it was given up.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random

from swiftbatch.jobs.run.run_records import WorkerStatus
from swiftbatch.scheduler.chaos.chaos_options import WORKER_TIMEOUT
from swiftbatch.scheduler.chaos.hosts import Host, NamespaceHosts
from swiftbatch.scheduler.chaos.kills import Kind, Way
from swiftbatch.scheduler.chaos.local_cluster import LocalCluster, Node
from swiftbatch.scheduler.cluster.cluster_watch import SILENT_SECONDS

LONGEST_SECONDS = 2.5 * WORKER_TIMEOUT  # some are over before anybody notices, others when the jobs are elsewhere
LONGEST_HEAD_SECONDS = 1.5 * SILENT_SECONDS  # the driver gives some up
NOTICE_SECONDS = 10.0  # between a node's notice and its end
AFTERWARDS_SECONDS = 60.0  # within which a driver may still give up for it


class NoTroubles:
    """Nothing passes where a cluster's nodes have no networks of their own."""

    def tend(self) -> None:
        pass

    def may_end_a_driver(self) -> bool:
        return False

    def driver_prefix(self) -> tuple[str, ...]:
        return ()


class Troubles:
    """The troubles of a cluster of namespaces now, and the place of its next driver: beside the head, or apart."""

    def __init__(
        self,
        cluster: LocalCluster,
        hosts: NamespaceHosts,
        random: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._hosts, self._random, self._clock = cluster, hosts, random, clock
        self._due: list[tuple[float, Callable[[], object]]] = []  # each trouble's end
        self._troubled: set[Node | Host] = set()
        self._is_head_troubled_until = 0.0
        self._driver_hosts = [cluster.head_host, hosts.add()]  # the newest driver's last

    def ways(self) -> Mapping[Kind, Way]:
        return {
            "hang": self._hang,
            "cut": self._cut,
            "drain": self._drain,
            "freeze": self._freeze_head,
            "isolate": self._isolate_driver,
        }

    def tend(self) -> None:
        """End what is due, and replace nodes that have ended."""
        now = self._clock()
        over = [entry for entry in self._due if entry[0] <= now]
        self._due = [entry for entry in self._due if entry[0] > now]
        for _, end in over:
            end()
        self._cluster.replace_ended()

    def may_end_a_driver(self) -> bool:
        """Return whether the head was out of the driver's reach a moment ago: it then stops, and is started again."""
        return self._clock() < self._is_head_troubled_until + AFTERWARDS_SECONDS

    def driver_prefix(self) -> tuple[str, ...]:
        """The words in front of the next driver's command: not where the last one runs, if the other host is there."""
        head_host = self._cluster.head_host
        host = self._driver_hosts[0] if self._driver_hosts[0] not in self._troubled else head_host
        self._driver_hosts.remove(host)
        self._driver_hosts.append(host)
        return host.prefix

    def _hang(self, _workers: Sequence[WorkerStatus]) -> str | None:
        """Stop all processes of a node for a while."""
        node = self._choose()
        if node is None:
            return None
        node.signal(signal.SIGSTOP)
        seconds = self._begin(LONGEST_SECONDS, lambda: node.signal(signal.SIGCONT), node)
        return f"{node.host.address} for {seconds:.0f} s"

    def _cut(self, _workers: Sequence[WorkerStatus]) -> str | None:
        """Cut a node off for a while: its workers go on."""
        node = self._choose()
        if node is None:
            return None
        self._hosts.cut(node.host)
        seconds = self._begin(LONGEST_SECONDS, lambda: self._hosts.mend(node.host), node)
        return f"{node.host.address} for {seconds:.0f} s"

    def _drain(self, _workers: Sequence[WorkerStatus]) -> str | None:
        """Give a node notice, and end it a little later; it may be cut off for the rest of its life."""
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
        """Stop the head for a while; its processes are not the driver's."""
        head = self._cluster.head
        if head is None or head in self._troubled:
            return None
        head.signal(signal.SIGSTOP)
        seconds = self._begin(LONGEST_HEAD_SECONDS, lambda: head.signal(signal.SIGCONT), head)
        self._may_end_a_driver_for(seconds)
        return f"for {seconds:.0f} s"

    def _isolate_driver(self, _workers: Sequence[WorkerStatus]) -> str | None:
        """Cut the driver off for a while; where it runs beside the head, all nodes lose that, too."""
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
        """Have a trouble end within `longest` seconds; returns in how many."""
        seconds = self._random.uniform(1, longest)

        def end_it() -> None:
            end()
            self._troubled.discard(troubled)

        self._troubled.add(troubled)
        self._due.append((self._clock() + seconds, end_it))
        return seconds

    def _choose(self) -> Node | None:
        """A node without trouble, also one that starts or whose workers do; None if there is none."""
        fine = [node for node in self._cluster.raylets if node not in self._troubled]
        return self._random.choice(fine) if fine else None
