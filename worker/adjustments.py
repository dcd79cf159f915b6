"""What logits become in front of the temperature, in this order: bias, masks, repetition penalty, penalties by counts.

The order is vLLM's. Counts are whole numbers: what they take off a logit is computed anew at every position, so that a
resumed sequence has the same bits, and in float64, where a count's product is exact, so that every device rounds alike.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from jobs.sampling import SamplingParams

if TYPE_CHECKING:
    from worker.sequence import Sequence

MASKED = float("-inf")


class Context(NamedTuple):
    """What the next token of a sequence depends on beside its logits and its parameters."""

    bias: torch.Tensor | None = None  # [vocab] float32; None: there is none
    masked: tuple[int, ...] = ()  # tokens that can't come next
    seen: torch.Tensor | None = None  # [vocab] bool, whether each lies in the penalty window; None: no such penalty
    counts: torch.Tensor | None = None  # [vocab] int32, how often each lies in the output; None: no such penalties

    @property
    def is_plain(self) -> bool:
        """Whether nothing changes the logits."""
        return not self.masked and self.bias is None and self.seen is None and self.counts is None

    def on_cpu(self) -> Context:
        """The same with tensors on the CPU."""
        bias, seen, counts = (None if part is None else part.cpu() for part in (self.bias, self.seen, self.counts))
        return Context(bias, self.masked, seen, counts)


def adjusted(logits: torch.Tensor, params: SamplingParams, context: Context) -> torch.Tensor:
    """Logits `[..., vocab] float32` in this context; the same tensor where nothing changes them."""
    scores = logits
    if context.bias is not None:
        scores = scores + context.bias
    if context.masked:
        scores = scores.index_fill(-1, torch.tensor(context.masked, device=scores.device), MASKED)
    if context.seen is not None:
        scores = penalise(scores, context.seen, params.repetition_penalty)
    if context.counts is not None:
        scores = hold_back(scores, context.counts, params)
    return scores


def penalise(scores: torch.Tensor, seen: torch.Tensor, theta: float) -> torch.Tensor:
    """Divide positive, multiply negative logits of the tokens in `seen [vocab] bool` by theta (Keskar et al. 2019)."""
    return torch.where(seen, torch.where(scores < 0, scores * theta, scores / theta), scores)


def hold_back(scores: torch.Tensor, counts: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Take off what frequency and presence penalty say of the tokens that `counts [vocab]` has."""
    frequency, presence = output_penalties(params)
    taken = (counts.double() * frequency + presence).float()
    return torch.where(counts > 0, scores - taken, scores)


def output_penalties(params: SamplingParams) -> tuple[float, float]:
    """Frequency and presence penalty as float32 has them."""
    return float(np.float32(params.frequency_penalty)), float(np.float32(params.presence_penalty))


def counts_output(params: SamplingParams) -> bool:
    """Whether a penalty looks at the output's counts."""
    return params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def adjusts(params: SamplingParams) -> bool:
    """Whether anything but the repetition penalty changes logits in front of the temperature."""
    return bool(params.logit_bias) or params.min_tokens > 0 or counts_output(params)


def output_counts(sequence: Sequence, vocab_size: int, device: torch.device | str) -> torch.Tensor | None:
    """How often each token lies in the output, `[vocab] int32`; None where no penalty asks."""
    if not counts_output(sequence.sampling):
        return None
    counts = np.bincount(sequence.output_ids, minlength=vocab_size).astype(np.int32)
    return torch.from_numpy(counts).to(device)


def bias_row(params: SamplingParams, vocab_size: int, device: torch.device | str) -> torch.Tensor | None:
    """What `logit_bias` adds, `[vocab] float32`. Raises ValueError for a token that the model does not have."""
    if not params.logit_bias:
        return None
    token_ids, bias = zip(*params.logit_bias, strict=True)
    if token_ids[-1] >= vocab_size:
        raise ValueError(f"logit_bias: found token {token_ids[-1]}, expected one below {vocab_size}")
    row = torch.zeros(vocab_size)
    row[list(token_ids)] = torch.tensor(bias)
    return row.to(device)


def ending_tokens(sequence: Sequence) -> tuple[int, ...]:
    """Those that are masked up to `min_tokens`, ascending; () where nothing is."""
    if not sequence.sampling.min_tokens:
        return ()
    token_ids = sequence.eos_token_ids.union(sequence.sampling.stop_token_ids)
    return tuple(sorted(token_id for token_id in token_ids if token_id < sequence.vocab_size))


def masked_tokens(sequence: Sequence, position: int) -> tuple[int, ...]:
    """The tokens that can't come at `position`."""
    num_output = position - sequence.num_prompt_tokens
    return ending_tokens(sequence) if num_output < sequence.sampling.min_tokens else ()


class PenaltyWindow:
    """Which tokens occur among the last W of a sequence (TokenSwift, equation 3), kept in constant time per token."""

    def __init__(self, sequence: Sequence, vocab_size: int, device: torch.device | str) -> None:
        recent = sequence.token_ids[-sequence.sampling.penalty_window :].tolist()
        self._recent = deque(recent)
        self._window = sequence.sampling.penalty_window
        self._counts: dict[int, int] = {}
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # [vocab]
        for token_id in recent:
            self._count(token_id, 1)

    def fork(self) -> PenaltyWindow:
        """A window of its own that goes on from here."""
        fork = copy.copy(self)
        fork._recent, fork._counts, fork.seen = self._recent.copy(), self._counts.copy(), self.seen.clone()
        return fork

    def push(self, token_id: int) -> None:
        """Take in the next token; the one that leaves the window is forgotten."""
        self._recent.append(token_id)
        self._count(token_id, 1)
        if len(self._recent) > self._window:
            self._count(self._recent.popleft(), -1)

    def _count(self, token_id: int, change: int) -> None:
        self._counts[token_id] = self._counts.get(token_id, 0) + change
        self.seen[token_id] = self._counts[token_id] > 0
