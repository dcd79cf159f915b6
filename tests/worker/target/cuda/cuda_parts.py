"""A target whose forwards and draws are a GPU's, on a CPU: kernels in the interpreter, graphs that are checked."""

from __future__ import annotations

import torch

from swiftbatch.jobs.run.option_values import AttentionName, KVDtype, LinearName
from swiftbatch.worker.caches.arena import KVArena, SlotLease
from swiftbatch.worker.caches.copies import HostStream
from swiftbatch.worker.caches.layer_ring import Streams
from swiftbatch.worker.caches.offloaded_arena import OffloadedArena, OffloadedSlotCache
from swiftbatch.worker.kernels.choice import CudaKernels
from swiftbatch.worker.kernels.cuda.stacked import stacked_weights
from swiftbatch.worker.model.dense import dense_weights
from swiftbatch.worker.model.files import ModelFiles
from swiftbatch.worker.target.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.target.cuda.cuda_loading import cuda_cache_shape
from swiftbatch.worker.target.cuda.offloaded_forwards import OffloadedForwards
from swiftbatch.worker.target.target import TargetModel
from tests.worker.caches.lazy_stream import LazyStream
from tests.worker.target.cuda.checked_graph import CheckedGraph

CPU = torch.device("cpu")
NUM_SPLITS = 3


def leave_unwritten(rows: torch.Tensor) -> None:
    """Fill rows with NaN, those of codes with ones: their scales are then NaN."""
    if rows.is_floating_point():
        rows.fill_(torch.nan)
    else:
        rows.view(torch.int8).fill_(-1)


def cuda_target(
    files: ModelFiles,
    dtype: torch.dtype,
    num_slots: int = 2,
    longest_job: int = 200,
    linear: LinearName = "triton",
    attention: AttentionName = "triton",
    kv_dtype: KVDtype | None = None,
) -> TargetModel:
    """Caches are full of NaN where nothing was written."""
    weights = dense_weights(files, dtype)
    assert weights is not None
    arena = KVArena(cuda_cache_shape(weights, CPU, kv_dtype), num_slots, longest_job)
    leave_unwritten(arena.buffer)
    stacked = stacked_weights(weights, CPU)
    kernels = CudaKernels(attention, linear)
    forwards = CudaForwards(stacked, arena, frozenset(), NUM_SPLITS, kernels, capture=CheckedGraph)
    return TargetModel(forwards, files)


class UnwrittenRows(OffloadedArena):
    """Caches are full of NaN where nothing was written, on the host as well."""

    def _cache(self, lease: SlotLease, max_length: int) -> OffloadedSlotCache:
        cache = super()._cache(lease, max_length)
        leave_unwritten(cache._rows)
        return cache


def offloaded_target(
    files: ModelFiles,
    dtype: torch.dtype,
    num_slots: int = 2,
    longest_job: int = 200,
    linear: LinearName = "triton",
    attention: AttentionName = "triton",
    kv_dtype: KVDtype | None = None,
) -> TargetModel:
    """As `cuda_target`, with caches outside the device, whose copies come as late as they may."""
    weights = dense_weights(files, dtype)
    assert weights is not None
    streams = Streams(HostStream(), LazyStream(), LazyStream())
    arena = UnwrittenRows(cuda_cache_shape(weights, CPU, kv_dtype), num_slots, longest_job, streams)
    leave_unwritten(arena.buffer)
    stacked = stacked_weights(weights, CPU)
    kernels = CudaKernels(attention, linear)
    forwards = OffloadedForwards(stacked, arena, frozenset(), NUM_SPLITS, kernels, capture=CheckedGraph)
    return TargetModel(forwards, files)
