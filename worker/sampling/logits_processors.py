"""Changes of logits before the temperature, in vLLM's order: bias, masks, repetition penalty, count penalties.

Penalties are computed from whole counts in float64, so they have the same bits after a resume and on every device.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from swiftbatch.jobs.sampling_params import SamplingParams

if TYPE_CHECKING:
    from swiftbatch.worker.sampling.sequence import Sequence

MASKED = float("-inf")


class Context(NamedTuple):
    """Everything that the next token depends on, except logits and parameters."""

    bias: torch.Tensor | None = None  # [vocab] float32
    masked: tuple[int, ...] = ()  # tokens that cannot come next
    seen: torch.Tensor | None = None  # [vocab] bool, tokens in the penalty window; None without a repetition penalty
    counts: torch.Tensor | None = None  # [vocab] int32, counts in the output; None without count penalties

    @property
    def is_plain(self) -> bool:
        return not self.masked and self.bias is None and self.seen is None and self.counts is None

    def on_cpu(self) -> Context:
        bias, seen, counts = (None if part is None else part.cpu() for part in (self.bias, self.seen, self.counts))
        return Context(bias, self.masked, seen, counts)


def adjusted(logits: torch.Tensor, params: SamplingParams, context: Context) -> torch.Tensor:
    """Return logits `[..., vocab] float32` adjusted to this context. If nothing changes, return the same tensor."""
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


def only_allowed(scores: torch.Tensor, words: np.ndarray) -> torch.Tensor:
    """Mask all tokens of `scores [vocab]` outside a mask, `[num_mask_words] uint32`, lowest bit first."""
    bits = np.unpackbits(words.view(np.uint8), count=len(scores), bitorder="little")
    return scores.masked_fill(torch.from_numpy(bits == 0).to(scores.device), MASKED)


def penalise(scores: torch.Tensor, seen: torch.Tensor, theta: float) -> torch.Tensor:
    """Divide positive logits of seen tokens by theta, and multiply negative ones (Keskar et al. 2019)."""
    return torch.where(seen, torch.where(scores < 0, scores * theta, scores / theta), scores)


def hold_back(scores: torch.Tensor, counts: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Subtract frequency and presence penalties."""
    frequency, presence = output_penalties(params)
    taken = (counts.double() * frequency + presence).float()
    return torch.where(counts > 0, scores - taken, scores)


def output_penalties(params: SamplingParams) -> tuple[float, float]:
    """Return both penalties, rounded to float32."""
    return float(np.float32(params.frequency_penalty)), float(np.float32(params.presence_penalty))


def counts_output(params: SamplingParams) -> bool:
    return params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def adjusts(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.bad_words) or params.min_tokens > 0 or counts_output(params)


def output_counts(sequence: Sequence, vocab_size: int, device: torch.device | str) -> torch.Tensor | None:
    """Return counts `[vocab] int32`, or None without count penalties."""
    if not counts_output(sequence.sampling):
        return None
    counts = np.bincount(sequence.output_ids, minlength=vocab_size).astype(np.int32)
    return torch.from_numpy(counts).to(device)


def has_bias(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.bad_words)


def bias_pairs(sequence: Sequence) -> tuple[tuple[int, float], ...]:
    """Return tokens with their bias. A bad word of a single token has the bias `MASKED`."""
    never = tuple((word[0], MASKED) for word in sequence.bad_word_ids if len(word) == 1)
    return sequence.sampling.logit_bias + never


def bias_row(sequence: Sequence, device: torch.device | str) -> torch.Tensor | None:
    """Return the bias `[vocab] float32`, or None if there is none.

    Raises ValueError for a token outside the vocabulary.
    """
    if not has_bias(sequence.sampling):
        return None
    row = torch.zeros(sequence.vocab_size)
    for token_id, bias in bias_pairs(sequence):
        if token_id >= sequence.vocab_size:
            raise ValueError(f"logit_bias: found token {token_id}, the model's are 0 to {sequence.vocab_size - 1}")
        row[token_id] += bias
    return row.to(device)


def ending_tokens(sequence: Sequence) -> tuple[int, ...]:
    if not sequence.sampling.min_tokens:
        return ()
    token_ids = sequence.eos_token_ids.union(sequence.sampling.stop_token_ids)
    return tuple(sorted(token_id for token_id in token_ids if token_id < sequence.vocab_size))


def long_words(sequence: Sequence) -> list[tuple[int, ...]]:
    """Return bad words of several tokens. The last token of such a word is masked after the others."""
    return [word for word in sequence.bad_word_ids if len(word) > 1]


def masked_tokens(sequence: Sequence, num_output: int, recent: list[int]) -> tuple[int, ...]:
    """Return the tokens masked after `num_output` output tokens, the last of which are `recent`."""
    masked = ending_tokens(sequence) if num_output < sequence.sampling.min_tokens else ()
    if not sequence.bad_word_ids:
        return masked
    words = long_words(sequence)
    return masked + tuple(word[-1] for word in words if tuple(recent[1 - len(word) :]) == word[:-1])


def num_recent_tokens(sequence: Sequence) -> int:
    """Return how many of the last output tokens determine the masked tokens."""
    return max((len(word) - 1 for word in sequence.bad_word_ids), default=0)


def masked_behind(sequence: Sequence, drafted: list[int] | None = None) -> tuple[int, ...]:
    """Return the tokens masked after a sequence and drafted tokens."""
    if not (sequence.bad_word_ids or sequence.sampling.min_tokens):
        return ()  # the usual case, called for every row
    drafted = drafted or []
    num_output, num_recent = sequence.num_generated_tokens + len(drafted), num_recent_tokens(sequence)
    recent = [*sequence.output_ids[-num_recent:].tolist(), *drafted] if num_recent else []
    return masked_tokens(sequence, num_output, recent)


class PenaltyWindow:
    """Tokens among a sequence's last W (TokenSwift, equation 3), updated in constant time per token."""

    def __init__(self, sequence: Sequence, vocab_size: int, device: torch.device | str) -> None:
        recent = sequence.token_ids[-sequence.sampling.penalty_window :].tolist()
        self._recent = deque(recent)
        self._window = sequence.sampling.penalty_window
        self._counts: dict[int, int] = {}
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # [vocab]
        for token_id in recent:
            self._count(token_id, 1)

    def fork(self) -> PenaltyWindow:
        fork = copy.copy(self)
        fork._recent, fork._counts, fork.seen = self._recent.copy(), self._counts.copy(), self.seen.clone()
        return fork

    def push(self, token_id: int) -> None:
        self._recent.append(token_id)
        self._count(token_id, 1)
        if len(self._recent) > self._window:
            self._count(self._recent.popleft(), -1)

    def _count(self, token_id: int, change: int) -> None:
        self._counts[token_id] = self._counts.get(token_id, 0) + change
        self.seen[token_id] = self._counts[token_id] > 0
