"""Job stages: steps of few and many jobs with all ways to draft, on random texts and caches."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bench.gpu.steps import free_bytes
from bench.gpu.trial import Trial, Try
from bench.variants import create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.decode_bench import BenchEngine, digest
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import ArenaTarget, Parts
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.step_costs import step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.gpu_memory_plan import most_of_a_job
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE, PoolSize, WindowPages, held_in_windows, pages_of
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

ENGINES = ("autoregressive", "token-recycling", "auto")
TOKENS_A_STEP = 16  # room per step
SHARE = 0.6  # of the free memory, for caches
NUM_WARM_STEPS = 4


@dataclass(frozen=True)
class Decoded:
    """The tokens of sequences, and the steps after the warm-up."""

    token_ids: list[list[int]]
    seconds: float
    num_steps: int
    num_tokens: int

    @property
    def sha256(self) -> str:
        return digest(*(np.array(each) for each in self.token_ids))[:16]


def random_ids(vocab_size: int, length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(length)]


def sequences_of(
    target: TargetModel, prompts: Many[list[int]], num_tokens: int, logprobs: int | None = None
) -> list[Sequence]:
    """Make one sequence per prompt; the first is greedy."""
    made = []
    for number, prompt in enumerate(prompts):
        temperature = 1.0 if number else 0.0
        law: dict[str, Any] = {"temperature": temperature, "min_p": 0.1, "logprobs": logprobs}
        params = SamplingParams(max_tokens=num_tokens, seed=number, ignore_eos=True, **law)
        made.append(Sequence(f"s{number}", prompt, params, target.vocab_size, target.device))
    return made


def decoded(
    target: TargetModel,
    drafter: Drafter,
    sequences: list[Sequence],
    caches: Many[FullKVCache | None],
    num_steps: int | None = None,
) -> Decoded:
    """Generate to the end, or `num_steps` steps after the warm-up."""
    engine = BenchEngine(target, drafter)
    for sequence, cache in zip(sequences, caches, strict=True):
        engine.start(sequence, cache)
    while engine.counters.num_steps < NUM_WARM_STEPS and any(each.finish_reason is None for each in sequences):
        engine.step()
    target.synchronize()
    before, started = sum(each.num_generated_tokens for each in sequences), time.perf_counter()
    first = engine.counters.num_steps
    while any(each.finish_reason is None for each in sequences) and engine.counters.num_steps - first != num_steps:
        engine.step()
    target.synchronize()
    seconds = time.perf_counter() - started
    num_tokens = sum(each.num_generated_tokens for each in sequences) - before
    for sequence in sequences:
        engine.stop(sequence)
    token_ids = [each.output_ids.tolist() for each in sequences]
    return Decoded(token_ids, seconds, engine.counters.num_steps - first, num_tokens)


def jobs(trial: Trial) -> Iterator[Try]:
    """Yield all numbers of jobs."""
    parts = trial.deep_parts()
    for num_jobs in trial.sizes.job_counts:
        yield f"{num_jobs} at a time", functools.partial(_steps, trial, parts, num_jobs, ENGINES)
    for num_rows in trial.sizes.row_counts[1:]:
        wide = functools.partial(_steps, trial, parts.with_rows(num_rows), num_jobs, ENGINES)
        yield f"{num_jobs} at a time, {num_rows} rows", wide


def families(trial: Trial) -> Iterator[Try]:
    for family in trial.sizes.families:
        parts = trial.family_parts(family)
        for num_jobs in trial.sizes.family_counts:
            yield f"{family.name}, {num_jobs} at a time", functools.partial(_steps, trial, parts, num_jobs, ENGINES[:2])
        parts.release()


def _steps(trial: Trial, parts: Parts, num_jobs: int, engines: tuple[str, ...]) -> Finding:
    num_tokens = TOKENS_A_STEP * (trial.sizes.num_steps + NUM_WARM_STEPS)
    length = _length(trial, parts, num_jobs, num_tokens)
    target = target_of(parts, num_jobs + 1, length + num_tokens)
    prompts = [random_ids(target.vocab_size, length, number) for number in range(num_jobs)]
    costs, rows, found = step_costs_of(target), list[Row](), list[list[list[int]]]()
    [outputs] = target.verify([tree_rows(behind(target, length - 1, 1), 5, DraftTree())])
    is_finite = bool(outputs.logits.isfinite().all())
    for name in engines:
        fill(target.arena)
        caches = [behind(target, len(prompt) - 1, num_tokens + 1) for prompt in prompts]
        drafter = create_bench_drafter(name, target, costs)
        done = decoded(target, drafter, sequences_of(target, prompts, num_tokens), caches, trial.sizes.num_steps)
        found.append(done.token_ids)
        rows.append(
            {
                "engine": name,
                "jobs": num_jobs,
                "length": length,
                "ms a step": 1000 * done.seconds / max(1, done.num_steps),
                "tokens a step": done.num_tokens / max(1, done.num_steps),
                "tokens/s": done.num_tokens / done.seconds,
                "GB taken": torch.cuda.max_memory_reserved(trial.device) / 1e9 if trial.device.type == "cuda" else 0.0,
            }
        )
        del caches, drafter
    del target, costs
    parts.forget_unused()
    is_same = all(_agree(plain, others) for each in found[1:] for plain, others in zip(found[0], each, strict=True))
    words = f"{'the same' if is_same else 'OTHER'} tokens with all engines"
    return Finding(
        passed=is_same and is_finite, words=words + ("" if is_finite else ", logits that are NO numbers"), rows=rows
    )


def _length(trial: Trial, parts: Parts, num_jobs: int, num_tokens: int) -> int:
    assert parts.loaded is not None
    room = SHARE * free_bytes(trial.device) / parts.cache_shape().bytes_per_position() / (num_jobs + 1) - num_tokens
    return max(BLOCK, min(trial.sizes.job_length, int(room) // BLOCK * BLOCK))


def _agree(some: list[int], others: list[int]) -> bool:
    common = min(len(some), len(others))
    return some[:common] == others[:common]


def target_of(parts: Parts, num_slots: int, longest: int) -> ArenaTarget:
    """Make the model over its own arena."""
    arena = _arena(parts, num_slots, longest)
    fill(arena)
    forwards = CudaForwards(parts.weights, arena, frozenset(), parts.kernels, parts.capture)
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
    """Fill all pages with the same noise and zero all states."""
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
    cache = target.new_cache(length + num_more)
    cache.advance(length)
    return cache
