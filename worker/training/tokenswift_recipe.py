"""Recipe of the training of TokenSwift's heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.training.defaults import HEADS_OWN_TEXTS, HEADS_STEPS, SEED

OWN_SAMPLING = {
    "T 1, min-p 0.1": SamplingParams(max_tokens=512, temperature=1.0, min_p=0.1),
    "T 1, min-p 0.1, penalty 1.2": SamplingParams(max_tokens=512, temperature=1.0, min_p=0.1, repetition_penalty=1.2),
    "T 0": SamplingParams(max_tokens=512, temperature=0.0),
}
"""Sampling of a target's own texts, by name, for measuring heads."""

LEARNED_SAMPLING = [sampling for sampling in OWN_SAMPLING.values() if sampling.temperature > 0]
"""Sampling of texts to learn from; at temperature 0 a small model soon repeats itself."""


@dataclass(frozen=True)
class HeadRecipe:
    """The paper's sizes and optimiser settings (table 9), except for `num_step_rows` and own texts."""

    num_heads: int = 3
    num_steps: int = HEADS_STEPS
    num_step_rows: int = 4096  # rows of all texts per step; the paper has 120 sequences of up to 8,192
    learning_rate: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1
    num_warmup_steps: int = 50
    num_book_tokens: int = 8192
    num_own_texts: int = HEADS_OWN_TEXTS  # 0 if heads learn from books
    num_prompt_tokens: int = 256  # tokens of a book that an own text continues
    num_own_tokens: int = 512
    seed: int = SEED

    @property
    def num_needed_tokens(self) -> int:
        """Return how many tokens a text needs so that every head has a token to predict."""
        return self.num_heads + 2

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate: linear warm-up, then a half cosine to 0."""
        if step < self.num_warmup_steps:
            return (step + 1) / self.num_warmup_steps
        done = (step - self.num_warmup_steps) / max(1, self.num_steps - self.num_warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * done))

    def own_sampling(self, sampling: SamplingParams, round_number: int = 0) -> SamplingParams:
        return sampling.model_copy(update={"max_tokens": self.num_own_tokens, "seed": self.seed + round_number})
