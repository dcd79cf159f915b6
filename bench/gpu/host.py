"""The host stage: the host's share of steps, beside a device that takes no time.

Graphs launch nothing and tokens come from a list, so it needs no GPU.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from bench.gpu.jobs import random_ids, sequences_of
from bench.gpu.trial import LLAMA_8B, Trial, Try, written
from bench.variants import create_bench_drafter
from swiftbatch.worker.decode_bench import BenchEngine
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import ArenaTarget, Parts
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, StepCosts
from swiftbatch.worker.kernels.cuda.cuda_decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.cuda_graph import Graph, Repeated, Work
from swiftbatch.worker.kernels.kernel_sizes import ROW_CHOICES
from swiftbatch.worker.sampling.cuda.cuda_sampler import CudaBatchSampler, in_a_row, parts_out
from swiftbatch.worker.sampling.draft_tree import TOP_K

CPU = torch.device("cpu")
ENGINES = ("autoregressive", "token-recycling", "auto")
TOP_LOGPROBS = 5
LENGTH = 1000  # positions of all texts
NUM_WARM_STEPS, TOKENS_A_STEP = 12, 9
FIRST_TOKEN = 16  # lowest token drawn
SURE = 0.6  # share of rows that draw their best candidate
ONE_STEP, ONE_JOB = 0.3, 0.01  # allowed wait of the device in ms: per step, and per job
LENGTHS, FORWARD_SECONDS, POSITION_SECONDS = (64, 8192, 49_152), 7e-3, 4e-8  # Llama 8B on an H100
FORWARD, DRAW = CudaDecoder.forward.__name__, "draw"


@dataclass
class IdleDevice:
    """A `Capture` with empty graphs that records launches."""

    launched: dict[str, list[float]] = field(default_factory=lambda: {FORWARD: [], DRAW: []})

    def __call__(self, work: Work, device: torch.device) -> Graph:
        name = DRAW if work.__qualname__.startswith(in_a_row.__name__) else work.__name__
        times = self.launched.setdefault(name, [])
        return Repeated(lambda: times.append(time.thread_time()))

    def take(self) -> tuple[float, float]:
        """Return the times of the first forward and the last draw."""
        found = self.launched[FORWARD][0], self.launched[DRAW][-1]
        for times in self.launched.values():
            times.clear()
        return found


def host(trial: Trial) -> Iterator[Try]:
    parts = Parts.of(written(LLAMA_8B.cut(), trial.scratch / "host-model", CPU), "float32", CPU)
    for num_jobs in trial.sizes.host_counts:
        wide = parts.with_rows(next(rows for rows in ROW_CHOICES if rows >= num_jobs))
        yield f"{num_jobs} at a time", functools.partial(_steps, wide, num_jobs, trial.sizes.num_host_steps)


def _steps(parts: Parts, num_jobs: int, num_steps: int) -> Finding:
    rows, most = list[Row](), ONE_STEP + ONE_JOB * num_jobs
    for name in ENGINES:
        rows.append(_times(parts, name, num_jobs, num_steps))
    rows.append(_times(parts, ENGINES[0], num_jobs, num_steps, TOP_LOGPROBS))
    slowest = max(float(row["ms waited for"]) for row in rows)
    words = f"at most {slowest:.2f} ms between tokens and the next forward; the goal is {most:.2f}"
    return Finding(passed=True, words=words, rows=rows)


def _times(parts: Parts, engine: str, num_jobs: int, num_steps: int, logprobs: int | None = None) -> Row:
    """Return the device's wait for its next forward, and other host work."""
    device, num_all = IdleDevice(), num_steps + NUM_WARM_STEPS
    target = parts.target(num_jobs, LENGTH + TOKENS_A_STEP * num_all, device)
    running, drawn = _begun(target, engine, num_jobs, num_all, logprobs)
    waits, besides, before = list[float](), list[float](), 0.0
    for _ in range(num_all):
        drawn.renew()
        running.step()
        launched, tokens_at = device.take()
        waits.append(launched - before)
        besides.append(tokens_at - launched)
        before = tokens_at
    num_tokens = running.counters.num_generation_tokens
    return {
        "engine": engine if logprobs is None else f"{engine}, top_logprobs {logprobs}",
        "ms waited for": 1000 * statistics.median(waits[NUM_WARM_STEPS:]),
        "ms beside the forward": 1000 * statistics.median(besides[NUM_WARM_STEPS:]),
        "tokens a job": num_tokens / num_all / num_jobs,
    }


def _begun(
    target: ArenaTarget, engine: str, num_jobs: int, num_steps: int, logprobs: int | None
) -> tuple[BenchEngine, DrawnTokens]:
    """Make an engine whose jobs' caches count as filled."""
    running = BenchEngine(target, create_bench_drafter(engine, target, lambda: _costs(target)))
    prompts = [random_ids(target.vocab_size, LENGTH, number) for number in range(num_jobs)]
    for sequence in sequences_of(target, prompts, TOKENS_A_STEP * num_steps, logprobs):
        cache = target.new_cache(sequence.max_length)
        cache.reserve(LENGTH)
        cache.advance(LENGTH - 1)
        running.start(sequence, cache)
    drawing = target.forwards.new_batch_sampler()
    assert isinstance(drawing, CudaBatchSampler)
    return running, DrawnTokens(drawing.out)


class DrawnTokens:
    """Few tokens, so that some drafts are accepted."""

    def __init__(self, out: torch.Tensor) -> None:
        """`out` holds the results of a draw."""
        self._rng, self._out = np.random.default_rng(0), out.numpy()

    def renew(self) -> None:
        tokens, _, ids, logprobs, *_ = parts_out(self._out)
        num_rows = len(tokens)
        rows = np.argsort(self._rng.random((num_rows, TOP_K)), axis=1) + FIRST_TOKEN
        ids[:] = rows
        tokens[:, 0] = np.where(self._rng.random(num_rows) < SURE, rows[:, 0], rows[:, -1])
        logprobs.view(np.float32)[:] = -0.5 - np.arange(TOP_K, dtype=np.float32)


def _costs(target: ArenaTarget) -> StepCosts:
    seconds = [[FORWARD_SECONDS + POSITION_SECONDS * length] * len(ROW_COUNTS) for length in LENGTHS]
    return StepCosts(LENGTHS, np.array(seconds), target.forwards.rows_per_forward)
