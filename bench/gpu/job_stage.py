"""The stage of jobs: steps of few and of many at a time, plain, with trees, and by the engine that chooses."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from bench.gpu.decoding import NUM_WARM_STEPS, Decoded, decoded, random_ids, sequences_of
from bench.gpu.measuring import free_bytes
from bench.gpu.trial import Trial, Try
from bench.variants import create_bench_drafter
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import ArenaTarget, Parts
from swiftbatch.worker.forward.step_costs import step_costs_of
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import KVRoomError

ENGINES = ("autoregressive", "token-recycling", "auto")
TOKENS_A_STEP = 16  # that there is room for
SHARE = 0.6  # of the free memory, for caches


def jobs(trial: Trial) -> Iterator[Try]:
    """All numbers of jobs, over one copy of the weights; the most of them in wider forwards, too."""
    parts = trial.deep_parts()
    for num_jobs in trial.sizes.job_counts:
        yield f"{num_jobs} at a time", functools.partial(_steps, trial, parts, num_jobs)
    for num_rows in trial.sizes.row_counts[1:]:
        wide = functools.partial(_steps, trial, parts.with_rows(num_rows), num_jobs)
        yield f"{num_jobs} at a time, {num_rows} rows", wide


def _steps(trial: Trial, parts: Parts, num_jobs: int) -> Finding:
    """The same jobs with every engine, behind keys and values of noise."""
    num_tokens = TOKENS_A_STEP * (trial.sizes.num_steps + NUM_WARM_STEPS)
    length = _length(trial, parts, num_jobs, num_tokens)
    target = parts.target(num_jobs + 1, length + num_tokens)
    target.arena.buffer.normal_(generator=parts.generator(5))
    prompts = [random_ids(target.vocab_size, length, number) for number in range(num_jobs)]
    costs, rows, found, left_out = step_costs_of(target), list[Row](), list[list[list[int]]](), list[str]()
    for name in ENGINES:
        try:
            drafter = create_bench_drafter(name, target, costs)
            kept = _contents(target, prompts, num_tokens)
            done = decoded(target, drafter, sequences_of(target, prompts, num_tokens), kept, trial.sizes.num_steps)
            del drafter, kept
        except (torch.OutOfMemoryError, KVRoomError) as error:  # what others showed stays
            print(f"{name}, {num_jobs} jobs: {error}", flush=True)
            left_out.append(name)
            continue
        found.append(done.token_ids)
        rows.append(steps_row(name, length, done, trial.device))
    del target
    parts.forget_unused()
    is_same = all(agree(plain, others) for each in found[1:] for plain, others in zip(found[0], each, strict=True))
    words = f"{'the same' if is_same else 'OTHER'} tokens with all engines"
    words += f"; no memory for {', '.join(left_out)}" if left_out else ""
    return Finding(passed=is_same, words=words, rows=rows)


def steps_row(engine: str, length: int, done: Decoded, device: torch.device) -> Row:
    return {
        "engine": engine,
        "length": length,
        "ms a step": 1000 * done.seconds / max(1, done.num_steps),
        "tokens a step": done.num_tokens / max(1, done.num_steps),
        "tokens/s": done.num_tokens / done.seconds,
        "GB taken": reserved_bytes(device) / 1e9,
    }


def _length(trial: Trial, parts: Parts, num_jobs: int, num_tokens: int) -> int:
    """The positions of each job, as many as fit, in whole blocks."""
    assert parts.loaded is not None
    room = SHARE * free_bytes(trial.device) / parts.cache_shape().bytes_per_position() / (num_jobs + 1) - num_tokens
    return max(BLOCK, min(trial.sizes.job_length, int(room) // BLOCK * BLOCK))


def _contents(target: ArenaTarget, prompts: list[list[int]], num_tokens: int) -> list[FullKVCache]:
    """A cache for each prompt, all with the same numbers, whatever pages they have."""
    caches = list[FullKVCache]()
    for prompt in prompts:
        cache = target.new_cache(len(prompt) + num_tokens)
        cache.reserve(len(prompt))
        generator = torch.Generator(target.device).manual_seed(11)
        for layer in range(target.cache_shape.num_layers):
            noise = torch.randn(
                2, target.cache_shape.num_kv_heads, len(prompt) - 1, target.cache_shape.head_dim,
                generator=generator, device=target.device,
            )  # fmt: skip
            cache.write(layer, 0, *noise.to(target.dtype))
        cache.advance(len(prompt) - 1)
        caches.append(cache)
    return caches


def agree(some: list[int], others: list[int]) -> bool:
    """Tell whether one of two texts is the beginning of the other."""
    common = min(len(some), len(others))
    return some[:common] == others[:common]


def reserved_bytes(device: torch.device) -> int:
    """The most bytes that torch has held of the device's memory."""
    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else 0
