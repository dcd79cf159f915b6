from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch

from swiftbatch.worker.kernels.cuda import cuda_graph


@pytest.fixture
def _no_gpu_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(cuda_graph, "_capture_stream", lambda device: stream)
    for name, stub in (
        ("current_stream", lambda device: stream),
        ("stream", contextlib.nullcontext),
        ("CUDAGraph", SimpleNamespace),
        ("graph", lambda captured, stream: contextlib.nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, stub)


@pytest.mark.usefixtures("_no_gpu_is_needed")
def test_a_graph_keeps_the_buffers_that_only_its_work_holds_and_frees_them_with_itself() -> None:
    buffer = torch.zeros(4)
    held = weakref.ref(buffer)
    captured = cuda_graph.CudaGraph(lambda buffer=buffer: buffer.add_(1), torch.device("cuda"))  # type: ignore[misc]
    del buffer
    assert held() is not None
    del captured
    assert held() is None
