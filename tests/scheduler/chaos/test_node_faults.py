"""Faults hit nodes without one, end in time, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from swiftbatch.scheduler.chaos.chaos_options import ChaosError, ChaosOptions
from swiftbatch.scheduler.chaos.experiment import run_chaos
from swiftbatch.scheduler.chaos.faults import (
    AFTERWARDS_SECONDS,
    LONGEST_HEAD_SECONDS,
    LONGEST_SECONDS,
    NOTICE_SECONDS,
    NodeFaults,
)
from swiftbatch.scheduler.chaos.local_cluster import Host, namespace_hosts
from tests.simulated_clock import SimulatedClock

HEAD, DESK = Host("head", ("on", "head")), Host("desk", ("on", "desk"))
needs_root = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip`")


class Scene:
    def __init__(self, num_nodes: int = 2) -> None:
        self.log: list[object] = []
        self.clock = SimulatedClock()
        hosts: Any = SimpleNamespace(
            add=lambda: DESK,
            cut=lambda host: self.log.append(("cut", host.address)),
            mend=lambda host: self.log.append(("mend", host.address)),
        )
        cluster: Any = SimpleNamespace(
            head=self._node("head"),
            head_host=HEAD,
            raylets=[self._node(f"node{number}") for number in range(1, num_nodes + 1)],
            replace_ended=lambda: None,
        )
        self.troubles = NodeFaults(cluster, hosts, Random(1), self.clock)

    def begin(self, kind: Any) -> str | None:
        return self.troubles.ways()[kind]([])

    def _node(self, name: str) -> Any:
        def hear(number: signal.Signals) -> None:
            self.log.append((number.name, name))

        terminate = SimpleNamespace(terminate=lambda: hear(signal.SIGTERM))
        return _Node(host=Host(name), process=terminate, signal=hear)


class _Node(SimpleNamespace):
    __hash__ = object.__hash__


def test_a_node_is_cut_off_until_its_time_is_over_and_not_troubled_twice() -> None:
    scene = Scene()
    assert [bool(scene.begin(kind)) for kind in ("cut", "cut", "hang")] == [True, True, False]  # two nodes, three times
    cut = set(scene.log)
    assert cut == {("cut", "node1"), ("cut", "node2")}
    scene.troubles.tend()
    assert set(scene.log) == cut
    scene.clock.sleep(LONGEST_SECONDS)
    scene.troubles.tend()
    assert set(scene.log) - cut == {("mend", "node1"), ("mend", "node2")}


def test_a_node_that_hangs_goes_on_later() -> None:
    scene = Scene(num_nodes=1)
    assert scene.begin("hang") is not None
    scene.clock.sleep(LONGEST_SECONDS)
    scene.troubles.tend()
    assert scene.log == [("SIGSTOP", "node1"), ("SIGCONT", "node1")]


def test_a_node_that_has_notice_loses_its_power_a_little_later() -> None:
    scene = Scene(num_nodes=1)
    assert scene.begin("drain") is not None
    scene.clock.sleep(NOTICE_SECONDS)
    scene.troubles.tend()
    assert (scene.log[0], scene.log[-1]) == (("SIGTERM", "node1"), ("SIGKILL", "node1"))


def test_a_driver_may_give_up_where_it_was_cut_off_from_the_head_and_the_next_one_runs_elsewhere() -> None:
    scene = Scene()
    assert scene.troubles.driver_prefix() == HEAD.prefix
    assert scene.troubles.driver_prefix() == DESK.prefix
    scene.begin("hang")
    assert not scene.troubles.may_end_a_driver()
    assert scene.begin("isolate") is not None
    assert ("cut", "desk") in scene.log
    assert scene.begin("isolate") is None
    assert scene.troubles.may_end_a_driver()
    assert [scene.troubles.driver_prefix() for _ in range(2)] == [HEAD.prefix] * 2  # the other one is still cut off
    scene.clock.sleep(LONGEST_HEAD_SECONDS + AFTERWARDS_SECONDS)
    scene.troubles.tend()
    assert not scene.troubles.may_end_a_driver()
    assert scene.troubles.driver_prefix() == DESK.prefix


@needs_root
def test_hosts_reach_each_other_unless_one_is_cut_off_and_are_gone_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError):
        cut_off_and_fail()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"swiftbatch-{os.getpid()}" not in left


def cut_off_and_fail() -> None:
    with namespace_hosts() as hosts:
        one, other = hosts.add(), hosts.add()
        assert is_reached(one, other, seconds=60)
        hosts.cut(other)
        assert not is_reached(one, other, seconds=0.5)
        hosts.mend(other)
        assert is_reached(one, other, seconds=60)
        raise ZeroDivisionError


def is_reached(one: Host, other: Host, seconds: float) -> bool:
    ask = f"import socket; socket.create_connection(('{other.address}', 1), {seconds})"
    done = subprocess.run([*one.prefix, sys.executable, "-c", ask], capture_output=True, text=True)
    return "ConnectionRefusedError" in done.stderr


def test_nodes_of_our_own_and_a_cluster_that_is_there_are_refused_together(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_jobs": 1, "num_tokens": 1, "num_kills": 0, "seed": 0, "num_workers": 1}
    options |= {"num_slots": 1, "model": "none", "checkpoint_tokens": 1, "run_uri": str(tmp_path / "run")}
    with pytest.raises(ChaosError, match="leave it or --address out"):
        run_chaos(ChaosOptions(**options, address="here:1", num_nodes=2), print)
