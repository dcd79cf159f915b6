"""The command `python -m bench gpu`, importable without Triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.options import GPUOptions as Options
from bench.tables import Record
from swiftbatch.worker.decode_bench import BenchError


def run(options: Options) -> Iterator[Record]:
    """Measure a GPU: steps against the roofline, prefill, a resume, every engine, and the memory used.

    Run `swiftbatch doctor --device cuda` first. Without --text the model generates its own, which takes minutes.

    With --everything it brings its own models, and needs neither Ray nor a network. Every stage has a process of its
    own, which is killed when its time is over, and leaves a JSON file and a log in the folder; `summary.md` has all
    tables. The same command goes on after an interruption. Exit code: 0 all stages passed, 1 not all did.

    \b
    Example:
      python -m bench gpu --model DIR --text book.txt --json gpu.jsonl
      python -m bench gpu --everything --minutes 27 --output found
    """
    if options.output is not None:
        from bench.gpu.everything import run_everything

        yield from run_everything(options.output, options.minutes)
        return
    if not torch.cuda.is_available():
        raise BenchError(
            f"no GPU to measure: no CUDA device is visible to torch {torch.__version__}; "
            "`python -m bench kernels` measures CPUs"
        )
    from bench.gpu.steps import measured
    from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
    from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
    from swiftbatch.worker.model.model_files import locate_model

    kernels = CudaKernels(options.attention, options.linear)
    yield from measured(Parts.of(locate_model(options.model), options.dtype, torch.device("cuda"), kernels), options)
