"""Loading of a dense decoder onto a GPU, after its memory is planned."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.jobs.start_times import timed
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.forward_interface import Forwards
from swiftbatch.worker.kernels.cuda.cuda_row_table import compiled_library
from swiftbatch.worker.kernels.cuda.gemm_probe import refuse_uneven_products
from swiftbatch.worker.kernels.cuda.lora_kernels import adapter_bytes
from swiftbatch.worker.kernels.cuda.rank_weights import shared_weights
from swiftbatch.worker.kernels.cuda.stacked_weights import handed_over, stacked_weights, with_adapters
from swiftbatch.worker.kernels.decoder_weights import AdapterWeights, DecoderWeights
from swiftbatch.worker.kernels.gpu_kernel_choice import CUBLAS_WORKSPACES, DEFAULT_KERNELS, CudaKernels, refuse_latent
from swiftbatch.worker.kernels.kernel_sizes import CUDA_SCALE_BYTES
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.gpu_memory_plan import (
    NO_DRAFTS,
    DraftMemory,
    GPUMemory,
    MemoryPlan,
    SlotsWanted,
    draft_model_memory,
    most_of_a_job,
    plan_pages,
    slot_capacity,
)
from swiftbatch.worker.kv.host_copies import CudaLane, Staging, computing_stream
from swiftbatch.worker.kv.kv_capacity import (
    MAX_TREE_NODES,
    HeldPositions,
    KVRoomError,
    PoolSize,
    held_in_windows,
    settled_free_bytes,
)
from swiftbatch.worker.kv.model_sizes import ModelSizes, read_sizes
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.kv.sparse_cache import CHUNK_SIZE, partial_positions
from swiftbatch.worker.model.decoder_config import read_decoder_config
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import ModelFiles, read_config
from swiftbatch.worker.model.rank_faults import ranks_fault

# exactness was measured with cuBLAS; the environment may prefer cuBLASLt, which chooses other kernels
BLAS_LIBRARY = "cublas"


def load_cuda_forwards(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    wanted: SlotsWanted,
    eos_token_ids: frozenset[int],
    kernels: CudaKernels,
    kv_dtype: KVDtype | None = None,
    adapters: Sequence[AdapterWeights] = (),
    num_ranks: int = 1,
) -> CudaForwards | None:
    """Return forwards with as many slots as fit on `num_ranks` GPUs beside `adapters`.

    Returns None if the kernels do not support the model.

    Raises KVRoomError if memory is too small, KernelError without the compiled library, and ModelError if the requested
    kernels or several GPUs do not support the model.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    sizes = read_sizes(files, dtype_name)
    if sizes is None:
        return None
    if sizes.latent is not None:
        refuse_latent(kv_dtype, files.name)
    compiled_library()
    sizes = replace(sizes, kv_dtype=kv_dtype, held=_held(sizes, wanted))
    kernels.refuse_absent()
    kernels.refuse_unfit(dtype_name, sizes.widest_dim)
    hold_gemms_steady()
    devices = [device]
    if num_ranks > 1:
        refuse_unshared(files, wanted, num_ranks, kernels, adapters)
        wanted = replace(wanted, engine=None)
        devices, sizes = connected_gpus(num_ranks), sizes.of_a_rank(num_ranks)
    free_bytes = min(map(settled_free_bytes, devices)) - adapter_bytes(adapters)
    plan = plan_wanted(wanted, sizes, GPUMemory(free_bytes, kernels.attention, kernels.num_rows))
    stagings = [Staging(CudaLane(each), computing_stream(each)) for each in devices]
    if num_ranks > 1:
        return planned_ranks(files, dtype, devices, plan, eos_token_ids, stagings, kernels, kv_dtype)
    return planned_forwards(files, dtype, device, plan, eos_token_ids, stagings[0], kernels, kv_dtype, adapters)


def plan_wanted(wanted: SlotsWanted, sizes: ModelSizes, gpu: GPUMemory) -> MemoryPlan:
    """Plan a GPU's memory, without an optional engine if it is too small for that. Raises KVRoomError."""
    drafts = drafts_of(wanted, sizes, gpu)
    try:
        return plan_pages(sizes, gpu, wanted.longest_job, wanted.num_slots, drafts)
    except KVRoomError:
        if not wanted.can_lack_engine or wanted.engine is None:
            raise
        return plan_wanted(replace(wanted, engine=None), sizes, gpu)


def planned_forwards(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    plan: MemoryPlan,
    eos_token_ids: frozenset[int],
    staging: Staging | None,
    kernels: CudaKernels = DEFAULT_KERNELS,
    kv_dtype: KVDtype | None = None,
    adapters: Sequence[AdapterWeights] = (),
) -> CudaForwards | None:
    """Load a model as planned, or return None if the kernels do not support it.

    Raises ModelError if products on the GPU are not exact.
    """
    weights = dense_weights(files, dtype, device)
    if weights is None:
        return None
    forgets = plan.windows is not None
    shape = cuda_cache_shape(weights, device, kv_dtype, forgets)  # reads layers that are handed over below
    stacked = stacked_weights(weights, device, handed_over(weights))
    if device.type == "cuda":
        with timed("probes"):
            refuse_uneven_products(stacked, kernels.for_weights(stacked.is_packed).linear, kernels.num_rows)
    try:
        arena = arena_of(shape, plan, staging)
        arena.holds_engine = plan.has_engine
        return CudaForwards(with_adapters(stacked, adapters), arena, eos_token_ids, kernels)
    except ValueError:  # the kernels have no tiles for these sizes
        return None


def planned_ranks(
    files: ModelFiles,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    plan: MemoryPlan,
    eos_token_ids: frozenset[int],
    stagings: Sequence[Staging | None],
    kernels: CudaKernels,
    kv_dtype: KVDtype | None = None,
) -> CudaForwards | None:
    """Load a model on several GPUs as `planned_forwards` does on one; each reads its part from the host's memory."""
    weights = dense_weights(files, dtype)
    if weights is None:
        return None
    kernels = replace(kernels, linear="triton")  # cuBLAS sums a part of a depth in another order
    shape = cuda_cache_shape(weights, devices[0], kv_dtype, plan.windows is not None)
    try:
        first, *others = ranks = shared_weights(weights, devices, handed_over(weights))
    except ValueError as error:
        raise ModelError(f"model {files.name}: {len(devices)} GPUs cannot share its weights: {error}") from None
    if devices[0].type == "cuda":
        with timed("probes"):
            for each in ranks:
                refuse_uneven_products(each, kernels.linear, kernels.num_rows)
    pool = PoolSize(plan.num_pages, windows=plan.windows)
    try:
        arena = KVArena.of_ranks(shape, devices, plan.num_slots, plan.longest_job, pool, stagings)
        return CudaForwards(first, arena, eos_token_ids, kernels, others=others)
    except ValueError:  # the kernels have no tiles for these sizes
        return None


def connected_gpus(num_ranks: int) -> list[torch.device]:
    """Return the worker's GPUs, each of which can then write in the others. Raises ModelError."""
    devices = [torch.device("cuda", number) for number in range(num_ranks)]
    if (found := torch.cuda.device_count()) < num_ranks:
        raise ModelError(f"--gpus-per-worker {num_ranks}: this worker found {found}; use fewer")
    for one, other in itertools.permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            raise ModelError(
                f"--gpus-per-worker {num_ranks}: {one} cannot write in the memory of {other}; use GPUs that NVLink "
                "or PCIe connects, or --gpus-per-worker 1"
            )
        torch.zeros(1, device=one).copy_(torch.zeros(1, device=other))  # torch then lets `one` access `other`
    return devices


def refuse_unshared(
    files: ModelFiles,
    wanted: SlotsWanted,
    num_ranks: int,
    kernels: CudaKernels,
    adapters: Sequence[AdapterWeights],
) -> None:
    """Raise ModelError for a model, adapters, an engine or kernels that several GPUs cannot share."""
    said = f"--gpus-per-worker {num_ranks}"
    if adapters:
        raise ModelError(f"{said}: several GPUs share no LoRA adapters; leave --lora away, or use one GPU a worker")
    if kernels.attention == "flash":
        raise ModelError(f"{said}: flash-attn runs on one GPU alone; use --attention triton")
    if wanted.partial_budget or (wanted.engine is not None and not wanted.can_lack_engine):
        raise ModelError(f"{said}: the engine drafts in kernels of one GPU; use another --engine, such as auto")
    fault = ranks_fault(read_decoder_config(read_config(files.name, files.path)), num_ranks)
    if fault is not None:
        raise ModelError(f"{said}: the GPUs cannot share the model {files.name}: {fault}")


def arena_of(shape: CacheShape, plan: MemoryPlan, staging: Staging | None) -> KVArena:
    pool = PoolSize(plan.num_pages, windows=plan.windows) if plan.num_pages else None
    return KVArena(shape, plan.num_slots, plan.longest_job, pool, staging)


def whole_arena(shape: CacheShape, num_slots: int, max_length: int, staging: Staging | None) -> KVArena:
    return KVArena(shape, num_slots, max_length, PoolSize(num_slots * most_of_a_job(max_length)), staging)


def cuda_cache_shape(
    weights: DecoderWeights, device: torch.device, kv_dtype: KVDtype | None, forgets: bool = False
) -> CacheShape:
    windows = tuple(layer.window for layer in weights.layers if layer.keeps_keys) if forgets else ()
    return replace(CacheShape.of(weights, device, kv_dtype), kv_scale_bytes=CUDA_SCALE_BYTES, windows=windows)


def _held(sizes: ModelSizes, wanted: SlotsWanted) -> HeldPositions | None:
    """Return how many positions have window pages, or None if caches keep all positions."""
    if wanted.partial_budget or wanted.num_unwritten is None:
        return None
    return held_in_windows(sizes.windows, wanted.num_unwritten)


def forwards_beside(target: Forwards, files: ModelFiles, longest_job: int, num_slots: int) -> CudaForwards | None:
    """Return forwards of a draft model in the target's kernels, with their own slots.

    Returns None if the kernels do not support both models.
    """
    if not isinstance(target, CudaForwards):
        return None
    weights = dense_weights(files, target.dtype, target.device)
    if weights is None:
        return None
    shape = CacheShape.of(weights, target.device)
    stacked = stacked_weights(weights, target.device, handed_over(weights))
    arena = KVArena(shape, num_slots, longest_job)
    try:
        kernels = CudaKernels(linear=target.kernels.linear, num_rows=target.rows_per_forward)
        return CudaForwards(stacked, arena, frozenset(), kernels, target.capture)
    except ValueError:  # the kernels have no tiles for these sizes
        return None


def hold_gemms_steady() -> None:
    """Fix cuBLAS's precision and workspace, because bits depend on them."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACES  # cuBLAS reads it at its first use
    torch.backends.cuda.preferred_blas_library(BLAS_LIBRARY)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False


def drafts_of(wanted: SlotsWanted, sizes: ModelSizes, gpu: GPUMemory) -> DraftMemory:
    """Return the memory that drafts need, both in total and per slot."""
    drafts = NO_DRAFTS if wanted.engine is None else wanted.engine(sizes)
    part_bytes, slot_bytes = wanted.part_bytes + drafts.part_bytes, drafts.slot_bytes
    if wanted.partial_budget:
        longest = slot_capacity(wanted.longest_job) - MAX_TREE_NODES  # the longest sequence that fits in a slot
        chunk = wanted.partial_chunk
        num_positions = partial_positions(wanted.partial_budget, longest, chunk)
        slot_bytes += num_positions * sizes.bytes_per_position
        part_bytes += gpu.sum_bytes(sizes, num_positions).once
        if chunk == 0:  # a build reads a layer's keys and values
            part_bytes += longest * 2 * sizes.num_kv_heads * sizes.head_dim * sizes.item_size
        else:  # has one job's mean keys, contiguous
            part_bytes += longest // (chunk or CHUNK_SIZE) * sizes.bytes_per_position // 2
    if wanted.draft is not None:
        model = draft_model_memory(wanted.draft, wanted.draft_length, gpu.num_rows)
        part_bytes, slot_bytes = part_bytes + model.part_bytes, slot_bytes + model.slot_bytes
    return DraftMemory(part_bytes, slot_bytes, has_engine=wanted.engine is not None)
