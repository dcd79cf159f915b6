"""Gradients of a target's losses: of windows, and of rows whose states are known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, nll_loss
from transformers import PreTrainedModel

from swiftbatch.worker.training.target.delta_nets import sparing
from swiftbatch.worker.training.target.training_attention import EarlierSegments
from swiftbatch.worker.training.target.windows import WindowBatch

NUM_LOGIT_ROWS = {"cpu": 1024, "cuda": 16_384}  # rows whose logits are held at once: on a CPU they fit its cache


def add_batch_gradients(model: PreTrainedModel, batch: WindowBatch) -> float:
    """Add the gradients of a batch's loss, and return it, in nats per token."""
    with sparing(model, batch.positions.numel()):
        states = states_of(model, batch.token_ids[:, :-1], batch.positions)
        return add_row_gradients(model, states.flatten(0, 1), batch.token_ids[:, 1:].flatten())[0]


def states_of(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor, earlier: EarlierSegments | None = None
) -> Tensor:
    """The last states of texts `[batch, length]`, `[batch, length, hidden]`; `earlier` is what they go on from."""
    inputs = token_ids.to(model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        states: Tensor = model.model(
            input_ids=inputs,
            position_ids=positions.to(model.device),
            # An explicit mask: without it, a gap in the positions would be taken for a packed sequence.
            attention_mask=torch.ones_like(inputs),
            use_cache=False,
            earlier=earlier,
        ).last_hidden_state
    return states


@dataclass(frozen=True)
class OtherView:
    """Other states `[num_rows, hidden]` of the same rows, whose gradients count for nothing."""

    states: Tensor
    closeness: float  # weight of how far rows are from it
    is_right_alone: bool  # if closeness counts only where this view gives more to the token that came than the rows do


def add_row_gradients(
    model: PreTrainedModel, states: Tensor, targets: Tensor, other: OtherView | None = None
) -> tuple[float, float]:
    """Add the gradients of the loss of rows `states [num_rows, hidden]`; returns it, and how far `other` is from it.

    That distance is the divergence of what the rows say from what the other view says. Both are in nats per token.
    """
    leaf, num_rows = states.detach().requires_grad_(), NUM_LOGIT_ROWS[model.device.type]
    sums = torch.zeros(2, device=model.device)
    for start in range(0, len(targets), num_rows):
        rows = slice(start, start + num_rows)
        said, labels = log_softmax(_logits(model, leaf[rows]), dim=-1), targets[rows].to(model.device)
        whole = loss = nll_loss(said, labels, reduction="sum") / len(targets)
        if other is not None:
            with torch.no_grad():
                expected = log_softmax(_logits(model, other.states[rows]), dim=-1)
            distances = kl_div(said, expected, reduction="none", log_target=True).sum(dim=-1) / len(targets)
            whole = loss + other.closeness * (distances * _where_it_counts(said, expected, labels, other)).sum()
            sums[1] += distances.detach().sum()
        whole.backward()
        sums[0] += loss.detach()
    states.backward(leaf.grad)
    return float(sums[0]), float(sums[1])


def _where_it_counts(said: Tensor, expected: Tensor, labels: Tensor, other: OtherView) -> Tensor:
    """Mark the rows, `[num_rows] bool`, that are to come closer to the other view."""
    if not other.is_right_alone:
        return torch.ones_like(labels, dtype=torch.bool)
    return nll_loss(said, labels, reduction="none") > nll_loss(expected, labels, reduction="none")


def _logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        logits: Tensor = model.lm_head(states)
    return logits.float()
