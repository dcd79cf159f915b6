"""Copies between a GPU and its host beside the computation: a stream of their own, and two pinned buffers in turn.

The stream that computes is here as well: whoever copies beside it asks, from any thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

STAGING_BYTES = 1 << 24  # size of one buffer: a piece takes about a millisecond, so the wait for the first is short


class CopyEvent(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Return once all that was queued before it is done."""


class CopyComputation(Protocol):
    """The stream that computes, as `torch.cuda.Stream` has it. No graph may be captured on it meanwhile."""

    def record_event(self) -> Any:
        """A point behind all that was queued until now."""

    def wait_event(self, event: Any) -> None:
        """Let all that is queued from now on wait for the event."""


class CopyLane(Protocol):
    """A lane of copies, one after the other; each may be done at any time until an event behind it is waited for."""

    def buffers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two buffers `[num_bytes] uint8`: on the host, pinned, and on the device."""

    def follow(self, event: Any) -> None:
        """Let all that is queued from now on wait for the event."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy."""

    def mark(self) -> CopyEvent:
        """A point behind all copies queued until now."""


class CudaLane:
    """A CUDA stream for copies alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return pinned, torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def follow(self, event: torch.cuda.Event) -> None:
        self._stream.wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event


@dataclass
class _Side:
    """One of the two pairs of buffers, and when it is free again."""

    host: torch.Tensor  # [STAGING_BYTES] uint8
    device: torch.Tensor
    is_done: CopyEvent | None = None

    def views(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both buffers in the form of `rows`, contiguous: so one launch gathers them, and one copy crosses."""
        num_bytes = rows.numel() * rows.element_size()
        host, device = (each[:num_bytes].view(rows.dtype).view(rows.shape) for each in (self.host, self.device))
        return host, device

    def wait(self) -> None:
        if self.is_done is not None:
            self.is_done.synchronize()


class Staging:
    """Brings positions of a cache on the device to the host and back, in pieces; any thread may ask."""

    def __init__(self, lane: CopyLane, computation: CopyComputation, num_bytes: int = STAGING_BYTES) -> None:
        """`computation` is the stream that writes and reads the cache, whichever thread asks for copies."""
        self._lane, self._computation, self._num_bytes = lane, computation, num_bytes
        self._sides = [_Side(*lane.buffers(num_bytes)) for _ in range(2)]
        self._lock = threading.Lock()

    def read(self, rows: torch.Tensor) -> NDArray[Any]:
        """A copy of rows `[..., num_positions, head_dim]` as all that was queued to compute until now leaves them."""
        copied = np.empty(rows.shape, dtype=_numpy_dtype(rows))
        coming: list[tuple[slice, NDArray[Any], _Side]] = []
        with self._lock:
            self._lane.follow(self._computation.record_event())
            for number, piece in enumerate(self._pieces(rows)):
                side = self._sides[number % 2]
                host, device = side.views(rows[..., piece, :])
                self._lane.copy(device, rows[..., piece, :])
                self._lane.copy(host, device)
                side.is_done = self._lane.mark()
                coming.append((piece, host.numpy(), side))
                if len(coming) == 2:  # the next piece takes the buffer of this one
                    _take(copied, *coming.pop(0))
            for arrived in coming:
                _take(copied, *arrived)
        return copied

    def write(self, rows: torch.Tensor, kv: NDArray[Any]) -> None:
        """Fill rows `[..., num_positions, head_dim]`; what is queued to compute from now on finds them there."""
        with self._lock:
            self._lane.follow(self._computation.record_event())  # it may still use what lay there
            for number, piece in enumerate(self._pieces(rows)):
                side = self._sides[number % 2]
                side.wait()
                host, device = side.views(rows[..., piece, :])
                host.numpy()[:] = kv[..., piece, :]
                self._lane.copy(device, host)
                self._lane.copy(rows[..., piece, :], device)
                side.is_done = self._lane.mark()
            self._computation.wait_event(self._lane.mark())

    def _pieces(self, rows: torch.Tensor) -> Iterator[slice]:
        """Ranges of positions that a buffer has room for."""
        num_positions = rows.shape[-2]
        position_bytes = rows.element_size() * rows.shape[:-2].numel() * rows.shape[-1]
        step = self._num_bytes // position_bytes
        for start in range(0, num_positions, step):
            yield slice(start, min(start + step, num_positions))


def _take(copied: NDArray[Any], piece: slice, host: NDArray[Any], side: _Side) -> None:
    side.wait()
    copied[..., piece, :] = host


def _numpy_dtype(rows: torch.Tensor) -> np.dtype[Any]:
    known = {torch.int16: np.int16, torch.int8: np.int8, torch.uint8: np.uint8}
    return np.dtype(known.get(rows.dtype, np.float32))


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
