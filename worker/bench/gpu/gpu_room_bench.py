"""Memory of a device: which lengths have room, and how much was taken."""

from __future__ import annotations

import torch

from swiftbatch.worker.bench.peak_memory import peak_bytes, reset_peak
from swiftbatch.worker.caches.memory.memory_plan import GPUMemory, one_slot
from swiftbatch.worker.caches.memory.model_sizes import ModelSizes
from swiftbatch.worker.caches.room import MEMORY, KVRoom


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of the device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(KVRoom(MEMORY, 1).free_bytes())


def fitting_lengths(
    sizes: ModelSizes, gpu: GPUMemory, lengths: list[int], num_behind: int, num_slots: int
) -> list[int]:
    """Lengths of which so many slots have room, each with `num_behind` positions more."""
    return [length for length in lengths if one_slot(sizes, gpu, length + num_behind).num_fitting >= num_slots]


class MemoryMeter:
    """The most bytes that were held, stage by stage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.noted: dict[str, int] = {}
        self._reset()

    def note(self, stage: str) -> None:
        """Note the most that was held since the last stage; on a GPU with what it has for itself."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            outside = total - free - reserved  # the context, other libraries' buffers, other processes
            self.noted[f"{stage}, at most"] = outside + torch.cuda.max_memory_reserved(self._device)
        else:
            self.noted[f"{stage}, at most"] = peak_bytes()
        self._reset()

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            reset_peak()
