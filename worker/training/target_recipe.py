"""Recipe of the embedded target model and its training."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import Qwen3_5TextConfig, Qwen3Config

from swiftbatch.worker.training import recipes
from swiftbatch.worker.training.recipes import Recipe

VOCAB_SIZE = 4096
MAX_POSITIONS = 131_072


@dataclass(frozen=True)
class WindowKind:
    """Windows of one length, and their share of the trained tokens."""

    name: str
    length: int
    batch_size: int
    share: float  # share of all tokens
    mixed_share: float = 0.0  # share of these windows with two alternating books

    @property
    def num_tokens(self) -> int:
        return self.length * self.batch_size


@dataclass(frozen=True)
class WindowRecipe(Recipe):
    """Steps over windows of some kinds."""

    kinds: tuple[WindowKind, ...] = ()
    far_share: float = 0.3  # share of windows at random positions of a long text instead of position 0

    def kind_of(self, step: int) -> WindowKind:
        """Return the kind of windows for a step. Shares of tokens hold throughout the training."""
        return self._order[step]

    @functools.cached_property
    def _order(self) -> list[WindowKind]:
        """Return the kind of each step, with all kinds spread evenly over the training."""
        rates = np.array([kind.share / kind.num_tokens for kind in self.kinds])
        random, places = np.random.default_rng(self.seed), []
        for number, rate in enumerate(rates / rates.sum()):  # expected steps of this kind per step
            strata = np.arange(math.ceil(rate * self.num_steps) + 1)
            places += [(place, number) for place in (strata + random.random(len(strata))) / rate]
        return [self.kinds[number] for _, number in sorted(places)[: self.num_steps]]


@dataclass(frozen=True)
class LongTextRecipe(WindowRecipe):
    """Whole long texts, read in segments, each beside windows of these kinds."""

    num_texts: int = 0
    length: int = 98_304
    segment: int = 4096
    near: int = 2048  # tokens before a segment that the near view reads
    closeness: float = 2.0  # weight of the distance between the view of the whole text and the near view
    is_near_right_alone: bool = False  # closeness counts only where the near view gave the next token more
    pieces: tuple[int, int] | None = None  # lengths of a text's pieces of books; None for whole books

    @property
    def num_segments(self) -> int:
        return self.length // self.segment


@dataclass(frozen=True)
class TargetRecipe(WindowRecipe):
    """Windows of all lengths from the first step on, then long texts."""

    long_texts: tuple[LongTextRecipe, ...] = ()

    @property
    def all_steps(self) -> int:
        return self.num_steps + sum(texts.num_steps for texts in self.long_texts)


KINDS = (
    WindowKind("512", 512, 16, share=0.25),
    WindowKind("2K", 2048, 4, share=0.15),
    WindowKind("4K", 4096, 2, share=0.2, mixed_share=0.25),
    WindowKind("16K", 16_384, 1, share=0.15, mixed_share=0.3),
    WindowKind("32K", 32_768, 1, share=0.125, mixed_share=0.3),
    WindowKind("96K", 98_304, 1, share=0.125, mixed_share=0.3),
)

KINDS_BESIDE_TEXTS = (
    WindowKind("512 beside", 512, 8, share=0.3),
    WindowKind("2K beside", 2048, 2, share=0.3),
    WindowKind("4K beside", 4096, 1, share=0.4, mixed_share=0.25),
)
PIECES = (4096, 49_152)  # with fewer tokens after other books, far text did harm
TOKENS_PER_TEXT = 2_000_000  # trained tokens of windows per long text


def num_steps_for(kinds: tuple[WindowKind, ...], num_tokens: int) -> int:
    return max(1, round(num_tokens * sum(kind.share / kind.num_tokens for kind in kinds)))


def embedded_recipe(num_tokens: int = recipes.TARGET_TOKENS) -> TargetRecipe:
    """Return the embedded model's recipe for a number of tokens."""
    num_texts = num_tokens // TOKENS_PER_TEXT
    long_texts = (
        long_text_recipe(num_texts, seed=2),
        long_text_recipe(num_texts * 7 // 10, seed=3, closeness=4.0, is_near_right_alone=True),
        long_text_recipe(num_texts, seed=4, closeness=4.0, is_near_right_alone=True, pieces=PIECES),
    )
    used = tuple(texts for texts in long_texts if texts.num_texts)
    num_steps = num_steps_for(KINDS, num_tokens)
    num_warmup_steps = min(Recipe.num_warmup_steps, num_steps // 10 + 1)
    return TargetRecipe(num_steps, num_warmup_steps=num_warmup_steps, kinds=KINDS, long_texts=used)


def long_text_recipe(num_texts: int, seed: int, **fields: Any) -> LongTextRecipe:
    """Return a recipe with low learning rates for weights that are already trained. `fields` set more fields."""
    recipe = LongTextRecipe(
        num_steps=0,
        learning_rate=7e-4,
        embedding_learning_rate=4e-4,
        num_warmup_steps=10,
        decay_share=0.7,
        final_rate=0.02,
        seed=seed,
        kinds=KINDS_BESIDE_TEXTS,
        num_texts=num_texts,
        **fields,
    )
    return dataclasses.replace(recipe, num_steps=num_texts * recipe.num_segments)


def embedded_config(beginning_of_text_id: int, end_of_text_id: int) -> Qwen3Config:
    """Return a config of 7.3 million parameters, of the kind with the lowest loss.

    Losses after 2,000 steps in windows of 512 / 2K / 4K / 16K: Qwen3 3.70 / 3.68 / 3.63 / 3.73; Llama 3.76 / 3.76 /
    3.71 / 3.80; Ministral3 3.77 / 3.77 / 3.72 / 3.80.
    """
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=beginning_of_text_id,
        eos_token_id=end_of_text_id,
    )


def hybrid_config(beginning_of_text_id: int, end_of_text_id: int) -> Qwen3_5TextConfig:
    """Return a config of 7.3 million parameters in which every fourth layer attends, with gates.

    The others are gated delta nets, so a step at 100K reads a quarter of the keys.
    """
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=672,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 500_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=beginning_of_text_id,
        eos_token_id=end_of_text_id,
    )


CONFIGS: dict[str, Callable[[int, int], Qwen3Config | Qwen3_5TextConfig]] = {
    recipes.TARGET_KIND: embedded_config,
    "qwen3_5_text": hybrid_config,
}
