"""The clocks of steps: the time that passes, the processor time of one thread, or a GPU's own events."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from swiftbatch.worker.kernels.cuda.cuda_graph import Work, capture


def _passing() -> float:
    return time.perf_counter()


_read: Callable[[], float] = _passing


def seconds_now() -> float:
    """Read the clock, in seconds. Differences of two readings mean something, a reading alone does not."""
    return _read()


@contextlib.contextmanager
def by_processor() -> Iterator[None]:
    """Count the seconds that the processor spends on the calling thread, while the context lasts.

    That is the work of a step where one thread does all of it.
    """
    global _read
    _read = time.thread_time
    try:
        yield
    finally:
        _read = _passing


class Clock(Protocol):
    """A clock for calls that may only queue their work."""

    def seconds(self, call: Callable[[], object]) -> float:
        """Time one call, from the moment when all earlier work is done until its own is; wait for that."""


class EventClock:
    """A clock on a GPU: what the host needs to queue the work counts only where the GPU waits for it."""

    def seconds(self, call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


class HostClock:
    """A clock elsewhere: calls return when they are done."""

    def seconds(self, call: Callable[[], object]) -> float:
        started = seconds_now()
        call()
        return seconds_now() - started


def clock_of(device: torch.device) -> Clock:
    return EventClock() if device.type == "cuda" else HostClock()


def captured_seconds(clock: Clock, work: Work, device: torch.device, num_rounds: int) -> float:
    """Median seconds of work that is captured first, so that short kernels do not wait for their launches."""
    graph = capture(work, device)
    graph.replay()
    return statistics.median(clock.seconds(graph.replay) for _ in range(num_rounds))
