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
from swiftbatch.worker.drafters.auto.auto import NUM_BEST, RecycledProposer
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.recycling.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.drafters.self_speculation.draft_chain import RoundPlan
from swiftbatch.worker.drafters.self_speculation.round_planner import Planner
from swiftbatch.worker.drafters.self_speculation.self_speculation import SelfSpeculationDrafter
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.scan_cache import ScanKVCache
from swiftbatch.worker.sampling.sequence import Sequence

NUM_WARM_STEPS = 4
FORCED = RoundPlan(num_rounds=TILE_ROWS, num_round_nodes=0, chain_length=7, num_nodes=7)


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


def forced_rounds_of(target: TargetModel, costs: Costs) -> SelfSpeculationDrafter:
    """A drafter that draws chains with scanned keys, whether that pays or not."""
    recycling = TokenRecyclingDrafter(target, costs)
    return SelfSpeculationDrafter(target, RecycledProposer(recycling), Planner(FORCED), ScanKVCache, NUM_BEST)


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
