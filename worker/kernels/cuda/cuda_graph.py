"""CUDA graphs over fixed buffers, and the upload of their inputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.jobs.start_times import timed
from swiftbatch.worker.kernels.cuda.peers import Launch, on, run_together

Work = Callable[[], None]


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Repeat the work. On a GPU this only queues it."""


Capture = Callable[[Work, torch.device], Graph]


class CudaGraph:
    """`Graph` on a GPU, which keeps the callable because CUDA stores only the addresses of its buffers."""

    def __init__(self, work: Work, device: torch.device, is_warm: bool = False) -> None:
        self._work = work
        stream = _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        if not is_warm:
            with torch.cuda.stream(stream), timed("compilation"):
                work()  # compiles kernels and creates cuBLAS's workspace, both impossible in a capture
        self._graph = torch.cuda.CUDAGraph()
        with timed("captures"), torch.cuda.graph(self._graph, stream=stream):
            work()
        torch.cuda.current_stream(device).wait_stream(stream)

    def replay(self) -> None:
        self._graph.replay()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the only stream of captures, since cuBLAS keeps a workspace per stream."""
    return torch.cuda.Stream(device)


class Repeated:
    """`Graph` on other devices, where each replay calls the function again."""

    def __init__(self, work: Work) -> None:
        self.replay = work


class RankGraphs:
    """`Graph` of several GPUs, which meet: each has a graph and a thread that replays it."""

    def __init__(self, works: Sequence[Callable[[], Iterator[Launch]]], devices: Sequence[torch.device]) -> None:
        run_together([work() for work in works], devices)  # one GPU alone would wait at its first meeting
        self._places = [on(device) for device in devices]
        self._graphs = list[CudaGraph]()
        for work, device, place in zip(works, devices, self._places, strict=True):
            with place:
                self._graphs.append(CudaGraph(functools.partial(_run_all, work), device, is_warm=True))
        self._threads = ThreadPoolExecutor(len(works), "replay")

    def replay(self) -> None:
        for done in [*self._threads.map(_replay_on, self._places, self._graphs)]:
            assert done is None


def _run_all(work: Callable[[], Iterator[Launch]]) -> None:
    for launch in work():
        launch()


def _replay_on(place: contextlib.AbstractContextManager[object], graph: CudaGraph) -> None:
    with place:
        graph.replay()


def capture_ranks(
    works: Sequence[Callable[[], Iterator[Launch]]], devices: Sequence[torch.device], capture: Capture
) -> Graph:
    """Capture the launches of ranks that meet; on a CPU one graph has those of all."""
    if devices[0].type == "cuda":
        return RankGraphs(works, devices)
    return capture(lambda: run_together([work() for work in works], devices), devices[0])


def capture(work: Work, device: torch.device) -> Graph:
    return CudaGraph(work, device) if device.type == "cuda" else Repeated(work)


# Copies to and from static buffers through pinned memory, so that queueing them does not block.


NUM_HOST_BUFFERS = 2  # one is filled while the other may still be read


class Upload:
    """Fills one static buffer of int32."""

    def __init__(self, target: torch.Tensor) -> None:
        """Take `target [size] int32`."""
        self._target = target
        on_gpu = target.device.type == "cuda"
        self._hosts = [torch.zeros(len(target), dtype=torch.int32, pin_memory=on_gpu) for _ in range(NUM_HOST_BUFFERS)]
        self._numbers: list[NDArray[np.int32]] = [host.numpy() for host in self._hosts]
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_HOST_BUFFERS
        self._next = 0

    def buffer(self) -> NDArray[np.int32]:
        """Return the host buffer `[size]` to fill for the next copy. It still has the values of an earlier copy."""
        if event := self._copied[self._next]:
            event.synchronize()
        return self._numbers[self._next]

    def send(self) -> None:
        self._target.copy_(self._hosts[self._next], non_blocking=True)
        if self._target.device.type == "cuda":
            self._copied[self._next] = torch.cuda.current_stream(self._target.device).record_event()
        self._next = (self._next + 1) % NUM_HOST_BUFFERS


class Download:
    """Copies one static int32 buffer to the host. Waiting for this copy is a step's only synchronization."""

    def __init__(self, source: torch.Tensor) -> None:
        """Take `source [size] int32`."""
        self._source = source
        self._host = torch.zeros(len(source), dtype=torch.int32, pin_memory=source.device.type == "cuda")
        self._numbers: NDArray[np.int32] = self._host.numpy()

    def wait(self) -> NDArray[Any]:
        """Return the numbers `[size] int32`, which the next download overwrites."""
        self._host.copy_(self._source, non_blocking=True)
        if self._source.device.type == "cuda":
            torch.cuda.current_stream(self._source.device).synchronize()
        return self._numbers
