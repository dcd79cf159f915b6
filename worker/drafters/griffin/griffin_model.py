"""GRIFFIN's draft model (Hu et al. 2025, section 4.2): one decoder layer over fused features and tokens.

A row's inputs are a token's embedding and the target's hidden state that the token was drawn from. The row's outputs
are two features: one for the target's language model head, one for the draft's next row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import silu
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

Source = Literal["feature", "token", "fused"]
Fusion = Literal["token", "feature", "fused", "without-token", "without-fused", "none"]

SECOND_FUSIONS: dict[Fusion, tuple[Source, ...]] = {
    "token": ("fused", "token"),  # equation 7
    "feature": ("fused", "feature"),  # table 5
    "fused": ("fused", "fused"),  # table 5
    "without-token": ("fused",),  # table 6, ablation 2
    "without-fused": ("token",),  # table 6, ablation 3
    "none": (),  # no token-guided fusion: equation 6 alone, as in EAGLE
}
"""Sources that are fused once more with the first fusion; all but the first are the paper's ablations."""


@dataclass(frozen=True)
class GriffinConfig:
    """Sizes of a draft model, and its ablation."""

    hidden_size: int  # as the target's
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    expansion_size: int  # width of the second fusion; 0: neither up-projector nor SiLU (table 6, ablation 1)
    fusion: Fusion = "token"
    has_token_enhanced_head: bool = True

    @classmethod
    def for_target(cls, target: PreTrainedConfig) -> GriffinConfig:
        """Return the target's own sizes; the second fusion expands to the target's feed-forward size (A.3)."""
        num_heads = target.num_attention_heads
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=getattr(target, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(target, "head_dim", None) or target.hidden_size // num_heads,
            expansion_size=target.intermediate_size,
        )

    def layer_config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            rms_norm_eps=1e-5,
        )


class TokenGuidedFusion(nn.Module):
    """Fuses features and token embeddings `[..., hidden]`, then guides the result by the tokens."""

    def __init__(self, config: GriffinConfig) -> None:
        super().__init__()
        size, self._sources = config.hidden_size, SECOND_FUSIONS[config.fusion]
        self.fuse = nn.Linear(2 * size, size)  # W_m, b_m
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in self._sources)
        width = len(self._sources) * size
        self.up = nn.Linear(width, config.expansion_size) if width and config.expansion_size else None  # W_u, b_u
        self.down = nn.Linear(config.expansion_size or width, size) if width else None  # W_d, b_d

    def forward(self, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        fused = self.fuse(torch.cat([features, embeddings], dim=-1))  # h, equation 6
        if self.down is None:
            return fused  # type: ignore[no-any-return]
        known = {"feature": features, "token": embeddings, "fused": fused}
        parts = [norm(known[source]) for norm, source in zip(self.norms, self._sources, strict=True)]
        expanded = torch.cat(parts, dim=-1)
        if self.up is not None:
            expanded = silu(self.up(expanded))  # z, equation 7
        return self.down(expanded) + fused  # type: ignore[no-any-return]  # o, equation 8


class TokenEnhancedHead(nn.Module):
    """Two linear layers, so that token prediction and feature regression have separate output vectors."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.predict = nn.Linear(size, size, bias=False)
        self.regress = nn.Linear(size, size, bias=False)
        nn.init.eye_(self.predict.weight)
        nn.init.eye_(self.regress.weight)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.predict(hidden), self.regress(hidden)


class GriffinModel(nn.Module):
    """Fusion, one decoder layer, head. `set_attention` chooses the attention."""

    def __init__(self, config: GriffinConfig) -> None:
        super().__init__()
        layer_config = config.layer_config()
        self.config = config
        self.fusion = TokenGuidedFusion(config)
        self.rotary = LlamaRotaryEmbedding(layer_config)
        self.layer = LlamaDecoderLayer(layer_config, layer_idx=0)
        self.head = TokenEnhancedHead(config.hidden_size) if config.has_token_enhanced_head else None

    def set_attention(self, name: str) -> None:
        self.layer.self_attn.config._attn_implementation = name

    def forward(
        self, features: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict features and regress features, in the inputs' shape `[batch, num_rows, hidden]`.

        `positions [batch, num_rows]`; `attention` goes to the attention function.
        """
        fused = self.fusion(features, embeddings)
        hidden = self.layer(fused, position_embeddings=self.rotary(fused, positions), **attention)
        return (hidden, hidden) if self.head is None else self.head(hidden)
