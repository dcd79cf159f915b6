"""GPU cache memory is pinned as requested, and freed once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.kv.kv_offload import PinnedMemory

GPU = torch.device("cuda")
SIZE = 100_003


class Runtime:
    """A stand-in for CUDA's runtime that records calls."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.error = 0

    def register(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = size
        return self.error

    def unregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 1


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    cudart = SimpleNamespace(cudaHostRegister=runtime.register, cudaHostUnregister=runtime.unregister)

    def check(error: int) -> None:
        assert error == 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return runtime


def test_it_is_pinned_where_it_lies_and_released_once(runtime: Runtime) -> None:
    memory = PinnedMemory(SIZE, GPU)
    assert runtime.registered == {memory.bytes.data_ptr(): SIZE}
    memory.release()
    memory.release()
    assert not runtime.registered


def test_a_refusal_is_told_in_a_line_and_the_next_launch_does_not_meet_it(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = []

    def launch(*_: object, device: torch.device) -> None:
        launches.append(device)
        raise RuntimeError("CUDA error: out of memory")

    runtime.error = 2
    monkeypatch.setattr(torch, "zeros", launch)
    with pytest.raises(KVRoomError, match=r"no pinned memory for a cache of 0\.00 GB: CUDA error 2"):
        PinnedMemory(SIZE, GPU)
    assert launches == [GPU]


def test_who_still_looks_at_it_keeps_it(runtime: Runtime) -> None:
    memory = PinnedMemory(SIZE, GPU)
    rows = memory.bytes[10:20].fill_(7)
    memory.release()
    del memory
    assert rows.tolist() == [7] * 10


def test_a_cpu_pins_nothing(runtime: Runtime) -> None:
    memory = PinnedMemory(SIZE, torch.device("cpu"))
    assert memory.bytes.shape == (SIZE,)
    memory.release()
    assert not runtime.registered
