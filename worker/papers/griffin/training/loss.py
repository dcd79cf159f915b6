"""The loss of GRIFFIN's passes: tokens and features where draft and text are still aligned (4.1, appendix C.1)."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from swiftbatch.worker.papers.griffin.model import GriffinModel
from swiftbatch.worker.papers.griffin.training.feature_windows import Windows
from swiftbatch.worker.papers.griffin.training.passes import forward_passes
from swiftbatch.worker.papers.griffin.training.recipe import FEATURE_WEIGHT, GriffinRecipe
from swiftbatch.worker.target.target import TargetModel

NUM_LOGITS = 2**21  # held at once, whatever the vocabulary


def accumulate_gradients(
    model: GriffinModel, target: TargetModel, windows: Windows, recipe: GriffinRecipe
) -> tuple[list[float], list[float]]:
    """Add the gradients of all passes' losses, summed; return each pass's loss and its share of aligned rows.

    Pass n counts the rows where each of the last n - 1 tokens of the text was among the `align_top_k` best of the pass
    that would have drafted it.
    """
    with torch.autocast(target.device.type, dtype=torch.bfloat16):
        embeddings = target.model.get_input_embeddings()(windows.token_ids)
        passes = forward_passes(model, embeddings, windows, recipe.num_passes)
    aligned = torch.ones_like(windows.token_ids, dtype=torch.bool)  # [num_windows, length]
    losses, shares, roots, gradients = [], [], [], []
    for output in passes:
        counted = aligned & output.has_draft
        num_rows = counted.sum().clamp(min=1)
        tokens, gradient, ranks = token_loss(target, output.predicted, windows, counted)
        distances = (output.regressed.float() - windows.features.float()).abs().mean(dim=-1)  # [num_windows, length]
        distance = FEATURE_WEIGHT * distances[counted].sum() / num_rows
        roots += [output.predicted, distance]
        gradients += [gradient / num_rows, torch.ones_like(distance)]
        losses.append(round(float(tokens / num_rows + distance.detach()), 4))
        shares.append(round(float(counted.float().mean()), 4))
        if recipe.align_top_k is not None:
            aligned = (counted & (ranks < recipe.align_top_k)).roll(1, dims=1)  # the row that comes round has no draft
    torch.autograd.backward(roots, gradients)
    return losses, shares


def token_loss(
    target: TargetModel, predicted: torch.Tensor, windows: Windows, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross entropy against the target's own distributions, summed over the rows in `counted [num_windows, length]`.

    Returns it, its gradient for `predicted [num_windows, length, hidden]`, and the rank of the text's next token,
    `[num_windows, length]`, 0 where it is the best. The logits are never all in memory.
    """
    states, features = predicted.detach().flatten(0, 1), windows.features.flatten(0, 1)
    next_ids = windows.token_ids.roll(-1, dims=1).flatten()
    total, gradient, ranks = states.new_zeros((), dtype=torch.float32), torch.zeros_like(states), next_ids.clone()
    for rows in counted.flatten().nonzero()[:, 0].split(max(1, NUM_LOGITS // target.vocab_size)):
        state = states[rows].requires_grad_()
        logits = target.model.get_output_embeddings()(state.to(target.dtype)).float()  # [num_rows, vocab]
        loss = cross_entropy(logits, target.logits(features[rows]).softmax(dim=-1), reduction="sum")
        [gradient[rows]] = torch.autograd.grad(loss, state)
        total += loss.detach()
        ranks[rows] = (logits > logits.gather(1, next_ids[rows, None])).sum(dim=1)
    return total, gradient.view_as(predicted), ranks.view_as(counted)
