"""The contestants: our engine with one of its drafters, or plain decoding with `transformers`' own cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from swiftbatch.metrics.worker_counters import EngineCounters
from swiftbatch.worker.bench.bench_engine import BenchEngine, BenchError, OwnPositions
from swiftbatch.worker.caches.full_cache import FullKVCache
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.target.timers import seconds_now
from swiftbatch.worker.texts.output_text import OutputText


@dataclass
class Timing:
    """The times and steps of one contestant's rounds."""

    seconds_per_step: list[float] = field(default_factory=list)  # one per round
    num_steps: int = 0
    seconds: float = 0.0  # of all rounds

    def add(self, seconds: float, num_steps: int) -> None:
        """Add one round; a round without steps (the last one had run ahead of it) counts nothing."""
        if num_steps:
            self.seconds_per_step.append(seconds / num_steps)
            self.num_steps += num_steps
            self.seconds += seconds


class EngineContestant:
    """One drafter for one or more sequences, each on a cache that all contestants share.

    Between rounds it keeps only its own positions behind the text.
    """

    def __init__(
        self,
        name: str,
        target: TargetModel,
        drafter: Drafter,
        sequences: list[Sequence],
        caches: list[FullKVCache],
        output_text: OutputText | None = None,
    ) -> None:
        self.name = name
        self.timing = Timing()
        self._target = target
        self._sequences = sequences
        self._own = [OwnPositions(cache) for cache in caches]
        self._engine = BenchEngine(target, drafter, output_text)
        self.counters = self._engine.counters
        self._num_tokens_before = 0  # of jobs that it has left
        for sequence, cache in zip(sequences, caches, strict=True):
            self._engine.start(sequence, cache)

    def go_on_with(self, sequences: list[Sequence]) -> None:
        """Leave the jobs for others behind the same text, with all that the drafter has learned; this takes its time.

        As a worker does: what an engine needs to leave a job and to begin one is part of every job.
        """
        self._num_tokens_before = self.num_tokens
        started = seconds_now()
        for sequence in self._sequences:
            self._engine.stop(sequence)
        self._own = [own.emptied() for own in self._own]
        for sequence, own in zip(sequences, self._own, strict=True):
            self._engine.start(sequence, own.cache)
        self._sequences = sequences
        self.timing.seconds += seconds_now() - started

    @property
    def num_tokens(self) -> int:
        """Tokens generated in all jobs so far."""
        return self._num_tokens_before + sum(sequence.num_generated_tokens for sequence in self._sequences)

    def generate_to(self, num_tokens: int) -> None:
        """Generate until every sequence has at least `num_tokens` tokens in all, and take the time.

        Raises BenchError where one ends before.
        """
        for own in self._own:
            own.put_back()
        num_steps = self.counters.num_steps
        _wait(self._target.device)
        started = seconds_now()
        while min(sequence.num_generated_tokens for sequence in self._sequences) < num_tokens:
            if not self._engine.step():
                raise BenchError(f"{self.name}: the text ended early; use another seed")
        _wait(self._target.device)
        self.timing.add(seconds_now() - started, self.counters.num_steps - num_steps)
        for own in self._own:
            own.take_away()

    def token_ids(self) -> np.ndarray:
        """The generated tokens of all sequences, one behind the other, `[num_generated] int64`."""
        return np.concatenate([sequence.output_ids for sequence in self._sequences])

    def first_token_ids(self, num_tokens: int) -> list[np.ndarray]:
        """Return the first tokens of every sequence, as many as all contestants have."""
        return [sequence.output_ids[:num_tokens] for sequence in self._sequences]


class TransformersContestant:
    """Greedy plain decoding with `transformers`' DynamicCache and its scaled-dot-product attention."""

    def __init__(self, target: TargetModel, sequence: Sequence, cache: FullKVCache) -> None:
        from transformers import DynamicCache  # late: the options of every benchmark know this module

        from swiftbatch.worker.model.causal_lm import load_causal_lm

        self.name = "transformers"
        self.timing = Timing()
        self._device = target.device
        self._model = load_causal_lm(target.files, target.dtype).to(target.device)
        self._model.set_attn_implementation("sdpa")
        self._model.eval()
        self._cache = DynamicCache()
        for index in range(target.cache_shape.num_layers):
            keys, values = (part[None, :, : cache.length].clone() for part in cache.layer(index))
            self._cache.update(keys, values, index)
        self._last = int(sequence.token_ids[-1])
        self._generated: list[int] = []
        self.counters = EngineCounters()

    @torch.inference_mode()
    def generate_to(self, num_tokens: int) -> None:
        num_steps = max(num_tokens - len(self._generated), 0)
        _wait(self._device)
        started = seconds_now()
        for _ in range(num_steps):
            inputs = torch.tensor([[self._last]], device=self._device)
            logits = self._model(input_ids=inputs, past_key_values=self._cache, use_cache=True).logits
            self._last = int(logits[0, -1].argmax())
            self._generated.append(self._last)
        _wait(self._device)
        seconds = seconds_now() - started
        self.timing.add(seconds, num_steps)
        self.counters.num_steps += num_steps
        self.counters.step_seconds["verify"] += seconds

    def token_ids(self) -> np.ndarray:
        return np.array(self._generated, dtype=np.int64)


Contestant = EngineContestant | TransformersContestant


def _wait(device: torch.device) -> None:
    """Let queued work end, so that a clock read next to it means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
