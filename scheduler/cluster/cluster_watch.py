"""Watches a Ray cluster's head."""

from __future__ import annotations

import threading
import time
from typing import Any

LONGEST_TICK = 2.0


class AwakeClock:
    """A clock to measure how long others are silent; it skips times when this process itself was stopped."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._seconds = 0.0

    def now(self) -> float:
        """Return the seconds since creation, counting at most two between readings."""
        last, self._last = self._last, time.monotonic()
        self._seconds += min(self._last - last, LONGEST_TICK)
        return self._seconds


# Asks the cluster's head once a second whether it is there and which nodes will leave.


POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0
SILENT_SECONDS = 30.0  # a head with a database restarts within this time


class ClusterLostError(RuntimeError):
    """The Ray cluster is gone."""


class ClusterWatch:
    """The state of the cluster, from the thread's newest answers."""

    def __init__(self, head: Any, own_node_id: Any) -> None:
        """`head` is Ray's `GcsClient`."""
        self._head = head
        self._own_node_id = own_node_id
        self._clock = AwakeClock()
        self._answered = 0.0  # in that clock's seconds
        self._has_answered = threading.Event()  # since the last check
        self._problem: str | None = None
        self._draining: dict[str, float] = {}
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="cluster-watch", daemon=True).start()

    def check(self) -> None:
        """Raise ClusterLostError if the cluster is gone; call it several times a second."""
        if self._problem is not None:
            raise ClusterLostError(self._problem)
        now = self._clock.now()
        if self._has_answered.is_set():
            self._has_answered.clear()
            self._answered = now
        silence = now - self._answered
        if silence > SILENT_SECONDS:
            raise ClusterLostError(f"the head of the Ray cluster has not answered for {silence:.0f} s")

    def draining(self) -> dict[str, float]:
        """Return the seconds left for each node that will leave."""
        now = time.time()
        return {node_id: deadline - now for node_id, deadline in self._draining.items()}

    def stop(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while self._problem is None and not self._ended.wait(POLL_SECONDS):
            self._ask()

    def _ask(self) -> None:
        from ray.exceptions import AuthenticationError, RayError

        try:
            (is_alive,) = self._head.check_alive([self._own_node_id], timeout=ANSWER_SECONDS)
            deadlines = self._head.get_draining_nodes(timeout=ANSWER_SECONDS)
        except AuthenticationError:
            self._problem = "the head of the Ray cluster was started anew, and does not know this run's workers"
        except RayError:
            return  # no answer; `check` measures the silence
        else:
            self._has_answered.set()
            if not is_alive:
                self._problem = "the Ray node of this machine has died, and the run's workers with it"
            # 0 means no deadline; because clocks differ, the deadline may already have passed
            self._draining = {node_id: ms / 1000 if ms else float("inf") for node_id, ms in deadlines.items()}
