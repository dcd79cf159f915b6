from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory, plan_pages
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.model_files import ModelFiles
from tests.worker.forward.cuda.cuda_parts import cuda_target
from tests.worker.forward.cuda.test_cuda_engine import CROSSING, generated

KV_DTYPES = pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])


@pytest.mark.long
@KV_DTYPES
def test_drafts_give_the_tokens_of_plain_decoding(files: ModelFiles, kv_dtype: KVDtype) -> None:
    expected = generated(TargetModel.load(files, "float32", "cpu", kv_dtype=kv_dtype), "autoregressive", 3, CROSSING)
    target = cuda_target(files, torch.float32, linear="cublas", kv_dtype=kv_dtype)
    assert target.forwards.numerics.endswith(f"{kv_dtype} keys and values")
    assert generated(target, "token-recycling", 3, CROSSING) == expected


def test_codes_come_back_from_a_checkpoint(files: ModelFiles) -> None:
    target = cuda_target(files, torch.float32, linear="cublas", kv_dtype="int8")
    cache, other = target.new_cache(20), target.new_cache(20)
    target.read(cache, [5, 6, 7])
    kept = cache.kv(0, 3)
    assert kept.dtype == np.int8
    other.load(kept)
    assert (other.kv(0, 3) == kept).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_plan_counts_the_bytes_that_an_arena_takes(files: ModelFiles, dtype: str) -> None:
    sizes = read_sizes(files, dtype)
    assert sizes is not None
    sizes = dataclasses.replace(sizes, kv_dtype="fp8")
    forwards = cuda_target(files, getattr(torch, dtype), 3, 200, kv_dtype="fp8").forwards
    assert isinstance(forwards, CudaForwards)
    plan = plan_pages(sizes, GPUMemory(10**10), 200, 3)
    assert forwards.arena.pool_size is not None
    num_positions = forwards.arena.pool_size.num_pages * forwards.arena.pool_size.page
    assert num_positions * plan.page_bytes == GPU_PAGE * forwards.arena.buffer.nbytes
