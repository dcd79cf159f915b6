"""The number of slots where caches lie in the host's memory: a GPU holds two layers of them at a time."""

from __future__ import annotations

from dataclasses import replace

from swiftbatch.worker.caches.memory.memory_plan import (
    NO_DRAFTS,
    DraftMemory,
    GPUMemory,
    MemoryPlan,
    one_slot,
    plan_memory,
    slot_capacity,
)
from swiftbatch.worker.caches.memory.model_sizes import ModelSizes
from swiftbatch.worker.caches.room import GB, MEMORY, KVRoomError
from swiftbatch.worker.kernels.sizes import RING_LAYERS

HOST_SHARE = 0.8  # share of the free memory for caches; checkpoints on their way and other programs need some, too


def plan_offload(
    sizes: ModelSizes,
    gpu: GPUMemory,
    longest_job: int,
    host_bytes: int,
    num_slots: int | None = None,
    drafts: DraftMemory = NO_DRAFTS,
) -> MemoryPlan:
    """Plan as `plan_memory` does, for caches in `host_bytes` of free memory; `slot_bytes` are those on the GPU.

    Raises KVRoomError where the longest job has no room here or there.
    """
    num_in_host = int(HOST_SHARE * host_bytes) // (slot_capacity(longest_job) * sizes.kept_bytes_per_position)
    if num_in_host < 1:
        raise KVRoomError(_no_room(sizes, longest_job, MEMORY, HOST_SHARE * host_bytes))
    layer_bytes = sizes.num_parts * sizes.num_kv_heads * sizes.head_dim * sizes.item_size
    ring = replace(sizes, bytes_per_position=min(sizes.bytes_per_position, RING_LAYERS * layer_bytes))
    if one_slot(ring, gpu, longest_job, drafts).num_fitting < 1:
        raise KVRoomError(_no_room(ring, longest_job, "the GPU, beside weights and work space", gpu.free_bytes))
    plan = plan_memory(ring, gpu, longest_job, num_slots, drafts)
    return replace(plan, num_slots=min(plan.num_slots, num_in_host))


def _no_room(sizes: ModelSizes, longest_job: int, place: str, num_free: float) -> str:
    needed = slot_capacity(longest_job) * sizes.kept_bytes_per_position
    return (
        f"the longest job, {longest_job:,} positions, has no room with --kv-offload: its keys and values need "
        f"{needed / GB:,.2f} GB of {place}, which has {num_free / GB:,.2f} GB for them; use fewer max_tokens, or a "
        "machine with more memory"
    )
