"""The requested device, and the hardware on which bits depend. The driver imports this file without torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from swiftbatch.jobs.errors import GPUFailedError, ModelError, UserError
from swiftbatch.worker.kernels.native_library import cpu_flags

if TYPE_CHECKING:
    import torch

    from swiftbatch.worker.forward.nvml import VisibleGPU

DRIVER = Path("/proc/driver/nvidia/version")
LEAST_DRIVERS = {12: 525, 13: 580}  # by major version of CUDA
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
    """Return whether torch can use a GPU here; where NVML is there, CUDA is not initialised.

    Raises ModelError if a GPU is here that this torch can't use, since its jobs would run on cores.
    """
    if not _has_libcuda():  # no driver, so no need for torch, whose import takes seconds
        return False
    from swiftbatch.worker.forward.nvml import has_nvml

    if not has_nvml():  # in a container without the driver capability `utility`
        import torch

        return torch.cuda.is_available()
    _refuse_unfit_torch()
    return own_gpu() is not None


def resolve_device(device: str) -> torch.device:
    """Return the device of `auto`, `cpu` or `cuda`.

    Raises ModelError if CUDA is requested but absent, or not `cpu`, but a GPU is here that torch can't use.
    """
    import torch

    if device == "cpu" or torch.cuda.is_available():
        return torch.device("cpu" if device == "cpu" else "cuda")
    _refuse_unfit_torch()
    version, cuda = torch_build()
    build = "a CPU build" if cuda is None else f"built for CUDA {cuda}"
    if (gpu := own_gpu()) is not None:
        raise ModelError(
            f"{gpu.name} with driver {driver_version()} is here, but torch {version} ({build}) can't use it; see what "
            "nvidia-smi says, or use --device cpu"
        )
    if device == "cuda":
        raise ModelError(f"device cuda: no CUDA device is visible to torch {version} ({build}); use --device cpu")
    return torch.device("cpu")


def _refuse_unfit_torch() -> None:
    """Raise ModelError if a GPU is here, but this build of torch is not made for it or its driver."""
    if (gpu := own_gpu()) is None:
        return
    from swiftbatch.worker.forward.nvml import driver_here

    (version, cuda), driver = torch_build(), driver_here()
    if cuda is None:
        raise ModelError(
            f"{gpu.name} is here, but torch {version} is a CPU build; install torch's build for CUDA, or use "
            "--device cpu"
        )
    major = int(cuda.split(".")[0])
    if driver is not None and driver.cuda[0] < major:
        needed = f"driver {LEAST_DRIVERS[major]} or newer" if major in LEAST_DRIVERS else "a newer driver"
        raise ModelError(
            f"driver {driver.version} serves CUDA {driver.cuda[0]}.{driver.cuda[1]}, but torch {version} is built for "
            f"CUDA {cuda}, which needs {needed}; install that, or torch's build for CUDA {driver.cuda[0]}, or use "
            "--device cpu"
        )


def torch_build() -> tuple[str, str | None]:
    """Return torch's version and the CUDA that it is built for, None for a CPU build, without importing torch."""
    place = importlib.util.find_spec("torch")
    found = runpy.run_path(str(Path(str(place and place.origin)).with_name("version.py")))
    return str(found["__version__"]), found["cuda"]


def own_gpu() -> VisibleGPU | None:
    """Return this process's first GPU, or None without a GPU or NVML."""
    if not _has_libcuda():
        return None
    from swiftbatch.worker.forward.nvml import own_gpus

    return next(iter(own_gpus()), None)


def _has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


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
    if (found := _gpu_name_and_size()) is None:
        return "no GPU"
    name, num_multiprocessors = found
    return f"{name} with {num_multiprocessors} SMs, driver {driver_version()}, cuBLAS {cublas_version()}"


def _gpu_name_and_size() -> tuple[str, int] | None:
    if (gpu := own_gpu()) is not None:
        return gpu.name, gpu.num_multiprocessors
    if not has_cuda():
        return None
    import torch

    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.multi_processor_count


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
