"""Coupled sampling: x_t = argmax_v(processed_logit_t[v] / T + G(key, t, v)), the same token in every batch.

Order and definitions are those of `transformers`, in float32, one row at a time.
"""

from __future__ import annotations

import copy
import math

import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.filters import filtered
from swiftbatch.worker.sampling.logits_processors import (
    Context,
    PenaltyWindow,
    adjusted,
    bias_row,
    masked_tokens,
    num_recent_tokens,
    output_counts,
)
from swiftbatch.worker.sampling.noise import GumbelNoise
from swiftbatch.worker.sampling.sequence import Sequence

NOT_FINITE = "logits_not_finite"  # an error code


class NotFiniteError(ArithmeticError):
    """Logits from which nothing can be drawn. The message is one line for the user."""


def is_drawable(logits: torch.Tensor) -> bool:
    return math.isfinite(float(logits.max()))  # max is NaN if the row has a NaN


def check_finite(logits: torch.Tensor, position: int) -> None:
    """Raise NotFiniteError for a row `[vocab]` with NaN or +inf, or of -inf alone; some -inf mask tokens."""
    if is_drawable(logits):
        return
    peak = float(logits.max())
    found = "NaN" if math.isnan(peak) else f"{peak:+} at the most"
    raise NotFiniteError(
        f"the model's logits for position {position} are not finite ({found}): its weights are damaged, or its numbers "
        "outgrow the dtype"
    )


def _tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide by the temperature; on overflow, first subtract the best logit, which draws the same token."""
    scores = logits / temperature
    if temperature < 1.0 and math.isinf(float(scores.max())):
        return (logits - logits.max()) / temperature
    return scores


def process(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return filtered(_tempered(logits, params.temperature), params)


def scores(logits: torch.Tensor, position: int, params: SamplingParams, noise: GumbelNoise) -> torch.Tensor:
    """Return the scores `[vocab]` of penalised logits `[vocab] float32`; the token with the greatest is drawn."""
    return logits if params.temperature == 0.0 else process(logits, params) + noise.row(position)


def draw(logits: torch.Tensor, position: int, params: SamplingParams, noise: GumbelNoise) -> int:
    """Draw a token from penalised logits `[vocab] float32`."""
    return int(torch.argmax(scores(logits, position, params, noise)))


class TokenSampler:
    """Samples one sequence's tokens in order; each `draw` counts as committed."""

    def __init__(self, sequence: Sequence, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._sequence = sequence
        self._params = sequence.sampling
        self._noise = sequence.noise
        self.position = len(sequence)  # position of the next token
        penalised = self._params.repetition_penalty != 1.0
        self._window = PenaltyWindow(sequence, vocab_size, device) if penalised else None
        self._counts = output_counts(sequence, vocab_size, device)
        self._bias = bias_row(sequence, device)
        self._num_recent = num_recent_tokens(sequence)
        self._recent: list[int] = sequence.output_ids[-self._num_recent :].tolist() if self._num_recent else []

    def fork(self) -> TokenSampler:
        fork = copy.copy(self)
        fork._window = self._window.fork() if self._window is not None else None
        fork._counts = self._counts.clone() if self._counts is not None else None
        return fork

    def draw(self, logits: torch.Tensor) -> int:
        """Draw the next token from the target's logits `[vocab] float32`."""
        token_id = draw(self.penalised(logits), self.position, self._params, self._noise)
        self.push(token_id)
        return token_id

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token's scores `[vocab]` from the target's logits `[vocab]`."""
        return scores(self.penalised(logits), self.position, self._params, self._noise)

    def push(self, token_id: int) -> None:
        """Append a token that was drawn elsewhere."""
        self.position += 1
        if self._window is not None:
            self._window.push(token_id)
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._num_recent:
            self._recent = [*self._recent, token_id][-self._num_recent :]

    def penalised(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits `[..., vocab]` before the temperature."""
        return adjusted(logits, self._params, self.context())

    def context(self) -> Context:
        """Return a context whose tensors change with the next token."""
        seen = None if self._window is None else self._window.seen
        num_output = self.position - self._sequence.num_prompt_tokens
        return Context(self._bias, masked_tokens(self._sequence, num_output, self._recent), seen, self._counts)
