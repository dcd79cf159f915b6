"""A target on several GPUs, which are all the CPU."""

from __future__ import annotations

import torch

from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.cuda.cuda_loading import cuda_cache_shape
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.cuda.rank_weights import shared_weights
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kv.kv_capacity import PoolSize, pages_of
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import ModelFiles
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.forward.cuda.cuda_parts import CPU, PAGE, leave_unwritten

KERNELS = CudaKernels(linear="triton")


def target_on_ranks(
    files: ModelFiles, num_ranks: int, dtype: torch.dtype = torch.bfloat16, longest_job: int = 200
) -> TargetModel:
    """Unwritten caches are NaN."""
    weights = dense_weights(files, dtype)
    assert weights is not None
    devices, shape = [CPU] * num_ranks, cuda_cache_shape(weights, CPU, None)
    pool = PoolSize(2 * pages_of(longest_job + PAGE, PAGE), PAGE)
    arena = KVArena.of_ranks(shape, devices, 2, longest_job, pool, [None] * num_ranks)
    for each in (arena, *arena.other_ranks):
        leave_unwritten(each.buffer)
    first, *others = shared_weights(weights, devices)
    return TargetModel(CudaForwards(first, arena, frozenset(), KERNELS, CheckedGraph, others), files)
