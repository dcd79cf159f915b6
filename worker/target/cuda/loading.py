"""How a dense decoder comes onto a GPU: the memory is planned first, then weights go there, then the arena."""

from __future__ import annotations

import os

import torch

from worker.caches.arena import KVArena
from worker.caches.copies import CudaLane, Staging
from worker.caches.full import CacheShape
from worker.caches.summary import summary_positions
from worker.kernels.cuda.stacked import handed_over, stacked_weights
from worker.memory.plan import NO_DRAFTS, DraftMemory, GPUMemory, MemoryPlan, SlotsWanted, plan_memory
from worker.memory.sizes import ModelSizes, read_sizes
from worker.model.dense import dense_weights
from worker.model.files import ModelFiles
from worker.target.cuda.forwards import CudaForwards

PROGRAMS_PER_MULTIPROCESSOR = 4  # of attention: two waves of two, as their shared memory allows
LINEAR = "cublas"


def load_cuda_forwards(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, wanted: SlotsWanted, eos_token_ids: frozenset[int]
) -> CudaForwards | None:
    """Forwards with as many slots as fit; None for a model that the kernels do not take. Raises KVRoomError."""
    sizes = read_sizes(files, str(dtype).removeprefix("torch."))
    if sizes is None:
        return None
    hold_products_steady()
    num_splits = splits_of(torch.cuda.get_device_properties(device).multi_processor_count, sizes.num_kv_heads)
    gpu = GPUMemory(torch.cuda.mem_get_info(device)[0], num_splits)
    plan = plan_memory(sizes, gpu, wanted.longest_job, drafts=drafts_of(wanted, sizes))
    staging = Staging(CudaLane(device), torch.cuda.current_stream(device))
    return planned_forwards(files, dtype, device, plan, num_splits, eos_token_ids, staging)


def planned_forwards(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    plan: MemoryPlan,
    num_splits: int,
    eos_token_ids: frozenset[int],
    staging: Staging | None,
) -> CudaForwards | None:
    """As the plan says; None for a model that the kernels do not take."""
    weights = dense_weights(files, dtype, device)
    if weights is None:
        return None
    sizes = weights.sizes
    stacked = stacked_weights(weights, device, handed_over(weights))
    shape = CacheShape(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, dtype, device)
    arena = KVArena(shape, plan.num_slots, plan.longest_job, staging)
    try:
        return CudaForwards(stacked, arena, eos_token_ids, num_splits, LINEAR)
    except ValueError:  # sizes that the kernels have no tiles for
        return None


def hold_products_steady() -> None:
    """What cuBLAS may not choose by itself: sums in less than float32, and a workspace of another size."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when it is first used
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False


def drafts_of(wanted: SlotsWanted, sizes: ModelSizes) -> DraftMemory:
    """What drafts keep beside each slot."""
    if not wanted.partial_budget:
        return NO_DRAFTS
    positions = summary_positions(wanted.partial_budget, wanted.longest_job)
    return DraftMemory(slot_bytes=positions * sizes.bytes_per_position)


def splits_of(num_multiprocessors: int, num_kv_heads: int) -> int:
    """Parts that prefixes are attended to in: a constant of the device and the model, so bits depend on both."""
    return max(1, PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // num_kv_heads)
