"""Seconds of what a device does: by its own events on a GPU, by the host's clock elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Protocol

import torch

from swiftbatch.worker.kernels.cuda.graph import Work, capture
from swiftbatch.worker.target.stopwatch import seconds_now


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
