"""Numbers on their way to static buffers and back: pinned on the host, so that nobody waits for a copy to be queued."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
