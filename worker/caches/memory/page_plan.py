"""Plans of a GPU's memory: where caches take pages as they grow, or lie in the host's memory.

The pool holds the longest job at least. Beyond that more jobs are taken than it may hold at their longest: the youngest
leaves when pages run out. Where layers with a window forget, these have a second pool.
"""

from __future__ import annotations

import math
from dataclasses import replace

from swiftbatch.worker.caches.cache_room import GB, MAX_TREE_NODES, MEMORY, KVRoomError
from swiftbatch.worker.caches.memory.memory_plan import (
    NO_DRAFTS,
    DraftMemory,
    GPUMemory,
    MemoryPlan,
    none_fits,
    one_slot,
    plan_memory,
    slot_capacity,
    too_many_slots,
)
from swiftbatch.worker.caches.memory.model_sizes import ModelSizes
from swiftbatch.worker.caches.memory.page_counts import GPU_PAGE, WindowPages, pages_of
from swiftbatch.worker.kernels.kernel_sizes import RING_LAYERS, most_slots

DRAFT_SHARE = 0.25  # of what is left beside the weights, for what drafts keep, where few jobs fit at their longest


def plan_pages(
    sizes: ModelSizes,
    gpu: GPUMemory,
    longest_job: int,
    num_slots: int | None = None,
    drafts: DraftMemory = NO_DRAFTS,
) -> MemoryPlan:
    """Share a GPU out as `plan_memory` does, for a pool of pages: as many as fit, and as slots can have at most.

    Raises KVRoomError where the longest job, or what drafts keep for so many slots beside it, does not fit.
    """
    least = most_of_a_job(longest_job)
    alone = replace(one_slot(sizes, gpu, longest_job, drafts), slot_bytes=sizes.state_bytes)
    window_bytes = GPU_PAGE * sizes.window_bytes_per_position
    pool = replace(alone, num_pages=least, page_bytes=GPU_PAGE * sizes.kept_bytes_per_position - window_bytes)
    if sizes.held is not None:
        most_held = min(least, pages_of(sizes.held.num_whole, GPU_PAGE))
        pool = replace(pool, windows=WindowPages(most_held, sizes.held), window_page_bytes=window_bytes)
    longest = replace(alone, slot_bytes=sizes.state_bytes + pool.pool_bytes)
    if longest.num_fitting < 1:
        raise none_fits(longest)
    plan = replace(pool, num_slots=_slots_that_pay(pool, most_slots(gpu.num_rows)) if num_slots is None else num_slots)
    if plan.used_bytes > plan.free_bytes:
        raise too_many_slots(plan, f"what drafts keep for each, beside the longest job of {longest_job:,} positions,")
    if plan.windows is not None:
        return _divided(plan, plan.windows)
    num_beside = (plan.free_bytes - plan.used_bytes) // plan.page_bytes
    return replace(plan, num_pages=min(plan.num_slots * least, least + num_beside))


def most_of_a_job(longest_job: int) -> int:
    """The pages of the longest job that a slot takes."""
    return pages_of(slot_capacity(longest_job) - MAX_TREE_NODES, GPU_PAGE)


def _divided(plan: MemoryPlan, windows: WindowPages) -> MemoryPlan:
    """Divide what is left between the pools of a plan, which have the pages of the longest job each.

    So that both are full together where jobs are of a length between a window and the longest job: those of shorter
    ones have pages of the first pool left, and those of longer ones pages of the second.
    """
    whole_bytes, window_bytes, longest, most_held = (
        *(plan.page_bytes, plan.window_page_bytes),
        *(plan.num_pages, windows.num_pages),
    )
    num_bytes = plan.free_bytes - plan.used_bytes + plan.pool_bytes
    between = math.isqrt(longest * most_held)
    number = min(plan.num_slots, max(1, num_bytes // (between * whole_bytes + most_held * window_bytes)))
    num_windowed = min(number * most_held, (num_bytes - longest * whole_bytes) // window_bytes)
    num_pages = min(plan.num_slots * longest, (num_bytes - num_windowed * window_bytes) // whole_bytes)
    num_windowed = min(plan.num_slots * most_held, (num_bytes - num_pages * whole_bytes) // window_bytes)
    return replace(plan, num_pages=num_pages, windows=windows._replace(num_pages=num_windowed))


def _slots_that_pay(pool: MemoryPlan, most: int) -> int:
    """Return how many slots gain, `most` of them if what drafts keep for each leaves most of the memory to pages.

    Else as many as take `DRAFT_SHARE` of the memory, or as leave the pages of all jobs that would fit at their longest.
    """
    if not pool.bytes_per_slot:
        return most
    longest = pool.pool_bytes
    beside_weights = pool.left_bytes + longest
    num_longest = beside_weights // (pool.bytes_per_slot + longest)
    by_share = int(DRAFT_SHARE * beside_weights) // pool.bytes_per_slot
    beside_longest = (beside_weights - num_longest * longest) // pool.bytes_per_slot
    return min(most, pool.num_fitting, max(by_share, beside_longest))


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
