"""Recipe of the training of GRIFFIN's draft model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from swiftbatch.worker.drafters.griffin.draft_input import NUM_ENTRIES
from swiftbatch.worker.drafters.griffin.griffin_model import Fusion, GriffinConfig
from swiftbatch.worker.training import defaults
from swiftbatch.worker.training.tokenswift_recipe import HeadRecipe

FEATURE_WEIGHT = 0.1  # weight of the features' L1 distance, relative to the tokens' cross entropy (appendix C.1)
GRIFFIN_TEXTS = HeadRecipe(num_book_tokens=4096, num_own_texts=defaults.GRIFFIN_OWN_TEXTS)
"""Texts to learn from, and their own seed, so that trainings with other seeds share them."""


@dataclass(frozen=True)
class GriffinRecipe:
    """The paper's settings (appendix C.3), except for steps, windows and texts."""

    num_steps: int = defaults.GRIFFIN_STEPS
    num_step_windows: int = 4
    window_length: int = NUM_ENTRIES  # most rows that the model sees when it drafts
    own_share: float = 0.5  # share of windows from the target's own texts
    num_passes: int = defaults.GRIFFIN_PASSES  # number of passes in the last steps
    single_pass_share: float = 0.6  # share of steps with one pass; equal shares with two, three, ... passes follow
    align_top_k: int | None = defaults.GRIFFIN_ALIGN_TOP_K  # None for no alignment mask
    base_learning_rate: float = 3e-5  # for the paper's hidden size of 4,096
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_value: float = 0.5
    num_warmup_steps: int = 50
    fusion: Fusion = "token"
    has_token_enhanced_head: bool = True
    expansion_size: int | None = None  # width of the second fusion; None: that of the target's MLP
    texts: HeadRecipe = GRIFFIN_TEXTS
    seed: int = defaults.SEED

    def config(self, target: PreTrainedConfig) -> GriffinConfig:
        config = replace(
            GriffinConfig.for_target(target),
            fusion=self.fusion,
            has_token_enhanced_head=self.has_token_enhanced_head,
        )
        return config if self.expansion_size is None else replace(config, expansion_size=self.expansion_size)

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
