"""CUDA graphs that replay work over the same buffers, and the upload of what they read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Work = Callable[[], None]


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Do the work once more; on a GPU it is only queued."""


Capture = Callable[[Work, torch.device], Graph]


class CudaGraph:
    """A `Graph` on a GPU.

    It keeps its work: CUDA knows addresses alone, and buffers that nobody else holds would be freed and used by others.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work = work
        stream = _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()  # compiles kernels and makes cuBLAS its workspace, neither of which may happen in a capture
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            work()
        torch.cuda.current_stream(device).wait_stream(stream)

    def replay(self) -> None:
        self._graph.replay()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures, only one: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)


class Repeated:
    """A `Graph` elsewhere: the work itself."""

    def __init__(self, work: Work) -> None:
        self.replay = work


def capture(work: Work, device: torch.device) -> Graph:
    """A `Capture` for any device."""
    return CudaGraph(work, device) if device.type == "cuda" else Repeated(work)


# Numbers on their way to static buffers and back: pinned on the host, so that nobody waits for a copy to be queued.


NUM_HOST_BUFFERS = 2  # one is filled while the other may still be read


class Upload:
    """Fills one static buffer of int32."""

    def __init__(self, target: torch.Tensor) -> None:
        """`target [size] int32` on the device."""
        self._target = target
        on_gpu = target.device.type == "cuda"
        self._hosts = [torch.zeros(len(target), dtype=torch.int32, pin_memory=on_gpu) for _ in range(NUM_HOST_BUFFERS)]
        self._numbers: list[NDArray[np.int32]] = [host.numpy() for host in self._hosts]
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_HOST_BUFFERS
        self._next = 0

    def buffer(self) -> NDArray[np.int32]:
        """The host's numbers `[size]` of the next copy, as an earlier one left them; waits until that one is done."""
        if event := self._copied[self._next]:
            event.synchronize()
        return self._numbers[self._next]

    def send(self) -> None:
        """Queue the copy of what `buffer` gave."""
        self._target.copy_(self._hosts[self._next], non_blocking=True)
        if self._target.device.type == "cuda":
            self._copied[self._next] = torch.cuda.current_stream(self._target.device).record_event()
        self._next = (self._next + 1) % NUM_HOST_BUFFERS


class Download:
    """Brings one static buffer of int32 to the host, with the only wait of a step."""

    def __init__(self, source: torch.Tensor) -> None:
        """`source [size] int32` on the device."""
        self._source = source
        self._host = torch.zeros(len(source), dtype=torch.int32, pin_memory=source.device.type == "cuda")
        self._numbers: NDArray[np.int32] = self._host.numpy()

    def wait(self) -> NDArray[Any]:
        """The numbers `[size] int32` once all queued work is done; the next download overwrites them."""
        self._host.copy_(self._source, non_blocking=True)
        if self._source.device.type == "cuda":
            torch.cuda.current_stream(self._source.device).synchronize()
        return self._numbers
