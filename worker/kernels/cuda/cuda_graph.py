"""Work that is launched again and again over the same buffers: captured once in a CUDA graph, one launch from then on.

Whatever is captured may neither allocate nor ask for a number on the host, and its buffers must stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch

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
