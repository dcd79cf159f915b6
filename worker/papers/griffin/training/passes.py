"""Passes of GRIFFIN's draft model over a window: each row as the n-th forward of a draft, for n = 1, 2, ... (4.1).

Pass n reads, in place of the target's features, what pass n - 1 regressed one row before; and it attends to what a
draft of that depth finds in the cache: keys of pass 1 for committed rows, then one of each later pass. The loss is
taken of tokens and features where draft and text are still aligned (4.1, appendix C.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface

from swiftbatch.worker.papers.griffin.model import GriffinModel
from swiftbatch.worker.papers.griffin.training.feature_texts import Windows
from swiftbatch.worker.papers.griffin.training.recipe import FEATURE_WEIGHT, GriffinRecipe
from swiftbatch.worker.target.target import TargetModel

PASSES_ATTENTION = "swiftbatch_griffin_passes"
NUM_LOGITS = 2**21  # held at once, whatever the vocabulary


@dataclass(frozen=True)
class Pass:
    predicted: torch.Tensor  # [num_windows, length, hidden], for the language model head
    regressed: torch.Tensor  # [num_windows, length, hidden], in place of the target's features at these rows
    has_draft: torch.Tensor  # [num_windows, length] bool: the rows in front that such a draft needs are there


@dataclass
class PassKeys:
    """Keys and values `[num_windows, num_kv_heads, length, head_dim]` of each pass so far."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


def forward_passes(model: GriffinModel, embeddings: torch.Tensor, windows: Windows, num_passes: int) -> list[Pass]:
    """Run the passes 1 to `num_passes`; `embeddings [num_windows, length, hidden]` of the windows' tokens.

    A row whose draft would begin in front of the window, or of a gap in the text, has no draft: what it says means
    nothing, and no row that has one depends on it.
    """
    model.set_attention(PASSES_ATTENTION)
    entries, passes = windows.entries(), PassKeys()
    inputs, outputs = windows.inputs.to(embeddings.dtype), list[Pass]()
    for number in range(1, num_passes + 1):
        predicted, regressed = model(inputs, embeddings, entries, passes=passes)
        outputs.append(Pass(predicted, regressed, windows.num_before >= number - 1))
        inputs = regressed.roll(1, dims=1)  # the row that comes round has no draft
    return outputs


def attend_to_passes(
    module: torch.nn.Module,
    query: torch.Tensor,  # [num_windows, num_heads, length, head_dim]
    key: torch.Tensor,  # [num_windows, num_kv_heads, length, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    passes: PassKeys,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Row p of pass n sees pass 1 up to row p - n + 1, and pass s at row p - n + s for s = 2 to n.

    Returns `[num_windows, length, num_heads, head_dim]`.
    """
    passes.keys.append(key)
    passes.values.append(value)
    number, length = len(passes.keys), key.shape[2]
    grouped = query.unflatten(1, (key.shape[1], -1))  # [num_windows, num_kv_heads, group, length, head_dim]
    scores = [_hidden_behind(grouped @ passes.keys[0][:, :, None].mT, number)]
    scores += [(grouped * _moved(keys, number - s)).sum(-1, keepdim=True) for s, keys in _later(passes.keys)]
    weights = (torch.cat(scores, dim=-1).float() * scaling).softmax(dim=-1).to(value.dtype)
    output = weights[..., :length] @ passes.values[0][:, :, None]
    for s, values in _later(passes.values):
        output = output + weights[..., length + s - 2, None] * _moved(values, number - s)
    return output.flatten(1, 2).transpose(1, 2), None


def _hidden_behind(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Hide from each row of pass `number` the rows of pass 1 that its draft has not got: `[..., length, length]`."""
    length = scores.shape[-1]
    seen = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril(1 - number)
    return scores.masked_fill(~seen, float("-inf"))


def _later(tensors: list[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """The passes behind the first, with their numbers."""
    return list(enumerate(tensors[1:], start=2))


def _moved(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Bring row p - `num_rows` to row p: `[num_windows, num_kv_heads, 1, length, head_dim]`."""
    return tensor.roll(num_rows, dims=2)[:, :, None]


AttentionInterface.register(PASSES_ATTENTION, attend_to_passes)


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
