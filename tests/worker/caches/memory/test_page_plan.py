"""A pool of pages for a GPU's caches: as many as fit beside what drafts keep for each job, the longest job at least."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swiftbatch.worker.bench.gpu.sizing import MODELS, gpu_memory
from swiftbatch.worker.caches.full import CacheShape
from swiftbatch.worker.caches.memory.memory_plan import DraftMemory, GPUMemory, plan_memory
from swiftbatch.worker.caches.memory.model_sizes import ModelSizes
from swiftbatch.worker.caches.memory.page_plan import DRAFT_SHARE, most_of_a_job, plan_pages
from swiftbatch.worker.caches.memory.pages import GPU_PAGE
from swiftbatch.worker.caches.room import KVRoomError
from swiftbatch.worker.inspection.inspection import CONTEXT_BYTES, GPU_BYTES, GPUS
from swiftbatch.worker.kernels.sizes import MOST_SLOTS
from swiftbatch.worker.target.cuda.cuda_loading import arena_of

LLAMA, QWEN = MODELS["Llama 3.1 8B"], MODELS["Qwen2.5 32B"]
H100 = gpu_memory(GPUS["H100 80 GB"], GPU_BYTES - CONTEXT_BYTES)
PAGE_BYTES = GPU_PAGE * LLAMA.bytes_per_position


@pytest.mark.parametrize("longest_job", [6_000, 32_768, 100_000])
def test_a_long_job_leaves_the_memory_to_all_others(longest_job: int) -> None:
    plan, slots = plan_pages(LLAMA, H100, longest_job), plan_memory(LLAMA, H100, longest_job)
    assert plan.num_slots == MOST_SLOTS >= slots.num_slots
    assert plan.used_bytes <= plan.free_bytes
    assert most_of_a_job(longest_job) <= plan.num_pages <= MOST_SLOTS * most_of_a_job(longest_job)
    if longest_job > 6_000:
        assert plan.free_bytes < plan.used_bytes + PAGE_BYTES, "one more page does not fit"
    assert plan.rows()[1][0] == f"keys and values, {plan.num_pages:,} pages of {GPU_PAGE} positions for 32 jobs"


def test_what_drafts_keep_for_each_job_takes_a_share_or_as_much_as_with_all_at_their_longest() -> None:
    for slot_bytes in (10**9, 5 * 10**9):
        plan = plan_pages(LLAMA, H100, 100_000, None, DraftMemory(slot_bytes=slot_bytes))
        whole = plan_memory(LLAMA, H100, 100_000, None, DraftMemory(slot_bytes=slot_bytes))
        left = plan.left_bytes + plan.num_pages * PAGE_BYTES
        assert plan.num_slots >= max(whole.num_slots, int(DRAFT_SHARE * left) // slot_bytes)
        assert plan.num_pages >= whole.num_slots * most_of_a_job(100_000) or plan.num_slots * slot_bytes < left / 4
        assert plan.used_bytes <= plan.free_bytes < plan.used_bytes + PAGE_BYTES


def test_what_has_no_room_is_refused_with_the_numbers() -> None:
    with pytest.raises(KVRoomError, match="the longest job, 100,000 positions, has no room on the GPU"):
        plan_pages(QWEN, H100, 100_000)
    drafts = DraftMemory(slot_bytes=10**10)
    with pytest.raises(KVRoomError, match=r"^--slots 8: what drafts keep for each, .* use --slots 5, or fewer"):
        plan_pages(LLAMA, H100, 100_000, 8, drafts)
    assert plan_pages(LLAMA, H100, 100_000, 5, drafts).num_slots == 5
    assert plan_pages(LLAMA, H100, 100_000, 200).num_slots == 200


def test_an_arena_takes_what_the_plan_says() -> None:
    shape = CacheShape(4, 2, 32, torch.bfloat16, torch.device("meta"))
    sizes = ModelSizes(0, shape.bytes_per_position(), 4, 2, 32, 64, 128, 100, 2)
    plan = replace(plan_pages(sizes, GPUMemory(10**9, 8), 1000, 3), num_pages=5)
    arena = arena_of(shape, plan, None)
    assert arena.pool_size == (5, GPU_PAGE)
    assert arena.buffer.nbytes == 5 * plan.page_bytes
    assert arena.pages is not None
    assert arena.pages.numbers.shape == (3, 5)
