"""A published draft model that drafts a block of tokens in one forward, as DFlash and DSpark do. Only torch runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from swiftbatch.worker.drafters.griffin.published_layers import FeatureProjection, LayerConfig

Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of rows' angles, `[..., num_rows, head_dim]`."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerConfig):
    """Sizes of a block drafter."""

    num_layers: int
    block_size: int  # rows of a forward: the newest token, then masks
    mask_token_id: int
    num_silent: int  # first rows of a block that predict nothing: 1 in DFlash, where a row predicts its own token
    vocab_size: int = 0  # tokens of the bigram head
    bigram_rank: int = 0  # of DSpark's head, which adds to a row's logits by the token in front; 0: none


class BlockAttention(nn.Module):
    """Attention with normed heads. A block's rows see the text's features and each other."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, has_bias = config.hidden_size, config.attention_bias
        width, kv_width = (each * config.head_dim for each in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(size, width, bias=has_bias)
        self.k_proj, self.v_proj = (nn.Linear(size, kv_width, bias=has_bias) for _ in range(2))
        self.o_proj = nn.Linear(width, size, bias=has_bias)
        self.q_norm, self.k_norm = (LlamaRMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))
        self._head_dim = config.head_dim

    def keys_values(self, rows: torch.Tensor, turns: Turns) -> torch.Tensor:
        """Return `[2, ..., num_kv_heads, num_rows, head_dim]` of `rows [..., num_rows, hidden]`."""
        keys = turned(self.k_norm(self._heads(self.k_proj(rows))), turns)
        return torch.stack([keys, self._heads(self.v_proj(rows))])

    def forward(self, rows: torch.Tensor, turns: Turns, context: list[torch.Tensor]) -> torch.Tensor:
        """Attend from the `rows [num_blocks, block_size, hidden]` to each block's own context and itself."""
        queries = turned(self.q_norm(self._heads(self.q_proj(rows))), turns)
        own = self.keys_values(rows, turns).unbind(1)
        attended = []
        for query, block, seen in zip(queries, own, context, strict=True):
            keys, values = torch.cat([seen, block], dim=-2)
            attended.append(scaled_dot_product_attention(query[None], keys[None], values[None], enable_gqa=True)[0])
        return self.o_proj(torch.stack(attended).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(*rows.shape[:-1], rows.shape[-1] // self._head_dim, self._head_dim).transpose(-2, -3)


class BlockLayer(nn.Module):
    """One decoder layer over blocks."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn = BlockAttention(config)
        self.mlp = LlamaMLP(config)

    def forward(self, rows: torch.Tensor, turns: Turns, context: list[torch.Tensor]) -> torch.Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), turns, context)
        return rows + self.mlp(self.post_attention_layernorm(rows))  # type: ignore[no-any-return]


class BigramHead(nn.Module):
    """DSpark's Markov head without gates, of low rank."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return what the tokens add to the logits behind them, `[num_rows, vocab]`."""
        return self.markov_w2(self.markov_w1(token_ids))  # type: ignore[no-any-return]


class BlockModel(nn.Module):
    """Layers over a block of embeddings, each of which attends to the projected features of the whole text."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        layer_config, size = config.layer_config(), config.hidden_size
        self.config = config
        self.rotary = LlamaRotaryEmbedding(layer_config)
        self.projection = FeatureProjection(size, config.feature_layers)
        self.hidden_norm, self.norm = (LlamaRMSNorm(size, config.epsilon) for _ in range(2))
        self.layers = nn.ModuleList(BlockLayer(layer_config) for _ in range(config.num_layers))
        self.markov_head = BigramHead(config.vocab_size, config.bigram_rank) if config.bigram_rank else None

    def context(self, hidden: torch.Tensor, start: int) -> torch.Tensor:
        """Return what blocks see of the target's layers at positions from `start` on.

        Keys and values `[num_layers, 2, num_kv_heads, num_rows, head_dim]` of `hidden [num_rows, num_read * hidden]`.
        """
        features = self.hidden_norm(self.projection(hidden))
        turns = self._turns(features, torch.arange(start, start + len(features), device=features.device))
        return torch.stack([cast(BlockLayer, layer).self_attn.keys_values(features, turns) for layer in self.layers])

    def forward(self, embeddings: torch.Tensor, starts: list[int], contexts: list[torch.Tensor]) -> torch.Tensor:
        """Return hidden states for the target's head, in the shape of `embeddings [num_blocks, block_size, hidden]`."""
        offsets = torch.arange(embeddings.shape[1], device=embeddings.device)
        turns = self._turns(embeddings, torch.stack([start + offsets for start in starts]))
        rows = embeddings
        for layer, seen in zip(self.layers, zip(*contexts, strict=True), strict=True):
            rows = layer(rows, turns, list(seen))
        return self.norm(rows)  # type: ignore[no-any-return]

    def _turns(self, like: torch.Tensor, positions: torch.Tensor) -> Turns:
        """Return the angles at `positions [..., num_rows]`, the same for all heads."""
        cos, sin = self.rotary(like, torch.atleast_2d(positions))
        return (cos[0], sin[0]) if positions.ndim == 1 else (cos[:, None], sin[:, None])


def turned(heads: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Rotate `heads [..., num_heads, num_rows, head_dim]`."""
    return heads * turns[0] + rotate_half(heads) * turns[1]  # type: ignore[no-any-return]
