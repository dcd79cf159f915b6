"""Logits that nothing can be drawn from: NaN anywhere, an infinity, or no token left."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from worker.model.files import ModelError
from worker.target.tiles import tree_rows
from worker.tree import DraftTree

if TYPE_CHECKING:
    from worker.target.target import TargetModel

NOT_FINITE = "logits_not_finite"  # the error code of a job that met them
NUM_PROBED_TOKENS = 16


class NotFiniteError(ArithmeticError):
    """The model gave logits that nothing can be drawn from. The message is one line for the user."""


def is_drawable(logits: torch.Tensor) -> bool:
    """Whether a token can be drawn from a row `[vocab]`."""
    return math.isfinite(float(logits.max()))  # NaN where there is any


def check_finite(logits: torch.Tensor, position: int) -> None:
    """Raise NotFiniteError for a row `[vocab]` with NaN or +inf, or of -inf alone; some -inf only mask their tokens."""
    if is_drawable(logits):
        return
    peak = float(logits.max())
    found = "NaN" if math.isnan(peak) else f"{peak:+} at the most"
    raise NotFiniteError(
        f"the model's logits for position {position} are not finite ({found}): its weights are damaged, or its numbers "
        "outgrow the dtype"
    )


def check_loss(step: int, loss: float) -> None:
    """Raise ModelError for a step of a training whose loss is no number: its weights would be none either."""
    if not math.isfinite(loss):
        raise ModelError(
            f"the loss of training step {step} is {loss}, expected a number: the model's logits are not finite behind "
            "some tokens of the texts; its weights are damaged, or outgrow the dtype"
        )


def check_model(target: TargetModel) -> None:
    """Raise ModelError where logits are not finite behind any of some single tokens: then no job can run."""
    step = max(1, target.vocab_size // NUM_PROBED_TOKENS)
    token_ids = range(0, target.vocab_size, step)
    cache = target.new_cache(1)  # as jobs have theirs: a GPU's rows lie in the slots of its arena
    for token_id in token_ids:
        [outputs] = target.verify([tree_rows(cache, token_id, DraftTree())])
        if math.isfinite(float(outputs.logits[0].max())):
            return
    raise ModelError(
        f"model {target.files.name}: its logits are not finite, whichever token they follow; its weights are damaged, "
        "or outgrow the dtype"
    )
