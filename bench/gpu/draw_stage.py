"""The stage of draws: tokens under every filter against the CPU's, and the time of a table of rows."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu.decoding import random_ids
from bench.gpu.trial import Trial, Try
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.sampling.batch_sampler import TorchBatchSampler
from swiftbatch.worker.sampling.cuda.cuda_sampler import CudaBatchSampler
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "min-p": {"min_p": 0.05},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "top-k 20, top-p 0.95, T 0.6": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    "eta": {"eta": 2e-4},
    "penalties": {"repetition_penalty": 1.2, "penalty_window": 128, "frequency_penalty": 0.3},
    "all": {"top_k": 200, "top_p": 0.98, "min_p": 0.01, "eta": 1e-4, "repetition_penalty": 1.1, "temperature": 1.2},
}
MOST_OTHER = 0.005  # share of draws that may differ: where a filter's edge or two scores are a rounding apart
SPREAD = 3.0  # of logits, as those of models
NUM_TIMES = 9
PENALISED = 30  # sequences that have places of their own for counts


def draws(trial: Trial) -> Iterator[Try]:
    """Every kind of sampling."""
    vocab = trial.sizes.sampled_vocab
    drawing = CudaBatchSampler(vocab, trial.device)
    for name in KINDS:
        yield name, functools.partial(_compared, trial, drawing, name)


def _compared(trial: Trial, drawing: CudaBatchSampler, name: str) -> Finding:
    sizes, plain = trial.sizes, TorchBatchSampler(trial.sizes.sampled_vocab, torch.device("cpu"))
    generator, differing, times = torch.Generator().manual_seed(1), 0, []
    num_drawn, at_once = 0, min(PENALISED, sizes.num_drawn)
    while num_drawn < sizes.num_drawn:
        params = [SamplingParams(max_tokens=9, seed=num_drawn + each, **KINDS[name]) for each in range(at_once)]
        sequences = [_sequence(sizes.sampled_vocab, each) for each in params]
        logits = SPREAD * torch.randn(at_once, 1, sizes.sampled_vocab, generator=generator)
        ours = _drawn(drawing, sequences, logits.to(trial.device))
        theirs = _drawn(plain, sequences, logits)
        differing += sum(a != b for a, b in zip(ours, theirs, strict=True))
        num_drawn += at_once
    for _ in range(NUM_TIMES if trial.device.type == "cuda" else 1):
        times.append(_seconds(drawing, sequences[:1] * min(NUM_ROWS, at_once), logits.to(trial.device), trial))
    words = f"{differing} of {num_drawn} tokens are not the CPU's; {1000 * statistics.median(times):.2f} ms a table"
    return Finding(passed=differing <= MOST_OTHER * num_drawn, words=words, rows=[])


def _sequence(vocab: int, params: SamplingParams) -> Sequence:
    return Sequence(f"s{params.seed}", random_ids(vocab, 40, params.seed or 0), params, vocab)


def _drawn(drawing: Any, sequences: list[Sequence], logits: torch.Tensor) -> list[list[int]]:
    samplers = [drawing.sampler(sequence) for sequence in sequences]
    walks = drawing.walks(samplers, [DraftTree()] * len(sequences), list(logits))
    return [walk.drawn for walk in walks]


def _seconds(drawing: CudaBatchSampler, sequences: list[Sequence], logits: torch.Tensor, trial: Trial) -> float:
    """The seconds of one draw of all rows, up to their tokens on the host."""
    samplers, trees = [drawing.sampler(sequence) for sequence in sequences], [DraftTree()] * len(sequences)
    rows = list(logits[: len(sequences)])
    started = time.perf_counter()
    drawing.walks(samplers, trees, rows)
    return time.perf_counter() - started
