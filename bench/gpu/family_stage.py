"""The stage of families: steps of models in published shapes that are not Llama's, plain and with trees."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from bench.gpu.decoding import NUM_WARM_STEPS, decoded, random_ids, sequences_of
from bench.gpu.family_weights import Family
from bench.gpu.job_stage import TOKENS_A_STEP, agree, steps_row
from bench.gpu.trial import Trial, Try, deepened
from bench.variants import create_bench_drafter
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import NUM_SPLITS_ELSEWHERE, ArenaTarget, Parts
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.cuda.cuda_loading import hold_gemms_steady
from swiftbatch.worker.forward.step_costs import step_costs_of
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights
from swiftbatch.worker.kernels.gpu_kernel_choice import DEFAULT_KERNELS, CudaKernels
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.gpu_memory_plan import most_of_a_job, splits_of
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE, PoolSize, WindowPages, held_in_windows, pages_of
from swiftbatch.worker.kv.model_sizes import sizes_of
from swiftbatch.worker.kv.paged_arena import KVArena
from swiftbatch.worker.model.digests import Digests
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.draft_tree import DraftTree

ENGINES = ("autoregressive", "token-recycling")


def families(trial: Trial) -> Iterator[Try]:
    """Each family with all numbers of jobs, over one copy of its weights."""
    for family in trial.sizes.families:
        parts = family_parts(trial, family)
        for num_jobs in trial.sizes.family_counts:
            yield f"{family.name}, {num_jobs} at a time", functools.partial(_steps, trial, parts, num_jobs)
        parts.release()


def family_parts(trial: Trial, family: Family) -> Parts:
    """A family's model, as checks take it. Weights are made when they are asked for."""
    config, dtype, device = family.text_config, torch.bfloat16, trial.device
    sizes, num_splits = sizes_of(config, 0, "bfloat16"), NUM_SPLITS_ELSEWHERE
    assert sizes is not None
    if device.type == "cuda":
        hold_gemms_steady()
        num_splits = splits_of(torch.cuda.get_device_properties(device).multi_processor_count, sizes)
    positions = config["max_position_embeddings"]
    files = ModelFiles(family.name, Path(family.name), Digests({}, {}), positions, config["vocab_size"])

    def load() -> StackedWeights | None:
        return deepened(family.weights(dtype, device), family.num_layers, family.num_first)

    # cuBLAS where products are not packed, as workers have it; a CPU's has none of these sums
    kernels = DEFAULT_KERNELS if device.type == "cuda" else CudaKernels(linear="triton")
    made = Parts(files, dtype, device, num_splits, load, kernels=kernels)
    made.extent = trial.sizes.extent
    return made


def _steps(trial: Trial, parts: Parts, num_jobs: int) -> Finding:
    """The same jobs with every engine, as many as there is memory for."""
    if trial.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trial.device)
    while True:
        try:
            return _with_jobs(trial, parts, num_jobs)
        except torch.OutOfMemoryError as error:
            print(f"{parts.files.name}, {num_jobs} jobs: {error}", flush=True)
            if num_jobs == 1:
                raise
        num_jobs //= 2
        forget(parts)


def _with_jobs(trial: Trial, parts: Parts, num_jobs: int) -> Finding:
    num_tokens = TOKENS_A_STEP * (trial.sizes.num_steps + NUM_WARM_STEPS)
    length = trial.sizes.job_length
    target = target_of(parts, num_jobs + 1, length + num_tokens)
    prompts = [random_ids(target.vocab_size, length, number) for number in range(num_jobs)]
    costs, rows, found = step_costs_of(target), list[Row](), list[list[list[int]]]()
    is_finite = _has_finite_logits(target, length)
    for name in ENGINES:
        fill(target.arena)
        caches = [behind(target, len(prompt) - 1, num_tokens + 1) for prompt in prompts]
        drafter = create_bench_drafter(name, target, costs)
        done = decoded(target, drafter, sequences_of(target, prompts, num_tokens), caches, trial.sizes.num_steps)
        found.append(done.token_ids)
        rows.append({"jobs": num_jobs} | steps_row(name, length, done, trial.device))
        del caches, drafter
    del target, costs
    forget(parts)
    is_same = all(agree(plain, others) for each in found[1:] for plain, others in zip(found[0], each, strict=True))
    words = f"{len(parts.weights.layers)} layers, {num_jobs} jobs: {'the same' if is_same else 'OTHER'} tokens"
    words += "" if is_finite else ", logits that are NO numbers"
    return Finding(passed=is_same and is_finite, words=words, rows=rows)


def forget(parts: Parts) -> None:
    """Give back the memory of a target that is gone, also where it hangs in a circle of references."""
    gc.collect()
    parts.forget_unused()


def target_of(parts: Parts, num_slots: int, longest: int) -> ArenaTarget:
    """The model over an arena of its own, with two pools of pages where some layers have a window."""
    arena = _arena(parts, num_slots, longest)
    fill(arena)
    forwards = CudaForwards(parts.weights, arena, frozenset(), parts.num_splits, parts.kernels, parts.capture)
    return ArenaTarget(forwards, parts.files)


def _arena(parts: Parts, num_slots: int, longest: int) -> KVArena:
    windows = tuple(layer.window for layer in parts.weights.layers)
    if (held := held_in_windows(windows, 0)) is None:
        return parts.arena(num_slots, longest)
    least = most_of_a_job(longest)
    pages = WindowPages(num_slots * min(least, pages_of(held.num_whole, GPU_PAGE)), held)
    shape = replace(parts.cache_shape(), windows=windows)
    return KVArena(shape, num_slots, longest, PoolSize(num_slots * least, windows=pages))


def fill(arena: KVArena) -> None:
    """Let all pages have the same noise, and all states be zeros: so texts are behind the same, wherever they lie."""
    for pool in (arena, arena.windowed):
        if pool is None:
            continue
        pages = pool.buffer.unflatten(4, (-1, pool.page))
        generator = torch.Generator(pages.device).manual_seed(5)
        noise = torch.empty_like(pages[:, :, :, :, :1]).normal_(generator=generator)
        pages.copy_(noise.expand_as(pages))
    if arena.states is not None:
        arena.states.states.zero_()
        arena.states.steps.zero_()


def behind(target: ArenaTarget, length: int, num_more: int) -> FullKVCache:
    """A cache with so many positions, of what lies in the arena, and room for more."""
    cache = target.new_cache(length + num_more)
    cache.advance(length)
    return cache


def _has_finite_logits(target: ArenaTarget, length: int) -> bool:
    cache = behind(target, length - 1, 1)
    [outputs] = target.verify([tree_rows(cache, 5, DraftTree())])
    return bool(outputs.logits.isfinite().all())
