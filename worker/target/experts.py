"""Mixture of experts, row-exactly: each expert runs whole tiles, so a row's bits do not depend on who shares it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, pad
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS

EXPERTS_NAME = "swiftbatch_whole_tiles"


def run_experts(
    module: Any,
    hidden_states: torch.Tensor,  # [num_rows, hidden]
    top_k_index: torch.Tensor,  # [num_rows, top_k]
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute what `transformers`' own experts do, `[num_rows, hidden]`; sum a row's experts in the row's own order."""
    outputs = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[1])
    for expert in top_k_index.unique().tolist():
        rows, choices = (top_k_index == expert).nonzero(as_tuple=True)
        states = pad(hidden_states[rows], (0, 0, 0, -len(rows) % TILE_ROWS))
        outputs[rows, choices] = _run_expert(module, expert, states)[: len(rows)]
    return (outputs * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


def _run_expert(module: Any, expert: int, states: torch.Tensor) -> torch.Tensor:
    """Run one expert's feed-forward layers over padded rows, `[num_padded_rows, hidden]` in and out."""
    if module.has_gate:
        states = module._apply_gate(_project(module, "gate_up_proj", expert, states))
    else:
        states = module.act_fn(_project(module, "up_proj", expert, states))
    states = _project(module, "down_proj", expert, states)
    return module.post_expert_norm(states) if module.has_post_expert_norm else states


def _project(module: Any, name: str, expert: int, states: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return linear(states, weight.t() if module.is_transposed else weight, bias)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, run_experts)
