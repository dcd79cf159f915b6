"""Coupled sampling: x_t = argmax_v(processed_logit_t[v] / T + G(seed, t, v)), the same token whenever it is drawn.

Processors and their order are those of `transformers`: what comes in front of the temperature (adjustments.py), the
temperature, top-k, top-p, min-p, eta; all in float32. Each works on one row, `[vocab] float32`, so that a row's
neighbours cannot change it.
"""

from __future__ import annotations

import copy
import math

import torch

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.drawing.adjustments import (
    MASKED,
    Context,
    PenaltyWindow,
    adjusted,
    bias_row,
    masked_tokens,
    num_recent_tokens,
    output_counts,
)
from swiftbatch.worker.drawing.noise import GumbelNoise
from swiftbatch.worker.drawing.sequence import Sequence

SUM_UNITS = 2.0**60  # units of a running sum: 1 + its rounding stays below 2^63


def keep_top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Mask all but the `top_k` highest scores, and their ties."""
    smallest = torch.topk(scores, min(top_k, len(scores))).values[-1]
    return scores.masked_fill(scores < smallest, MASKED)


def keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches `top_p` (Holtzman et al. 2020)."""
    ascending, order = torch.sort(scores, stable=True)
    removed = running_sum(torch.softmax(ascending, dim=-1)) <= 1.0 - top_p
    removed[-1] = False
    return scores.masked_fill(torch.zeros_like(removed).scatter(0, order, removed), MASKED)


def running_sum(probabilities: torch.Tensor) -> torch.Tensor:
    """Sums of the first i + 1 of some probabilities `[n] float32`."""
    if probabilities.device.type == "cpu":
        return probabilities.cumsum(dim=-1)  # one after the other
    return running_sum_in_any_order(probabilities)


def running_sum_in_any_order(probabilities: torch.Tensor) -> torch.Tensor:
    """Running sums over whole numbers, where no order of summation changes a bit: GPUs choose theirs as they run."""
    units = (probabilities.double() * SUM_UNITS).long()
    return (units.cumsum(dim=-1).double() / SUM_UNITS).float()


def keep_min_p(scores: torch.Tensor, min_p: float) -> torch.Tensor:
    """Mask tokens less probable than `min_p` times the most probable one (Nguyen et al. 2024)."""
    return scores.masked_fill(scores < scores.max() + math.log(min_p), MASKED)


def keep_eta(scores: torch.Tensor, eta: float) -> torch.Tensor:
    """Mask tokens below min(eta, sqrt(eta) * exp(-entropy)) (Hewitt et al. 2022); the best one stays."""
    probabilities = torch.softmax(scores, dim=-1)
    entropy = torch.special.entr(probabilities).sum()
    removed = probabilities < torch.clamp(math.sqrt(eta) * torch.exp(-entropy), max=eta)
    removed[torch.argmax(scores)] = False
    return scores.masked_fill(removed, MASKED)


def _tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits over temperature; where that leaves float32, their distances from the best one, which draw the same."""
    scores = logits / temperature
    if temperature < 1.0 and math.isinf(float(scores.max())):
        return (logits - logits.max()) / temperature
    return scores


def process(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Apply everything from the temperature on to one row; only for temperature > 0."""
    scores = _tempered(logits, params.temperature)
    if params.top_k:
        scores = keep_top_k(scores, params.top_k)
    if params.top_p < 1.0:
        scores = keep_top_p(scores, params.top_p)
    if params.min_p > 0.0:
        scores = keep_min_p(scores, params.min_p)
    if params.eta > 0.0:
        scores = keep_eta(scores, params.eta)
    return scores


def draw(logits: torch.Tensor, position: int, params: SamplingParams, noise: GumbelNoise) -> int:
    """Draw the token at `position` from penalised logits `[vocab] float32`."""
    if params.temperature == 0.0:
        return int(torch.argmax(logits))
    return int(torch.argmax(process(logits, params) + noise.row(position)))


class TokenSampler:
    """Draws one sequence's tokens in order. Each `draw` counts as committed: the next one sees it in its history."""

    def __init__(self, sequence: Sequence, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._sequence = sequence
        self._params = sequence.sampling
        self._noise = sequence.noise
        self.position = len(sequence)  # of the next token
        penalised = self._params.repetition_penalty != 1.0
        self._window = PenaltyWindow(sequence, vocab_size, device) if penalised else None
        self._counts = output_counts(sequence, vocab_size, device)
        self._bias = bias_row(sequence, device)
        self._num_recent = num_recent_tokens(sequence)
        self._recent: list[int] = sequence.output_ids[-self._num_recent :].tolist() if self._num_recent else []

    def fork(self) -> TokenSampler:
        """A sampler of its own that goes on from here, for a draft."""
        fork = copy.copy(self)
        fork._window = self._window.fork() if self._window is not None else None
        fork._counts = self._counts.clone() if self._counts is not None else None
        return fork

    def draw(self, logits: torch.Tensor) -> int:
        """Draw the token at the next position from the target's logits there, `[vocab] float32`."""
        token_id = draw(self.penalised(logits), self.position, self._params, self._noise)
        self.push(token_id)
        return token_id

    def push(self, token_id: int) -> None:
        """Take in a token at the next position that was drawn elsewhere."""
        self.position += 1
        if self._window is not None:
            self._window.push(token_id)
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._num_recent:
            self._recent = [*self._recent, token_id][-self._num_recent :]

    def penalised(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[..., vocab]` as the tokens so far and the parameters change them, in front of the temperature."""
        return adjusted(logits, self._params, self.context())

    def context(self) -> Context:
        """All that the next token depends on beside its logits; its tensors change with the next token."""
        seen = None if self._window is None else self._window.seen
        num_output = self.position - self._sequence.num_prompt_tokens
        return Context(self._bias, masked_tokens(self._sequence, num_output, self._recent), seen, self._counts)
