"""Layers of published draft models where they differ from GRIFFIN's equations. Only torch runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Sizes of decoder layers that draft."""

    hidden_size: int  # as the target's
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float = 1e-5  # of RMS norms
    rope_theta: float = 10_000.0
    has_attention_bias: bool = False
    feature_layers: tuple[int, ...] = ()  # of the target, whose outputs they read; none: its final hidden states

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_layers", tuple(self.feature_layers))  # JSON has lists

    def layer_config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            rms_norm_eps=self.epsilon,
            attention_bias=self.has_attention_bias,
        )


class PublishedFusion(nn.Module):
    """Fuses features and token embeddings `[..., hidden]`, with RMS norms and without biases in the second fusion."""

    def __init__(self, size: int, expansion_size: int, epsilon: float) -> None:
        super().__init__()
        self.fuse = nn.Linear(2 * size, size)
        self.first_norm = LlamaRMSNorm(size, epsilon)  # of the first fusion alone
        self.norm = LlamaRMSNorm(size, epsilon)  # of both sources
        self.up = nn.Linear(2 * size, expansion_size, bias=False)
        self.down = nn.Linear(expansion_size, size, bias=False)

    def forward(self, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        fused = self.fuse(torch.cat([features, embeddings], dim=-1))
        parts = [self.norm(self.first_norm(fused)), self.norm(embeddings)]
        return fused + self.down(silu(self.up(torch.cat(parts, dim=-1))))  # type: ignore[no-any-return]


class TwoOutputs(LlamaMLP):  # type: ignore[misc]
    """An MLP with two outputs `[2, ..., hidden]`: for the target's head, and for the draft's next row."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.down_proj = nn.Linear(config.intermediate_size, 2 * config.hidden_size, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack(super().forward(rows).chunk(2, dim=-1))


class FeatureProjection(nn.Linear):
    """Makes features `[..., hidden]` of the outputs of several layers of the target."""

    def __init__(self, size: int, layers: Sequence[int]) -> None:
        super().__init__(len(layers) * size, size, bias=False)
        self.layers = tuple(layers)


class Pair(nn.Module):
    """Leaves the fusion to the layer's attention."""

    def forward(self, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        return torch.cat([embeddings, features], dim=-1)


class PairLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """EAGLE-3's layer: attends to normed tokens beside normed features, and adds to the features."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, layer_idx=0)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=config.attention_bias)
            setattr(self.self_attn, name, wide)

    def forward(self, pairs: torch.Tensor, **attention: Any) -> torch.Tensor:
        embeddings, features = pairs.chunk(2, dim=-1)
        normed = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(features)], dim=-1)
        hidden = features + self.self_attn(hidden_states=normed, **attention)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class NormedHead(nn.Module):
    """EAGLE-3's head: logits of its own tokens, from normed hidden states; the next row gets them without the norm."""

    is_drafted: torch.Tensor

    def __init__(self, size: int, draft_vocab_size: int, vocab_size: int, epsilon: float) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(size, epsilon)
        self.tokens = nn.Linear(size, draft_vocab_size, bias=False)  # in the order of the target's ids
        self.register_buffer("is_drafted", torch.zeros(vocab_size))  # 1 for each of these tokens

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(hidden), hidden

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, vocab] float32`, -inf for tokens that are never drafted."""
        logits = normed.new_full((len(normed), len(self.is_drafted)), -torch.inf, dtype=torch.float32)
        logits[:, self.is_drafted > 0] = self.tokens(normed).float()
        return logits
