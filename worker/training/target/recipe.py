"""What the embedded target model is and how it is trained, as data."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from transformers import Qwen3Config

from worker.training.defaults import TARGET_TOKENS
from worker.training.steps import Recipe

VOCAB_SIZE = 4096
MAX_POSITIONS = 131_072


@dataclass(frozen=True)
class WindowKind:
    """Windows of one length, which make up a share of the tokens that a model is trained on."""

    name: str
    length: int  # tokens per window
    batch_size: int  # windows per step
    share: float  # of all tokens
    mixed_share: float = 0.0  # of these windows: two books by turns

    @property
    def num_tokens(self) -> int:
        """Of a step."""
        return self.length * self.batch_size


@dataclass(frozen=True)
class TargetRecipe(Recipe):
    """Windows of all lengths from the first step on, so that no length is ever new to the model."""

    kinds: tuple[WindowKind, ...] = ()
    far_share: float = 0.3  # of the windows: not read from position 0 on, but from anywhere in a long text

    def kind_of(self, step: int) -> WindowKind:
        """The windows of a step (from 0): tokens have the shares that the kinds say, from beginning to end."""
        return self._order[step]

    @functools.cached_property
    def _order(self) -> list[WindowKind]:
        """Of each step. A kind has one step in each of equal stretches of the training, at a random place there."""
        rates = np.array([kind.share / kind.num_tokens for kind in self.kinds])
        random, places = np.random.default_rng(self.seed), []
        for number, rate in enumerate(rates / rates.sum()):  # steps of this kind per step
            strata = np.arange(math.ceil(rate * self.num_steps) + 1)
            places += [(place, number) for place in (strata + random.random(len(strata))) / rate]
        return [self.kinds[number] for _, number in sorted(places)[: self.num_steps]]


KINDS = (
    WindowKind("512", 512, 16, share=0.25),
    WindowKind("2K", 2048, 4, share=0.15),
    WindowKind("4K", 4096, 2, share=0.2, mixed_share=0.25),
    WindowKind("16K", 16_384, 1, share=0.15, mixed_share=0.3),
    WindowKind("32K", 32_768, 1, share=0.125, mixed_share=0.3),
    WindowKind("96K", 98_304, 1, share=0.125, mixed_share=0.3),
)


def num_steps_for(kinds: tuple[WindowKind, ...], num_tokens: int) -> int:
    """Steps of these kinds with so many tokens in all."""
    return max(1, round(num_tokens * sum(kind.share / kind.num_tokens for kind in kinds)))


def embedded_recipe(num_tokens: int = TARGET_TOKENS) -> TargetRecipe:
    """The embedded model's, or the same with another number of tokens."""
    return TargetRecipe(num_steps_for(KINDS, num_tokens), kinds=KINDS)


def embedded_config(beginning_of_text_id: int, end_of_text_id: int) -> Qwen3Config:
    """7.3 million parameters: grouped queries (4 heads of 64 over 2 key-value heads), norms of queries and keys.

    Qwen3's kind by runs of 2,000 steps side by side, loss in windows of 512 / 2K / 4K / 16K: 3.70 / 3.68 / 3.63 / 3.73;
    Llama's 3.76 / 3.76 / 3.71 / 3.80, Ministral3's with log-scaled queries 3.77 / 3.77 / 3.72 / 3.80; and with 320 in
    place of 256 dimensions, 10.7 million parameters, 3.67 / 3.65 / 3.60 / 3.69.
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
