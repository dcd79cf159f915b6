"""Experts in plain torch, with the kernels' exact choice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from swiftbatch.worker.kernels.decoder_weights import ExpertWeights
from swiftbatch.worker.kernels.layer_specs import Routing, Score
from swiftbatch.worker.kernels.quantized_weights import AnyLinear
from tests.worker.kernels.plain_parts import plain_linear

Rounded = Callable[[Tensor], Tensor]


def reference_choice(
    routing: Routing, logits: Tensor, choice_bias: Tensor | None, rounded: Rounded
) -> tuple[Tensor, Tensor]:
    """Return choices and weights `[num_rows, num_chosen]` of `[num_rows, num_experts] float32` logits."""
    logits = rounded(logits) if routing.rounds_logits else logits
    scores = {
        Score.SOFTMAX: lambda: logits.double().softmax(-1).float(),
        Score.SIGMOID: lambda: logits.double().sigmoid().float(),
    }.get(routing.score, lambda: logits)()
    choices = _chosen(routing, scores if choice_bias is None else scores + choice_bias)
    weights = scores.gather(1, choices)
    if routing.score == Score.SOFTMAX_OF_CHOSEN:
        weights = weights.double().softmax(-1).float()
    if routing.score == Score.SIGMOID_OF_CHOSEN:
        weights = weights.double().sigmoid().float()
    if routing.score == Score.SPARSE_MIXER:
        weights = _mixed(routing, logits, choices)
    if routing.is_normalised:
        sums = torch.zeros(len(weights))
        for each in weights.unbind(1):
            sums = sums + each
        weights = weights / sums.clamp(min=routing.least_sum)[:, None]
    weights = weights * torch.tensor(routing.scale)
    return choices, rounded(weights) if routing.rounds_weights else weights


def _mixed(routing: Routing, logits: Tensor, choices: Tensor) -> Tensor:
    """Return each choice's share among those left and near enough."""
    left, weights = logits.clone(), []
    for choice in choices.unbind(1):
        most = logits.gather(1, choice[:, None])
        far = (most - logits) / torch.maximum(logits.abs(), most) > 2 * torch.tensor(routing.jitter)
        near = left.masked_fill(far, float("-inf")).double()
        weights.append(near.softmax(-1).gather(1, choice[:, None]).float())
        left = left.scatter(1, choice[:, None], float("-inf"))
    return torch.cat(weights, dim=1)


def _chosen(routing: Routing, scores: Tensor) -> Tensor:
    if routing.num_groups > routing.num_chosen_groups:
        groups = scores.unflatten(1, (routing.num_groups, -1))
        best = groups.topk(min(routing.num_best_of_group, groups.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, _best(best, routing.num_chosen_groups), True)
        scores = groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    return _best(scores, routing.num_chosen)


def _best(scores: Tensor, count: int) -> Tensor:
    """Ties go to the lower number."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def reference_experts(experts: ExpertWeights, rows: Tensor, activate: Callable[[Tensor], Tensor], rounded: Rounded,
                      shared: Tensor | None) -> Tensor:  # fmt: skip
    """Compute the output of `[num_rows, hidden]`."""
    logits = _product(rows, experts.router)
    choices, weights = reference_choice(experts.routing, logits, experts.choice_bias, rounded)
    read = rows if experts.latent is None else rounded(_product(rows, experts.latent[0]))
    sums = torch.zeros_like(read)
    for rank in range(choices.shape[1]):
        outputs = torch.empty_like(read)
        for expert in choices[:, rank].unique().tolist():
            chosen = choices[:, rank] == expert
            outputs[chosen] = _expert(experts, expert, read[chosen], activate, rounded)
        sums = sums + outputs * weights[:, rank, None]
    sums = sums if experts.latent is None else _product(rounded(sums), experts.latent[1])
    if shared is None:
        return rounded(sums)
    if experts.shared_gate is not None:
        share = rounded(rounded(linear(rows, experts.shared_gate)).sigmoid())
        shared = rounded(shared * share)
    return rounded(shared + rounded(sums))


def _expert(
    experts: ExpertWeights, number: int, rows: Tensor, activate: Callable[[Tensor], Tensor], rounded: Rounded
) -> Tensor:
    up = rounded(_product(rows, experts.ups[number]))
    if not experts.gates:
        return rounded(_product(rounded(activate(up)), experts.downs[number]))
    gate = rounded(_product(rows, experts.gates[number]))
    if experts.gate_limit:
        gate, up = gate.clamp(max=experts.gate_limit), up.clamp(-experts.gate_limit, experts.gate_limit)
        active = rounded(gate * (gate * experts.gate_slope).sigmoid()) * rounded(up + 1)
    else:
        active = rounded(activate(gate)) * up
    return rounded(_product(rounded(active), experts.downs[number]))


def _product(rows: Tensor, layer: AnyLinear) -> Tensor:
    found = plain_linear(layer)
    return linear(rows, found.weight.float(), None if found.bias is None else found.bias.float())
