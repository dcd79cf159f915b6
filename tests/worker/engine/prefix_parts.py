from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np

from bench.variants import create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.engine.prefill import MEMORY_SHARE, KeptPrefixes, PrefixSharing, Slot
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import free_rows


def text(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab_size, num_tokens).tolist()


def sequence(target: TargetModel, name: str, prompt: Items[int], num_tokens: int = 8) -> Sequence:
    params = SamplingParams(max_tokens=num_tokens, seed=len(name), min_p=0.02, repetition_penalty=1.1, ignore_eos=True)
    return Sequence(name, list(prompt), params, target.vocab_size)


def new_engine(target: TargetModel, engine_name: str = "autoregressive", room: float = math.inf) -> Engine:
    kept = KeptPrefixes(target.cache_shape.bytes_per_position(), lambda: room / MEMORY_SHARE - kept.num_bytes)
    return Engine(target, create_bench_drafter(engine_name, target, free_rows), sharing=PrefixSharing(kept))


def to_the_end(engine: Engine, sequences: Iterable[Sequence]) -> None:
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()


def decode(engine: Engine, sequences: Items[Sequence], num_shared_tokens: int = 0) -> list[Slot]:
    slots = [engine.start(sequence, None, num_shared_tokens) for sequence in sequences]
    to_the_end(engine, sequences)
    for sequence in sequences:
        engine.stop(sequence)
    return slots


def rows_of(slot: Slot) -> bytes:
    return np.ascontiguousarray(slot.cache.kv(0, slot.sequence.num_prompt_tokens)).tobytes()
