"""The first check: what this device is, and how fast it reads."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from swiftbatch.worker.exactness.first_run.findings import Finding, Row
from swiftbatch.worker.exactness.first_run.parts import Parts
from swiftbatch.worker.exactness.first_run.probes import SPAN, num_read, read_all
from swiftbatch.worker.target.hardware import cpu_capability, cublas_version, driver_version

LEAST_CAPABILITY = (8, 0)  # tensor cores that take bf16


def check_machine(parts: Parts) -> Finding:
    """Versions, the GPU, and the bytes a second that everything else is held against."""
    facts = device_facts(parts.device)
    rows: list[Row] = [{"what": what, "found": found} for what, found in facts.items()]
    gigabytes = read_bandwidth(parts) / 1e9
    rows.append({"what": "read bandwidth", "found": f"{gigabytes:,.1f} GB/s"})
    capability = capability_of(parts.device)
    if capability < LEAST_CAPABILITY:
        found = ".".join(map(str, capability))
        return Finding(passed=False, words=f"compute capability {found}, expected 8.0 or higher", rows=rows)
    return Finding(passed=True, words=f"memory is read at {gigabytes:,.1f} GB/s", rows=rows)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the capability of a GPU; the interpreter does all that the least one does."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else LEAST_CAPABILITY


def device_facts(device: torch.device) -> dict[str, str]:
    """Everything that bits and speed may depend on."""
    facts = {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers")}
    facts = {"python": platform.python_version(), **facts}
    if device.type != "cuda":
        return facts | {"device": f"{device.type} {cpu_capability()}, Triton's interpreter"}
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "CUDA": str(torch.version.cuda),
        "cuBLAS": cublas_version(),
        "driver": driver_version(),
        "device": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "memory": f"{properties.total_memory / 1e9:.1f} GB",
        "L2 cache": f"{properties.L2_cache_size / 1e6:.0f} MB",
    }


def read_bandwidth(parts: Parts) -> float:
    """Bytes a second that a kernel which does nothing else reads, beyond all caches."""
    numbers = torch.zeros(num_read(parts.extent.read_bytes), dtype=torch.int32, device=parts.device)
    sums = torch.zeros(len(numbers) // SPAN, dtype=torch.int32, device=parts.device)
    seconds = parts.seconds(lambda: read_all(numbers, sums))
    return numbers.nbytes / seconds
