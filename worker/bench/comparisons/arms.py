"""The arms behind prompts that are in their caches: each next to plain decoding, and with the same tokens."""

from __future__ import annotations

import numpy as np

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.bench.bench_engine import BenchError
from swiftbatch.worker.bench.comparisons.arm_generation import PromptGeneration
from swiftbatch.worker.bench.comparisons.prompts import ReadPrompt
from swiftbatch.worker.drafters.autoregressive import AutoregressiveDrafter
from swiftbatch.worker.drafters.base import Drafter
from swiftbatch.worker.target.target import TargetModel

LONG_PROMPT = 32_768  # behind a longer one plain decoding is measured for its first tokens only
NUM_PLAIN_TOKENS = 64
NUM_TURNS = 8  # a generation and plain decoding take turns, so that a busy moment of the machine hits both


def num_plain_tokens(num_tokens: int, prefill: int) -> int:
    """Return how many of an arm's tokens plain decoding generates as well, behind prompts of so many tokens."""
    return num_tokens if prefill <= LONG_PROMPT else min(NUM_PLAIN_TOKENS, num_tokens)


class PromptArms:
    """Runs arms one after the other from the same state."""

    def __init__(
        self,
        target: TargetModel,
        read: list[ReadPrompt],
        num_tokens: int,
        num_plain_tokens: int,
        seed: int,
        top_p: float = 1.0,
    ) -> None:
        """`num_tokens` behind each prompt, `num_plain_tokens` of them with plain decoding as well.

        `top_p` is at every temperature above 0.
        """
        self.target = target
        self._read = read
        self._num_tokens = num_tokens
        self._num_plain_tokens = num_plain_tokens
        self._seed = seed
        self._top_p = top_p
        self._known: dict[float, list[np.ndarray]] = {}  # by temperature, what was said first, of each sequence

    def run(self, drafter: Drafter, temperature: float) -> tuple[PromptGeneration, PromptGeneration]:
        """Generate with an arm's drafter and plainly, in turn. Raises BenchError where they do not say the same."""
        plain = self._start(AutoregressiveDrafter(), temperature, self._num_plain_tokens)
        generation = self._start(drafter, temperature, self._num_tokens)
        for turn in range(1, NUM_TURNS + 1):
            plain.run_to(self._num_plain_tokens * turn // NUM_TURNS)
            generation.run_to(self._num_tokens * turn // NUM_TURNS)
        self._compare(plain, temperature)
        self._compare(generation, temperature)
        return generation, plain

    def _start(self, drafter: Drafter, temperature: float, num_tokens: int) -> PromptGeneration:
        top_p = self._top_p if temperature > 0 else 1.0
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=temperature, top_p=top_p, seed=self._seed, ignore_eos=True
        )
        return PromptGeneration(self.target, drafter, self._read, sampling)

    def _compare(self, generation: PromptGeneration, temperature: float) -> None:
        """Compare with plain decoding's tokens, and beyond them with those of the first arm at this temperature."""
        known = self._known.setdefault(temperature, generation.token_ids)
        for number, (before, now) in enumerate(zip(known, generation.token_ids, strict=True)):
            num_common = min(len(before), len(now))
            differs = np.nonzero(before[:num_common] != now[:num_common])[0]
            if len(differs):
                raise BenchError(
                    f"sequence {number}, token {differs[0]} at T = {temperature:g}: found {now[differs[0]]}, expected "
                    f"{before[differs[0]]} as said before from the same state; see whether `swiftbatch doctor` says "
                    "`exact` on this machine"
                )
        if len(generation.token_ids[0]) > len(known[0]):
            self._known[temperature] = generation.token_ids
