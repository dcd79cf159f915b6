"""`python -m bench gpu`: what a GPU makes of a model. Steps, prompts, a resume, every engine, and the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from bench.gpu.gpu_figures import GPUBenchOptions
from swiftbatch.worker.bench_texts import BenchError
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.model.model_files import locate_model

if TYPE_CHECKING:
    from bench.gpu.gpu_figures import GPUBenchResult


def run_gpu_bench(options: GPUBenchOptions, report: Callable[[str], None] = lambda line: None) -> GPUBenchResult:
    """Measure this machine's GPU; `report` gets a line about each stage. Raises BenchError, ModelError."""
    if not torch.cuda.is_available():
        raise BenchError(
            f"no GPU to measure: no CUDA device is visible to torch {torch.__version__}; "
            "`python -m bench kernels` measures CPUs"
        )
    from bench.gpu.measuring import measured
    from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts

    kernels = CudaKernels(options.attention, options.linear)
    parts = Parts.of(locate_model(options.model), options.dtype, torch.device("cuda"), kernels)
    return measured(parts, options, report)
