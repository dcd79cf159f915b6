"""The recipe of the training of TokenSwift's heads: the paper's (table 9), as data."""

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
"""The ways to sample a target, by name, when heads are measured on its own texts."""

LEARNED_SAMPLING = [sampling for sampling in OWN_SAMPLING.values() if sampling.temperature > 0]
"""The sampling of texts that heads learn from. At temperature 0 a small model soon repeats itself."""


@dataclass(frozen=True)
class HeadRecipe:
    """Sizes and optimiser settings: the paper's (table 9), except `num_step_rows` and what concerns own texts."""

    num_heads: int = 3
    num_steps: int = HEADS_STEPS
    num_step_rows: int = 4096  # rows drawn from all texts for each step; the paper: 120 sequences of up to 8,192
    learning_rate: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1
    num_warmup_steps: int = 50
    num_book_tokens: int = 8192  # of each book, from its beginning
    num_own_texts: int = HEADS_OWN_TEXTS  # to learn from instead of the books
    num_prompt_tokens: int = 256  # tokens of a book behind which an own text is sampled
    num_own_tokens: int = 512  # of each own text
    seed: int = SEED

    @property
    def num_needed_tokens(self) -> int:
        """Tokens that a text needs at least, so that every head has one to predict."""
        return self.num_heads + 2

    def rate(self, step: int) -> float:
        """Share of the learning rate at a step (from 0): linear warm-up, then half a cosine down to 0."""
        if step < self.num_warmup_steps:
            return (step + 1) / self.num_warmup_steps
        done = (step - self.num_warmup_steps) / max(1, self.num_steps - self.num_warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * done))

    def own_sampling(self, sampling: SamplingParams, round_number: int = 0) -> SamplingParams:
        """Sampling parameters for own texts of this recipe's length; another round has another seed."""
        return sampling.model_copy(update={"max_tokens": self.num_own_tokens, "seed": self.seed + round_number})
