"""A GPU's pool of pages fits beside drafts, and has room for the longest job."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.sizing import MODELS, WINDOWED
from swiftbatch.worker.forward.cuda.cuda_loading import arena_of
from swiftbatch.worker.inspection import CONTEXT_BYTES, GPU_BYTES
from swiftbatch.worker.kernels.kernel_sizes import MOST_SLOTS
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.gpu_memory_plan import (
    DRAFT_SHARE,
    DraftMemory,
    GPUMemory,
    most_of_a_job,
    one_slot,
    plan_pages,
)
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE, KVRoomError, PoolSize, held_in_windows, pages_of
from swiftbatch.worker.kv.model_sizes import ModelSizes

LLAMA, QWEN = MODELS["Llama 3.1 8B"], MODELS["Qwen2.5 32B"]
H100 = GPUMemory(GPU_BYTES - CONTEXT_BYTES)
PAGE_BYTES = GPU_PAGE * LLAMA.bytes_per_position


@pytest.mark.parametrize("longest_job", [6_000, 32_768, 100_000])
def test_a_long_job_leaves_the_memory_to_all_others(longest_job: int) -> None:
    plan, slots = plan_pages(LLAMA, H100, longest_job), one_slot(LLAMA, H100, longest_job)
    assert plan.num_slots == MOST_SLOTS >= min(MOST_SLOTS, slots.num_fitting)
    assert plan.used_bytes <= plan.free_bytes
    assert most_of_a_job(longest_job) <= plan.num_pages <= MOST_SLOTS * most_of_a_job(longest_job)
    if longest_job > 6_000:
        assert plan.free_bytes < plan.used_bytes + PAGE_BYTES, "one more page does not fit"


def test_what_drafts_keep_for_each_job_takes_a_share_or_as_much_as_with_all_at_their_longest() -> None:
    for slot_bytes in (10**9, 5 * 10**9):
        plan = plan_pages(LLAMA, H100, 100_000, None, DraftMemory(slot_bytes=slot_bytes))
        whole = one_slot(LLAMA, H100, 100_000, DraftMemory(slot_bytes=slot_bytes))
        left = plan.left_bytes + plan.num_pages * PAGE_BYTES
        assert plan.num_slots >= max(whole.num_fitting, int(DRAFT_SHARE * left) // slot_bytes)
        assert plan.num_pages >= whole.num_fitting * most_of_a_job(100_000) or plan.num_slots * slot_bytes < left / 4
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
    plan = replace(plan_pages(sizes, GPUMemory(10**9), 1000, 3), num_pages=5)
    arena = arena_of(shape, plan, None)
    assert arena.pool_size == PoolSize(5, GPU_PAGE)
    assert arena.buffer.nbytes == 5 * plan.page_bytes
    assert arena.pages is not None
    assert arena.pages.numbers.shape == (3, 5)


GEMMA = WINDOWED["Gemma 3 27B"]
FORGETTING = replace(GEMMA, held=held_in_windows(GEMMA.windows, 1024))


@pytest.mark.parametrize("longest_job", [1_000, 8_192, 32_768, 100_000])
def test_pools_of_layers_with_and_without_windows_hold_the_longest_job_and_share_all_that_is_left(
    longest_job: int,
) -> None:
    plan = plan_pages(FORGETTING, H100, longest_job)
    assert plan.windows is not None
    assert FORGETTING.held is not None
    most, most_held = most_of_a_job(longest_job), pages_of(FORGETTING.held.num_whole, GPU_PAGE)
    assert most <= plan.num_pages <= MOST_SLOTS * most
    assert min(most, most_held) <= plan.windows.num_pages <= MOST_SLOTS * min(most, most_held)
    assert plan.used_bytes <= plan.free_bytes
    largest = max(plan.page_bytes, plan.window_page_bytes)
    assert longest_job == 1_000 or plan.free_bytes < plan.used_bytes + 2 * largest, "what is left holds no page of both"


def test_more_jobs_of_any_length_fit_where_layers_forget_and_as_many_of_those_that_are_shorter_than_a_window() -> None:
    whole = plan_pages(GEMMA, H100, 32_768).num_pages
    plan = plan_pages(FORGETTING, H100, 32_768)
    assert plan.windows is not None
    for length in (4_096, 8_192, 16_384, 32_768):
        num_held = pages_of(plan.windows.held.of(length), GPU_PAGE)
        num_fitting = min(plan.num_pages // pages_of(length, GPU_PAGE), plan.windows.num_pages // num_held)
        assert num_fitting > whole // pages_of(length, GPU_PAGE)
    with pytest.raises(KVRoomError, match="the longest job, 100,000 positions, has no room"):
        plan_pages(GEMMA, H100, 100_000)


def test_two_pools_take_what_the_plan_says() -> None:
    windows = (100, None, None, 100, 100)
    shape = CacheShape(5, 2, 32, torch.bfloat16, torch.device("meta"), windows=windows)
    sizes = ModelSizes(0, shape.bytes_per_position(), 4, 2, 32, 64, 128, 100, 2, windows=windows)
    sizes = replace(sizes, held=held_in_windows(windows, 64))
    plan = plan_pages(sizes, GPUMemory(10**9), 3000, 3)
    arena = arena_of(shape, plan, None)
    assert plan.windows is not None
    assert arena.windowed is not None
    assert arena.pool_size == PoolSize(plan.num_pages, GPU_PAGE, plan.windows)
    assert arena.buffer.nbytes == plan.num_pages * plan.page_bytes
    assert arena.windowed.buffer.nbytes == plan.windows.num_pages * plan.window_page_bytes
    assert arena.buffer.nbytes + arena.windowed.buffer.nbytes == plan.pool_bytes


def test_models_all_or_none_of_whose_layers_have_a_window_have_one_pool() -> None:
    assert held_in_windows((), 0) is held_in_windows((None, None), 0) is held_in_windows((64, 64), 0) is None
