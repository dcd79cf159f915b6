"""Kernels that are compiled ahead are those that workers look up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = pytest.mark.long

OTHER_RUN = """
import torch, triton
from swiftbatch.worker.forward.cuda.compile_ahead import *

found, cpu, missed = compile_only(), torch.device("cpu"), []

def listen(*, src, cache_hit, **given):
    found.update([cache_hit])
    missed.extend([] if cache_hit else [src.fn.__name__])

triton.knobs.compilation.listener = listen
triton.runtime.driver.set_active(AbsentGPU("sm_90"))
files = locate_model("embedded")
weights = dense_weights(files, torch.bfloat16, cpu)
shape, stacked = cuda_cache_shape(weights, cpu, None), stacked_weights(weights, cpu)
for num_slots, longest, num_pages in ((5, 1000, 12), (32, 5000, 37), (17, 8000, 64), (1, 300, 3)):
    arena = KVArena(shape, num_slots, longest, PoolSize(num_pages))
    kernels = CudaKernels(linear="triton")
    CudaForwards(stacked, arena, frozenset(), kernels, run_once).new_batch_sampler()
print(found[True] > 30, sorted(missed))
"""


def python(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(ROOT / "build" / "triton"), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_runs_of_any_length_and_number_of_jobs_find_every_kernel_in_the_cache() -> None:
    command = ("-m", "swiftbatch.worker.forward.cuda.compile_ahead", "--model", "embedded", "--gpu", "sm_90")
    python(*command)
    assert python(*command).startswith("0 kernels compiled, ")
    assert python("-c", OTHER_RUN) == "True []"


def test_with_the_interpreter_on_it_says_that_nothing_would_be_compiled() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "swiftbatch.worker.forward.cuda.compile_ahead", "--model", "embedded"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 2
    assert "unset it" in ran.stderr
