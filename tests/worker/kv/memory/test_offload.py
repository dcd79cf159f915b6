"""`--kv-offload` runs as many slots as fit the host and two GPU layers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from bench.sizing import MODELS, gpu_memory
from swiftbatch.worker.inspection import CONTEXT_BYTES, GPU_BYTES, GPUS
from swiftbatch.worker.kernels.kernel_sizes import MOST_SLOTS
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.gpu_memory_plan import (
    GRAPH_RESERVE,
    HOST_SHARE,
    SLACK,
    DraftMemory,
    plan_offload,
    slot_capacity,
)
from swiftbatch.worker.kv.host_copies import HostStream
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.kv.kv_offload import OffloadedArena, Streams

LLAMA, QWEN = MODELS["Llama 3.1 8B"], MODELS["Qwen2.5 32B"]
A100 = gpu_memory(GPUS["A100 80 GB"], GPU_BYTES - CONTEXT_BYTES)
SLOT = slot_capacity(100_000) * LLAMA.bytes_per_position  # 13.1 GB


@pytest.mark.parametrize("num_slots", [1, 4, 9])
def test_the_host_s_memory_bounds_the_slots(num_slots: int) -> None:
    host_bytes = int(num_slots * SLOT / HOST_SHARE) + 1
    assert plan_offload(LLAMA, A100, 100_000, host_bytes).num_slots == num_slots
    assert plan_offload(LLAMA, A100, 100_000, host_bytes + int(0.9 * SLOT)).num_slots == num_slots


def test_a_slot_takes_two_of_all_layers_on_the_gpu_and_as_many_fit_as_do() -> None:
    plan = plan_offload(LLAMA, A100, 100_000, 10**13)
    assert plan.slot_bytes == SLOT * 2 // 32
    assert plan.num_slots == MOST_SLOTS
    num_bytes = plan.weight_bytes + plan.scratch_bytes + plan.row_bytes + GRAPH_RESERVE + 5 * plan.slot_bytes
    tight = replace(A100, free_bytes=math.ceil(num_bytes / (1 - SLACK)))
    assert plan_offload(LLAMA, tight, 100_000, 10**13).num_slots == 5
    drafting = plan_offload(LLAMA, tight, 100_000, 10**13, drafts=DraftMemory(slot_bytes=plan.slot_bytes))
    assert drafting.num_slots == 2


def test_what_is_planned_is_what_the_ring_takes() -> None:
    plan = plan_offload(LLAMA, A100, 1000, 10**12)
    shape = CacheShape(32, 8, 128, torch.bfloat16, torch.device("meta"))
    ring = OffloadedArena(shape, plan.num_slots, plan.longest_job, _no_streams())
    assert ring.buffer.numel() * ring.buffer.element_size() == plan.num_slots * plan.slot_bytes


def _no_streams() -> Streams:
    return Streams(HostStream(), None, None)  # type: ignore[arg-type]


def test_jobs_run_whose_keys_and_values_the_gpu_has_no_room_for() -> None:
    """A Qwen2.5 32B job of 100,000 positions has no slot in docs/gpu.md."""
    plan = plan_offload(QWEN, A100, 100_000, 10**11)
    assert plan.num_slots == 3
    assert plan.used_bytes <= plan.free_bytes


def test_a_job_that_the_host_has_no_room_for_is_refused_with_the_numbers() -> None:
    with pytest.raises(KVRoomError, match=r"100,000 positions, .* need 13\.13 GB of the memory of .* has 8\.00 GB"):
        plan_offload(LLAMA, A100, 100_000, 10**10)


def test_a_job_two_of_whose_layers_do_not_fit_is_refused_with_the_numbers() -> None:
    full = replace(A100, free_bytes=QWEN.weight_bytes + 10**9)
    with pytest.raises(KVRoomError, match=r"need 0\.82 GB of the GPU, beside weights and work space"):
        plan_offload(QWEN, full, 100_000, 10**12)
