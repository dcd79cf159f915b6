"""The layers of GRIFFIN's published weights where they differ from the paper's equations. Only torch runs them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm


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
