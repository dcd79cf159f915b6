"""Recipes of the trainings, without heavy imports because the command line shows their defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from swiftbatch.jobs.sampling_params import SamplingParams

if TYPE_CHECKING:
    from swiftbatch.worker.drafters.catalogue import HeadKind
    from swiftbatch.worker.drafters.griffin.griffin_model import Fusion

Labels = Literal["soft", "hard"]
"""Labels of a step: the target's distributions, or the text's next tokens."""
TARGET_KIND = "qwen3"
TARGET_KINDS = (TARGET_KIND, "qwen3_5_text")
PUBLISHED_PARTS = ("dflash", "draft", "eagle", "eagle3", "griffin", "tokenswift")
TARGET_TOKENS = 20_000_000  # 1.2 times the embedded model's books, hours on two processor cores


@dataclass(frozen=True)
class Recipe:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for the embedding and the norms."""

    num_steps: int
    learning_rate: float = 5e-3
    embedding_learning_rate: float = 3e-3
    weight_decay: float = 0.01
    num_warmup_steps: int = 100
    decay_share: float = 0.2  # share of the last steps, over which the rate decays linearly
    final_rate: float = 0.05  # share of the peak rate
    gradient_clip: float = 1.0
    seed: int = 1

    def rate(self, step: int) -> float:
        """Return the share of the peak rate at a step (from 0): warm-up, constant, decay."""
        warm = min(1.0, (step + 1) / self.num_warmup_steps)
        left = (self.num_steps - step) / max(1.0, self.decay_share * self.num_steps)
        return warm * (self.final_rate + (1 - self.final_rate) * min(1.0, left))


OWN_SAMPLING = {
    "T 1, min-p 0.1": SamplingParams(max_tokens=512, temperature=1.0, min_p=0.1),
    "T 1, min-p 0.1, penalty 1.2": SamplingParams(max_tokens=512, temperature=1.0, min_p=0.1, repetition_penalty=1.2),
    "T 0": SamplingParams(max_tokens=512, temperature=0.0),
}
"""Sampling of a target's own texts, by name, for measuring heads."""

LEARNED_SAMPLING = [sampling for sampling in OWN_SAMPLING.values() if sampling.temperature > 0]
"""Sampling of texts to learn from; at temperature 0 a small model soon repeats itself."""


@dataclass(frozen=True)
class TextRecipe:
    """Texts to learn from: starts of books, and the target's own texts."""

    num_book_tokens: int = 8192  # most tokens of a book
    num_own_texts: int = 0
    num_prompt_tokens: int = 256  # tokens of a book that an own text continues
    num_own_tokens: int = 512
    seed: int = 0

    def own_sampling(self, sampling: SamplingParams, round_number: int = 0) -> SamplingParams:
        return sampling.model_copy(update={"max_tokens": self.num_own_tokens, "seed": self.seed + round_number})


MOST_HEADS = 16


@dataclass(frozen=True)
class HeadRecipe(TextRecipe):
    """The paper's sizes and optimiser settings (table 9), except for `num_step_rows` and own texts.

    With own texts, heads learn from these alone.
    """

    kind: HeadKind = "tokenswift"
    num_heads: int = 3
    num_steps: int = 200
    num_step_rows: int = 4096  # rows of all texts per step; the paper has 120 sequences of up to 8,192
    learning_rate: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1
    num_warmup_steps: int = 50

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


DRAFT_TEXTS = TextRecipe(num_book_tokens=32_768, num_own_texts=384)
"""Own texts, and test books to measure agreement."""


@dataclass(frozen=True)
class DraftRecipe(Recipe):
    """Recipe of a draft model, with the optimizer settings of a target model."""

    num_steps: int = 1500
    num_warmup_steps: int = 20
    decay_share: float = 0.4
    num_step_windows: int = 4
    window_length: int = 528  # most tokens that a draft model reads when it drafts
    own_share: float = 0.5  # share of windows of the target's own texts
    labels: Labels = "soft"
    shape: dict[str, Any] | None = None  # fields of a config.json; None: that of the embedded model's
    texts: TextRecipe = DRAFT_TEXTS
    seed: int = 0


def draft_recipe(num_own_texts: int, seed: int, **fields: Any) -> DraftRecipe:
    return DraftRecipe(seed=seed, texts=replace(DRAFT_TEXTS, num_own_texts=num_own_texts, seed=seed), **fields)


GRIFFIN_TEXTS = TextRecipe(num_book_tokens=4096, num_own_texts=448)
"""Texts to learn from, and their own seed, so that trainings with other seeds share them."""


@dataclass(frozen=True)
class GriffinRecipe:
    """The paper's settings (appendix C), except for steps, warm-up, windows, texts and labels."""

    num_steps: int = 3600
    num_step_windows: int = 4
    window_length: int = 576  # most rows that the model sees when it drafts
    own_share: float = 0.5  # share of windows from the target's own texts
    num_passes: int = 3  # number of passes in the last steps
    single_pass_share: float = 0.6  # share of steps with one pass; equal shares with two, three, ... passes follow
    align_top_k: int | None = 3  # None for no alignment mask
    labels: Labels = "soft"  # the paper's are hard
    feature_weight: float = 0.1  # of the features' L1 distance, relative to the tokens' cross entropy (C.1)
    base_learning_rate: float = 3e-5  # for the paper's hidden size of 4,096
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_value: float = 0.5
    num_warmup_steps: int = 50
    fusion: Fusion = "token"
    has_token_enhanced_head: bool = True
    expansion_size: int | None = None  # width of the second fusion; None: that of the target's MLP
    texts: TextRecipe = GRIFFIN_TEXTS
    seed: int = 0

    def at(self, step: int) -> GriffinRecipe:
        """Return the recipe for a step.

        Training begins with one pass, which is cheapest and teaches most, and adds passes later.
        """
        later = step / self.num_steps - self.single_pass_share
        part = (1.0 - self.single_pass_share) / max(1, self.num_passes - 1)
        num_passes = 1 if later < 0 else min(self.num_passes, 2 + int(later / part))
        return replace(self, num_passes=num_passes)

    def learning_rate(self, step: int, hidden_size: int) -> float:
        """Return the learning rate: warm-up, then a linear decay to 0. Smaller models have a higher rate."""
        peak: float = self.base_learning_rate * (4096 / hidden_size) ** 1.75
        left = (self.num_steps - step) / max(1, self.num_steps - self.num_warmup_steps)
        return peak * min((step + 1) / self.num_warmup_steps, left, 1.0)


GRIFFIN_RECIPE = GriffinRecipe()


@dataclass(frozen=True)
class MTPRecipe:
    """Sizes of the training, with GRIFFIN's texts, so that both can share features."""

    num_steps: int = 1200
    num_step_windows: int = 4
    window_length: int = 512
    num_passes: int = 3  # training begins with fewer, since the first pass is cheapest and teaches most
    own_share: float = 0.5  # share of the windows, with own texts
    texts: TextRecipe = GRIFFIN_TEXTS
    seed: int = 0

    def passes_at(self, step: int) -> int:
        later = 2 * step / self.num_steps - 1.0
        return 1 if later < 0 else min(self.num_passes, 2 + int(later * (self.num_passes - 1)))

    def steps(self) -> Recipe:
        return Recipe(self.num_steps, embedding_learning_rate=1e-3, num_warmup_steps=20, seed=self.seed)
