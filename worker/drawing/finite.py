"""Logits that nothing can be drawn from: NaN anywhere, an infinity, or no token left."""

from __future__ import annotations

import math

import torch

NOT_FINITE = "logits_not_finite"  # the error code of a job that met them


class NotFiniteError(ArithmeticError):
    """The model gave logits that nothing can be drawn from. The message is one line for the user."""


def is_drawable(logits: torch.Tensor) -> bool:
    """Return whether a token can be drawn from a row `[vocab]`."""
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
