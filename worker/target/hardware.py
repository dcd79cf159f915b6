"""What a device is, as far as bits depend on it."""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/version")


@functools.cache
def hardware_of(device_type: str) -> str:
    """A line that differs wherever bits may: a CPU's instructions; a GPU's name, multiprocessors, driver and cuBLAS.

    `device_type` as in `torch.device`; a GPU that this machine does not have is `no GPU`.
    """
    if device_type == "cuda" and not torch.cuda.is_available():
        return "no GPU"
    if device_type != "cuda":
        return " ".join([torch.backends.cpu.get_cpu_capability(), *_cpu_features()])
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name} with {properties.multi_processor_count} SMs, driver {driver_version()}, "
        f"cuBLAS {cublas_version()}"
    )


def driver_version(path: Path = DRIVER) -> str:
    """The NVIDIA driver's version, as in `570.86.15`; `unknown` where the kernel does not tell."""
    try:
        words = path.read_text(encoding="utf-8").split("\n")[0].split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def cublas_version() -> str:
    """The version of the installed cuBLAS package; where it came otherwise, that of CUDA."""
    for package in importlib.metadata.distributions():
        if str(package.metadata["Name"]).startswith("nvidia-cublas"):
            return package.version
    return f"of CUDA {torch.version.cuda}"


def _cpu_features() -> list[str]:
    """Where matrix products in bf16 take other instructions, beside the capability that torch was built for."""
    found = {"avx512_bf16": torch.cpu._is_avx512_bf16_supported(), "amx": torch.cpu._is_amx_tile_supported()}
    return [name for name, is_there in found.items() if is_there]
