"""The recipes of trained parts: TokenSwift's heads, GRIFFIN's draft model, TriForce's draft model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from transformers import LlamaConfig, PreTrainedConfig

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.griffin.draft_input import NUM_ENTRIES
from swiftbatch.worker.drafters.griffin.griffin_model import Fusion, GriffinConfig
from swiftbatch.worker.drafters.triforce import NUM_SINKS, WINDOW
from swiftbatch.worker.training import defaults
from swiftbatch.worker.training.defaults import HEADS_OWN_TEXTS, HEADS_STEPS, SEED
from swiftbatch.worker.training.training_loop import Recipe

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


# The recipe of the training of GRIFFIN's draft model, as data: the paper's.


FEATURE_WEIGHT = 0.1  # weight of the features' L1 distance beside the tokens' cross entropy (appendix C.1)

GRIFFIN_TEXTS = HeadRecipe(num_book_tokens=4096, num_own_texts=defaults.GRIFFIN_OWN_TEXTS)
"""Sizes of the texts to learn from, and their seed: trainings with other seeds share them."""


@dataclass(frozen=True)
class GriffinRecipe:
    """The paper's settings (appendix C.3), but for the number of steps and what concerns windows and texts."""

    num_steps: int = defaults.GRIFFIN_STEPS
    num_step_windows: int = 4
    window_length: int = NUM_ENTRIES  # rows: the most that the model sees in use
    own_share: float = 0.5  # share of windows from the target's own texts, where there are any
    num_passes: int = defaults.GRIFFIN_PASSES  # N, in the last steps
    single_pass_share: float = 0.6  # share of steps with one pass; then equal parts with two, three, ...
    align_top_k: int | None = defaults.GRIFFIN_ALIGN_TOP_K  # of the alignment mask; None: no mask
    base_learning_rate: float = 3e-5  # at the paper's 4,096 hidden numbers
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_value: float = 0.5
    num_warmup_steps: int = 50
    fusion: Fusion = "token"
    has_token_enhanced_head: bool = True
    expansion_size: int | None = None  # of the second fusion; None: that of the target's feed-forward layers
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
        """The recipe of a step (from 0): the number of passes grows. One costs least and teaches most at first."""
        later = step / self.num_steps - self.single_pass_share
        part = (1.0 - self.single_pass_share) / max(1, self.num_passes - 1)
        num_passes = 1 if later < 0 else min(self.num_passes, 2 + int(later / part))
        return replace(self, num_passes=num_passes)

    def learning_rate(self, step: int, hidden_size: int) -> float:
        """Rate at a step (from 0): warm-up, then a linear fall to 0. Small models take larger rates: see the power."""
        peak: float = self.base_learning_rate * (4096 / hidden_size) ** 1.75
        left = (self.num_steps - step) / max(1, self.num_steps - self.num_warmup_steps)
        return peak * min((step + 1) / self.num_warmup_steps, left, 1.0)


GRIFFIN_RECIPE = GriffinRecipe()


# The recipe of a draft model and of its distillation from its target, as data.


LENGTH = NUM_SINKS + 2 * WINDOW  # length of training windows: the most that it reads in use

NUM_BOOK_TOKENS = 32_768  # of each book, from its beginning

DRAFT_TEXTS = HeadRecipe(num_book_tokens=2048, num_own_texts=384)
"""Sizes of the own texts, and of the test books that agreement is measured on: made as they are for heads."""


@dataclass(frozen=True)
class DraftRecipe(Recipe):
    """The optimiser's settings are those of a target model."""

    num_warmup_steps: int = 20
    decay_share: float = 0.4
    num_step_windows: int = 4
    window_length: int = LENGTH
    own_share: float = 0.5  # share of windows from what the target itself says
    texts: HeadRecipe = DRAFT_TEXTS


def draft_config(target: PreTrainedConfig) -> LlamaConfig:
    """A Llama of two layers with the target's vocabulary: 0.8 million parameters beside the embedding.

    A forward of a model this small costs what its number of layers costs, so it is wide rather than deep.
    """
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
    )


def draft_recipe(num_steps: int, seed: int) -> DraftRecipe:
    """Return the recipe with so many steps."""
    return DraftRecipe(num_steps, seed=seed, texts=replace(DRAFT_TEXTS, seed=seed))
