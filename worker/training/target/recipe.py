"""What the embedded target model is and how it is trained, as data."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig

VOCAB_SIZE = 4096
MAX_POSITIONS = 131_072


@dataclass(frozen=True)
class Phase:
    """One stretch of training at a fixed window length."""

    name: str
    length: int  # tokens per window
    batch_size: int  # windows per step
    num_tokens: int
    position_span: int  # positions reached with gaps; equal to `length` for none

    @property
    def num_steps(self) -> int:
        return max(1, self.num_tokens // (self.length * self.batch_size))


@dataclass(frozen=True)
class Recipe:
    """Phases and optimiser settings. Muon takes the matrices, AdamW the embedding and the norms."""

    phases: tuple[Phase, ...]
    learning_rate: float = 5e-3
    embedding_learning_rate: float = 3e-3
    weight_decay: float = 0.01
    num_warmup_steps: int = 100
    decay_share: float = 0.4  # last share of all steps, over which the rate falls linearly
    final_rate: float = 0.05  # of the peak rate
    gradient_clip: float = 1.0
    seed: int = 1


EMBEDDED_RECIPE = Recipe(
    phases=(
        Phase("short", length=256, batch_size=32, num_tokens=9_000_000, position_span=256),
        Phase("middle", length=2048, batch_size=4, num_tokens=2_500_000, position_span=8192),
        Phase("long", length=16_384, batch_size=1, num_tokens=600_000, position_span=MAX_POSITIONS),
    )
)


def embedded_config(eos_token_id: int) -> LlamaConfig:
    """A Llama of 7.3 million parameters with grouped queries (4 heads of 64 over 2 key-value heads)."""
    return LlamaConfig(
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
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
    )
