"""The recipe of a draft model and of its distillation from its target, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import LlamaConfig, PreTrainedConfig

from swiftbatch.worker.papers.triforce.draft_model import NUM_SINKS, WINDOW
from swiftbatch.worker.training.head_recipe import HeadRecipe
from swiftbatch.worker.training.training_loop import Recipe

LENGTH = NUM_SINKS + 2 * WINDOW  # length of training windows: the most that it reads in use

NUM_BOOK_TOKENS = 32_768  # of each book, from its beginning

TEXTS = HeadRecipe(num_book_tokens=2048, num_own_texts=384)
"""Sizes of the own texts, and of the test books that agreement is measured on: made as they are for heads."""


@dataclass(frozen=True)
class DraftRecipe(Recipe):
    """The optimiser's settings are those of a target model."""

    num_warmup_steps: int = 20
    decay_share: float = 0.4
    num_step_windows: int = 4
    window_length: int = LENGTH
    own_share: float = 0.5  # share of windows from what the target itself says
    texts: HeadRecipe = TEXTS


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
    return DraftRecipe(num_steps, seed=seed, texts=replace(TEXTS, seed=seed))
