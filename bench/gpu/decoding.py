"""Texts that stages let engines generate, to compare their tokens and to take their time."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.bench_texts import BenchEngine
from swiftbatch.worker.decode_bench import digest
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.sequence import Sequence

NUM_WARM_STEPS = 4


@dataclass(frozen=True)
class Decoded:
    """The tokens of some sequences, and the time and number of the steps behind the first ones."""

    token_ids: list[list[int]]
    seconds: float
    num_steps: int
    num_tokens: int

    @property
    def sha256(self) -> str:
        """The beginning of a digest of all tokens."""
        return digest(*(np.array(each) for each in self.token_ids))[:16]


def random_ids(vocab_size: int, length: int, seed: int) -> list[int]:
    """A text that says nothing."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(length)]


def sequences_of(target: TargetModel, prompts: Many[list[int]], num_tokens: int) -> list[Sequence]:
    """A sequence for each prompt, all with seeds of their own; the first is drawn greedily."""
    made = []
    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=num_tokens, seed=number, temperature=1.0 if number else 0.0, min_p=0.1, ignore_eos=True
        )
        made.append(Sequence(f"s{number}", prompt, params, target.vocab_size, target.device))
    return made


def decoded(
    target: TargetModel,
    drafter: Drafter,
    sequences: list[Sequence],
    caches: Many[FullKVCache | None],
    num_steps: int | None = None,
) -> Decoded:
    """Generate to the end of all sequences, or so many steps behind the first ones, which warm up."""
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
