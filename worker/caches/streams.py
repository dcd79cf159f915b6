"""The stream that computes: whoever copies beside it asks here, from any thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from swiftbatch.worker.caches.copies import CopyEvent


class ComputingStream:
    """A `Computation`: the stream on which the newest forward was queued.

    A thread's current stream is its own affair: one that writes checkpoints cannot look for that of another thread.
    """

    def __init__(self, current: Callable[[], Any]) -> None:
        """`current` says which stream the calling thread computes on."""
        self._current, self._stream = current, current()

    def join(self) -> None:
        """Let the calling thread compute on its current stream, behind all that was computed before."""
        stream = self._current()
        if stream != self._stream:
            stream.wait_event(self._stream.record_event())
            self._stream = stream

    def record_event(self) -> Any:
        return self._stream.record_event()

    def wait_event(self, event: Any) -> None:
        self._stream.wait_event(event)


@dataclass(frozen=True)
class HostStream:
    """A computing stream elsewhere than on a GPU, its own event: what was queued is done."""

    def record_event(self) -> HostStream:
        return self

    def wait_event(self, event: CopyEvent) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        """Do nothing: all is done."""


@functools.cache
def computing_stream(device: torch.device) -> ComputingStream:
    """The one of this process on a device."""
    if device.type == "cuda":
        return ComputingStream(functools.partial(torch.cuda.current_stream, device))
    return ComputingStream(HostStream)
