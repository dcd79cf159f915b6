"""Compiles a model's kernels for GPUs that are not there: `python -m swiftbatch.worker.forward.cuda.compile_ahead`.

The forwards and draws of a worker run here with its own call sites, whose launches only compile. So Triton's cache
gets the keys that launches on such a GPU look up.
"""

from __future__ import annotations

import functools
from collections import Counter

import click
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.cuda.cuda_loading import cuda_cache_shape
from swiftbatch.worker.kernels.cuda.cuda_graph import Graph, Repeated, Work
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS, ROW_CHOICES, most_slots
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE, PoolSize
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import ModelFiles, locate_model

GPUS = ("sm_80", "sm_90")  # an A100, and an H100 or H200
PAGES_OF_A_JOB = (15, 16)  # Triton compiles another form if a stride is a multiple of 16


class AbsentGPU:
    """Triton's driver of a GPU that nothing can be launched on."""

    def __init__(self, gpu: str) -> None:
        self._target = GPUTarget("cuda", int(gpu.removeprefix("sm_")), 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # a process has its compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> Counter[bool]:
    """Make all launches of this process compile. Return counts of kernels, by whether the cache had them."""
    found = Counter[bool]()
    JITFunction.__getitem__ = lambda kernel, grid: functools.partial(kernel.warmup, grid=grid)
    triton.knobs.compilation.listener = lambda *, cache_hit, **given: found.update([cache_hit])
    return found


def compile_model(files: ModelFiles, dtype: torch.dtype, gpu: str, num_rows: int, num_pages: int) -> None:
    """Compile forwards and draws of jobs of up to `num_pages` pages. Raises ModelError for a model without kernels."""
    triton.runtime.driver.set_active(AbsentGPU(gpu))
    cpu = torch.device("cpu")
    weights = dense_weights(files, dtype, cpu)
    if weights is None:
        raise ModelError(f"model {files.name}: it has no kernels on a GPU, so there is nothing to compile")
    shape = cuda_cache_shape(weights, cpu, None)
    arena = KVArena(shape, most_slots(num_rows), num_pages * GPU_PAGE - 1, PoolSize(2 * num_pages))
    stacked = stacked_weights(weights, cpu)
    kernels = CudaKernels(linear="triton", num_rows=num_rows)  # has all kernels that cuBLAS leaves, and products
    CudaForwards(stacked, arena, frozenset(), kernels, run_once).new_batch_sampler()


def run_once(work: Work, device: torch.device) -> Graph:
    """Be a `Capture` whose warm-up compiles."""
    work()
    return Repeated(work)


@click.command()
@click.option("--model", required=True, help="Model to compile kernels for, as for submit.")
@click.option("--gpu", "gpus", multiple=True, type=click.Choice(GPUS), default=GPUS)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--rows", "num_rows", type=click.Choice(ROW_CHOICES), default=NUM_ROWS, show_default=True)
def main(model: str, gpus: tuple[str, ...], dtype: str, num_rows: int) -> None:
    """Compile the kernels of a model's forwards and draws into TRITON_CACHE_DIR."""
    if triton.knobs.runtime.interpret:
        raise click.UsageError("TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    found, files = compile_only(), locate_model(model)
    try:
        for gpu in gpus:
            for num_pages in PAGES_OF_A_JOB:
                compile_model(files, getattr(torch, dtype), gpu, num_rows, num_pages)
    except ModelError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{found[False]} kernels compiled, {found[True]} known")


if __name__ == "__main__":
    main()
