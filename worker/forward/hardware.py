"""The requested device, and the hardware on which bits depend. The driver imports this file without torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from swiftbatch.jobs.errors import GPUFailedError, ModelError, UserError
from swiftbatch.worker.kernels.native_library import cpu_flags

if TYPE_CHECKING:
    import torch

DRIVER = Path("/proc/driver/nvidia/version")
AVX512 = {"avx512f", "avx512vl", "avx512bw", "avx512dq", "fma"}  # torch requires these
AVX2 = {"avx2", "fma"}
LIBRARY_SETTINGS = (  # variables that change bits of torch's products on a CPU; `cpu_capability` has torch's own
    *(f"{library}_{name}" for library in ("ONEDNN", "DNNL") for name in ("MAX_CPU_ISA", "CPU_ISA_HINTS")),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("MKL_CBWR", "MKL_DISABLE_FAST_MM", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS"),
    *("TORCH_LINEAR_FLATTEN_3D", "TORCH_MKLDNN_MATMUL_MIN_DIM", "TORCH_MKLDNN_MATMUL_MIN_SIZE"),
)
GPU_ERRORS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error")
FULL_ERRORS = ("out of memory", "ALLOC_FAILED")  # among them, those of full memory, which break nothing
PROBED_SHAPES = ((1, 512, 1024), (16, 512, 1024), (16, 2048, 512), (16, 576, 1536))  # rows, depth, columns


def has_cuda() -> bool:
    """Return whether torch can use a GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver, so no need for torch, whose import takes seconds
        return False
    import torch

    return torch.cuda.is_available()


def resolve_device(device: str) -> torch.device:
    """Return the device of `auto`, `cpu` or `cuda`. Raises ModelError if CUDA is requested but absent."""
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        build = "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        raise ModelError(
            f"device cuda: no CUDA device is visible to torch {torch.__version__} ({build}); use --device cpu"
        )
    return torch.device("cuda" if device != "cpu" and available else "cpu")


@contextlib.contextmanager
def gpu_failures() -> Iterator[None]:
    """Raise a GPU's errors as GPUFailedError, or as torch.OutOfMemoryError if its memory is full."""
    try:
        yield
    except RuntimeError as error:
        import torch

        text = str(error)
        is_of_gpu = isinstance(error, torch.AcceleratorError) or any(mark in text for mark in GPU_ERRORS)
        if not is_of_gpu or isinstance(error, (UserError, torch.OutOfMemoryError)):
            raise
        if any(mark in text for mark in FULL_ERRORS):
            raise torch.OutOfMemoryError(text) from error
        raise GPUFailedError(f"the GPU failed: {text.splitlines()[0]}") from error


def cpu_capability() -> str:
    """Return torch's name for this CPU's instruction set, such as "AVX512"."""
    flags = cpu_flags()
    if "ATEN_CPU_CAPABILITY" in os.environ or not flags:
        import torch

        return torch.backends.cpu.get_cpu_capability()
    return "AVX512" if flags >= AVX512 else "AVX2" if flags >= AVX2 else "DEFAULT"


@functools.cache
def hardware_of(device_type: str) -> str:
    """Return a line that differs if bits may differ: CPU instructions and library settings, or GPU and drivers."""
    if device_type != "cuda":
        settings = (f"{name}={os.environ[name]}" for name in LIBRARY_SETTINGS if name in os.environ)
        return " ".join([cpu_capability(), *_cpu_features(), *settings])
    if not has_cuda():
        return "no GPU"
    import torch

    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name} with {properties.multi_processor_count} SMs, driver {driver_version()}, "
        f"cuBLAS {cublas_version()}"
    )


def torch_gemms() -> str:
    """Return a short hash of matrix products in torch, since oneDNN and MKL do not tell which kernels they choose."""
    import torch

    return _torch_products(torch.get_num_threads())


@functools.cache
def _torch_products(_num_threads: int) -> str:
    import torch
    from torch.nn.functional import linear

    found = hashlib.sha256()
    for rows, depth, columns in PROBED_SHAPES:
        left, right = _scattered(rows, depth), _scattered(columns, depth)
        for dtype in (torch.bfloat16, torch.float32):
            found.update(linear(left.to(dtype), right.to(dtype)).float().numpy().tobytes())
        for function in (torch.exp, torch.tanh, torch.sigmoid):
            found.update(function(8 * left).numpy().tobytes())
    return found.hexdigest()[:8]


def _scattered(num_rows: int, num_columns: int) -> torch.Tensor:
    """Return fixed numbers of both signs and several magnitudes, whose sums depend on the order."""
    import torch

    mixed = (torch.arange(num_rows * num_columns) + num_columns) * 6364136223846793005 + 1442695040888963407
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    mixed ^= mixed >> 32
    numbers = torch.ldexp((mixed & 0xFFFFFF).float() / 2**23 - 1, -((mixed >> 24) & 7).int())
    return numbers.view(num_rows, num_columns)


def gpu_here() -> tuple[int, int]:
    """Return the GPU's major compute capability and its free bytes."""
    import torch

    return torch.cuda.get_device_capability(0)[0], torch.cuda.mem_get_info(0)[0]


def driver_version() -> str:
    """Return the NVIDIA driver's version, such as "570.86.15", or "unknown"."""
    try:
        words = DRIVER.read_text(encoding="utf-8").split("\n")[0].split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def cublas_version() -> str:
    """Return the version of the cuBLAS package, or of CUDA if the package is not installed."""
    for package in importlib.metadata.distributions():
        if str(package.metadata["Name"]).startswith("nvidia-cublas"):
            return package.version
    import torch

    return f"of CUDA {torch.version.cuda}"


def _cpu_features() -> list[str]:
    """Return CPU features beyond torch's capability that change bf16 products."""
    found = {"avx512_bf16": "avx512_bf16", "amx": "amx_tile"}
    return [name for name, flag in found.items() if flag in cpu_flags()]
