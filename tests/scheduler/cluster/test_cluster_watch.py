from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions

from swiftbatch.scheduler.cluster import ray_cluster
from swiftbatch.scheduler.cluster.ray_cluster import ClusterLostError, ClusterWatch
from tests.simulated_clock import SimulatedClock

pytestmark = pytest.mark.ray


class FakeHead:
    """Losing a real head ends the test's process."""

    def __init__(self) -> None:
        self.alive: Callable[[], list[bool]] = lambda: [True]
        self.draining: dict[str, int] = {}

    def check_alive(self, node_ids: list[Any], timeout: float) -> list[bool]:
        return self.alive()

    def get_draining_nodes(self, timeout: float) -> dict[str, int]:
        return self.draining


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> FakeHead:
    monkeypatch.setattr(ray_cluster, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(ray_cluster, "SILENT_SECONDS", 0.3)
    return FakeHead()


def raising(name: str, message: str) -> Callable[[], list[bool]]:
    def alive() -> list[bool]:
        raise getattr(ray.exceptions, name)(message)

    return alive


def await_loss(watch: ClusterWatch) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            watch.check()
        except ClusterLostError as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("the watch noticed nothing")


def test_a_head_that_answers_is_no_problem_and_tells_which_nodes_go(
    head: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    watch = ClusterWatch(head, "own")
    assert watch.draining() == {}
    head.draining = {"n1": int(1000 * (now + 30)), "n2": 0}
    deadline = time.monotonic() + 120
    while not (seconds := watch.draining()):
        watch.check()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert seconds["n1"] == pytest.approx(30, abs=0.01)
    assert seconds["n2"] == float("inf")  # no deadline
    watch.stop()


def test_a_head_may_be_silent_for_a_while(head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "SILENT_SECONDS", 30.0)
    clock = SimulatedClock()
    monkeypatch.setattr(time, "monotonic", clock)
    watch = ClusterWatch(head, "own")
    for _ in range(2):
        head.alive = raising("RpcError", "Deadline Exceeded")
        for _ in range(29):
            clock.now += 1
            watch.check()
        head.alive = lambda: [True]
        assert watch._has_answered.wait(60)
        watch.check()
    watch.stop()


def test_a_head_that_stays_silent_is_lost(head: FakeHead) -> None:
    watch = ClusterWatch(head, "own")
    head.alive = raising("RpcError", "Timed out while waiting for GCS to become available.")
    assert "has not answered for" in await_loss(watch)


def test_a_driver_that_was_stopped_does_not_blame_the_head(head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "SILENT_SECONDS", 10.0)
    monkeypatch.setattr(ray_cluster, "POLL_SECONDS", 3600.0)
    watch = ClusterWatch(head, "own")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 38)  # it could not receive answers meanwhile
    watch.check()
    watch.stop()


def test_a_question_that_never_returns_is_a_silent_head(head: FakeHead) -> None:
    hangs = threading.Event()
    head.alive = lambda: [hangs.wait()]
    assert "has not answered for" in await_loss(ClusterWatch(head, "own"))
    hangs.set()


def test_a_head_that_was_started_anew_is_lost_at_once_and_asked_no_more(head: FakeHead) -> None:
    watch = ClusterWatch(head, "own")
    head.alive = raising("AuthenticationError", "RPC error: WrongClusterID")
    assert "started anew" in await_loss(watch)
    head.alive = lambda: [True]
    time.sleep(0.1)
    assert "started anew" in await_loss(watch)


def test_the_death_of_the_drivers_own_node_is_a_loss(head: FakeHead) -> None:
    watch = ClusterWatch(head, "own")
    head.alive = lambda: [False]
    assert "node of this machine has died" in await_loss(watch)


def test_behind_a_lost_cluster_ray_says_nothing_more() -> None:
    program = """
import os, sys
from swiftbatch.scheduler.cluster.ray_cluster import connect
from swiftbatch.scheduler.cluster.ray_cluster import ClusterLostError
try:
    with connect(None, 1):
        raise ClusterLostError("the head is gone")
except ClusterLostError as error:
    os.write(2, b"what a thread of Ray writes before")
    print(error, file=sys.stderr)
    os.write(2, b"what a thread of Ray writes behind it")
"""
    with tempfile.TemporaryDirectory(prefix="cw-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command, environment = [sys.executable, "-c", program], os.environ | {"RAY_TMPDIR": folder}
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert list(Path(folder).glob("*/session_latest/logs/gcs_server.out"))  # Ray's logs may explain it
    assert (process.returncode, process.stderr) == (2, "the head is gone\n")
