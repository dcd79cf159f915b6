"""This process's GPUs as NVML, the driver's management library, knows them: nothing here initialises CUDA."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pynvml
from pynvml import NVMLError

from swiftbatch.metrics.counters import GPUFigures

UNCORRECTED, SINCE_RESET = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
REASONS = {
    "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "hw_thermal": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "sw_thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "sw_power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
}
SLICE = "MIG-"  # begins the UUID of a slice of a GPU


@dataclass(frozen=True)
class VisibleGPU:
    """A GPU, or a slice of one."""

    handle: Any
    uuid: str

    @property
    def name(self) -> str:
        """Return its name, such as "NVIDIA H100 PCIe". Raises NVMLError."""
        return str(pynvml.nvmlDeviceGetName(self.handle))

    @property
    def capability(self) -> tuple[int, int]:
        """Return its compute capability. Raises NVMLError."""
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(self.handle)
        return major, minor

    @property
    def num_multiprocessors(self) -> int:
        """Return its number of SMs, whose cores NVML counts, unless it is a slice. Raises NVMLError."""
        if self.uuid.startswith(SLICE):
            return int(pynvml.nvmlDeviceGetAttributes(self.handle).multiprocessorCount)
        num_cores_of_one = 64 if self.capability <= (8, 0) else 128
        return int(pynvml.nvmlDeviceGetNumGpuCores(self.handle)) // num_cores_of_one

    @property
    def free_bytes(self) -> int:
        """Return its free memory in bytes. Raises NVMLError."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(self.handle).free)

    def figures(self) -> GPUFigures:
        """Read what an operator watches."""
        handle, reasons = self.handle, pynvml.nvmlDeviceGetCurrentClocksEventReasons
        memory, held = _told(pynvml.nvmlDeviceGetMemoryInfo, handle), _told(reasons, handle)
        used = _told(pynvml.nvmlDeviceGetUtilizationRates, handle)
        return GPUFigures(
            self.uuid,
            _told(pynvml.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, SINCE_RESET),
            None if held is None else {name: int(bool(held & bit)) for name, bit in REASONS.items()},
            _told(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            memory and memory.used,
            memory and memory.total,
            used and used.gpu / 100,
        )


def _told(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return an answer of NVML, or None where it has none."""
    try:
        return ask(*arguments)
    except NVMLError:
        return None


class NvidiaDriver(NamedTuple):
    """The NVIDIA driver and the newest CUDA that it serves."""

    version: str  # such as "570.86.15"
    cuda: tuple[int, int]


@functools.cache
def has_nvml() -> bool:
    """Load NVML; return whether it is there and has a driver."""
    try:
        pynvml.nvmlInit()
    except NVMLError:
        return False
    return True


def own_gpus() -> tuple[VisibleGPU, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order; none without NVML.

    Indexes count in the order of the bus. CUDA's own order is the same if all GPUs of the machine are of one kind.
    """
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not has_nvml():
        return ()
    try:
        everything = tuple(_gpu(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount()))
        return everything if said is None else tuple(_named(said.split(","), everything))
    except NVMLError:
        return ()


def driver_here() -> NvidiaDriver | None:
    """Return this machine's driver, or None without NVML."""
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2() if has_nvml() else None
        return cuda and NvidiaDriver(str(pynvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10))
    except NVMLError:
        return None


def _gpu(handle: Any) -> VisibleGPU:
    return VisibleGPU(handle, str(pynvml.nvmlDeviceGetUUID(handle)))


def _named(words: list[str], everything: tuple[VisibleGPU, ...]) -> Iterator[VisibleGPU]:
    """Yield the GPUs of indexes, UUIDs or their beginnings, up to the first word that names none, as CUDA does."""
    for word in map(str.strip, words):
        if word.startswith(SLICE):
            yield _gpu(pynvml.nvmlDeviceGetHandleByUUID(word))
        elif word.isdecimal() and int(word) < len(everything):
            yield everything[int(word)]
        elif word.startswith("GPU-") and len(found := [gpu for gpu in everything if gpu.uuid.startswith(word)]) == 1:
            yield found[0]
        else:
            return
