"""A target whose forwards and draws are a GPU's, on a CPU: kernels in the interpreter, graphs that are checked."""

from __future__ import annotations

import torch

from tests.worker.target.cuda.checked_graph import CheckedGraph
from worker.caches.arena import KVArena
from worker.caches.full import CacheShape
from worker.kernels.cuda.stacked import stacked_weights
from worker.model.dense import dense_weights
from worker.model.files import ModelFiles
from worker.target.cuda.forwards import CudaForwards
from worker.target.target import TargetModel

CPU = torch.device("cpu")
NUM_SPLITS = 3


def cuda_target(
    files: ModelFiles, dtype: torch.dtype, num_slots: int = 2, longest_job: int = 200, linear: str = "triton"
) -> TargetModel:
    """Caches are full of NaN where nothing was written."""
    weights = dense_weights(files, dtype)
    assert weights is not None
    sizes = weights.sizes
    shape = CacheShape(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, dtype, CPU)
    arena = KVArena(shape, num_slots, longest_job)
    arena.buffer.fill_(float("nan"))
    stacked = stacked_weights(weights, CPU)
    forwards = CudaForwards(stacked, arena, frozenset(), NUM_SPLITS, linear, capture=CheckedGraph)
    return TargetModel(forwards, files)
