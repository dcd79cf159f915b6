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

    With --everything it brings its own models, and needs no network. Every stage has a process of its own, which is
    killed when its time is over, and leaves a JSON file and a log in the folder; `summary.md` has all tables. The same
    command goes on after an interruption. --first runs only the first stages, which take a quarter of an hour, and
    --everything goes on in their folder. Exit code: 0 all stages passed, 1 not all did.

    \b
    Example:
      python -m bench gpu --model DIR --text book.txt --json gpu.jsonl
      python -m bench gpu --first --output found
      python -m bench gpu --everything --minutes 27 --output found
    """
    if options.everything or options.first:
        from bench.gpu.everything import FIRST, STAGES, run_everything

        if options.output is None:
            raise BenchError("--everything and --first: expected a folder for what is found, as --output found")
        yield from run_everything(options.output, options.minutes, STAGES if options.everything else FIRST)
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
