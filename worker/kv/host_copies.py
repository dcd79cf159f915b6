"""Copies rows between a GPU and its host while the GPU computes, through two pinned host buffers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

STAGING_BYTES = 1 << 24  # copying it takes about 1 ms


class CopyEvent(Protocol):
    """Event in a stream."""

    def synchronize(self) -> None:
        """Return once all work queued before the event is done."""


class CopyComputation(Protocol):
    """Computing stream, like `torch.cuda.Stream`. No graph may be captured on the stream during copies."""

    def record_event(self) -> Any:
        """Return an event after all work queued so far."""

    def wait_event(self, event: Any) -> None:
        """Let all later work wait for the event."""


class CopyLane(Protocol):
    """Stream of copies; wait for an event after a copy before using its result."""

    def buffers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two buffers `[num_bytes] uint8`: pinned on the host, and on the device."""

    def follow(self, event: Any) -> None:
        """Let all later copies wait for the event."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy."""

    def mark(self) -> CopyEvent:
        """Return an event after all copies queued so far."""


class CudaLane:
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
    """Pair of buffers; `is_done` is the event after which the pair is free again."""

    host: torch.Tensor  # [STAGING_BYTES] uint8
    device: torch.Tensor
    is_done: CopyEvent | None = None

    def views(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both buffers in the shape of `rows`, contiguous."""
        num_bytes = rows.numel() * rows.element_size()
        host, device = (each[:num_bytes].view(rows.dtype).view(rows.shape) for each in (self.host, self.device))
        return host, device

    def wait(self) -> None:
        if self.is_done is not None:
            self.is_done.synchronize()


class Staging:
    """Copies rows of a cache to the host and back, in pieces; thread-safe."""

    def __init__(self, lane: CopyLane, computation: CopyComputation, num_bytes: int = STAGING_BYTES) -> None:
        self._lane, self._computation, self._num_bytes = lane, computation, num_bytes
        self._sides = [_Side(*lane.buffers(num_bytes)) for _ in range(2)]
        self._lock = threading.Lock()

    def read(self, rows: torch.Tensor) -> NDArray[Any]:
        """Return a copy of rows `[..., num_positions, head_dim]`, after all work queued so far."""
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
                if len(coming) == 2:  # the next piece reuses this buffer
                    _take(copied, *coming.pop(0))
            for arrived in coming:
                _take(copied, *arrived)
        return copied

    def write(self, rows: torch.Tensor, kv: NDArray[Any]) -> None:
        """Fill rows `[..., num_positions, head_dim]` before all later work."""
        with self._lock:
            self._lane.follow(self._computation.record_event())  # a forward may still read the old rows
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
    """`CopyComputation` on the newest forward's stream, for all threads."""

    def __init__(self, current: Callable[[], Any]) -> None:
        self._current, self._stream = current, current()

    def join(self) -> None:
        """Let the calling thread compute on its current stream, after all earlier work."""
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
    """Computing stream without a GPU, where work is done as soon as it is queued."""

    def record_event(self) -> HostStream:
        return self

    def wait_event(self, event: CopyEvent) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        """Do nothing."""


@functools.cache
def computing_stream(device: torch.device) -> ComputingStream:
    if device.type == "cuda":
        return ComputingStream(functools.partial(torch.cuda.current_stream, device))
    return ComputingStream(HostStream)
