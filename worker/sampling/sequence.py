"""Generation in progress: its tokens, log-probabilities, parameters and noise."""

from __future__ import annotations

import copy
from typing import Protocol

import numpy as np
import torch

from swiftbatch.jobs.checkpoints.token_log import Rewind
from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.noise import GumbelNoise, noise_key
from swiftbatch.worker.sampling.token_masks import Constraint


class Rule(Protocol):
    """Restriction of a job's output, immutable and shared by sequences."""

    def start(self, sequence: Sequence) -> Constraint:
        """Return the constraint's state before the first output token. The rule may read the sequence's prompt."""


class KeptLogprobs:
    """Log-probabilities of an output so far; stored values never change, so other threads may read them."""

    def __init__(self, max_tokens: int, num_top: int) -> None:
        self._room = TokenLogprobs.empty(max_tokens, num_top)
        self._length = 0

    @property
    def num_top(self) -> int:
        return self._room.num_top

    @property
    def all(self) -> TokenLogprobs:
        return self._room.part(0, self._length)

    def extend(self, more: TokenLogprobs) -> None:
        start, numbers = self._length, more.numbers
        self._length = start + len(numbers)
        self._room.numbers[start : self._length] = numbers

    def first(self, num_tokens: int) -> KeptLogprobs:
        """Return a copy of the first `num_tokens` entries, which can grow."""
        kept = KeptLogprobs(len(self._room), self.num_top)
        kept.extend(self._room.part(0, num_tokens))
        return kept


class Sequence:
    """Prompt and committed tokens of one job in one buffer; position 0 is the prompt's first."""

    def __init__(
        self,
        sequence_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        vocab_size: int,
        device: torch.device | str = "cpu",
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
        rules: tuple[Rule, ...] = (),
    ) -> None:
        """Take `bad_word_ids` and `rules` from a `TextCodec`."""
        if bool(bad_word_ids) != bool(sampling.bad_words):
            raise ValueError(f"sequence {sequence_id}: bad words {sampling.bad_words} are {bad_word_ids} as tokens")
        if sampling.structured_outputs is not None and not rules:
            raise ValueError(f"sequence {sequence_id}: nothing knows what its structured output may be")
        if not prompt_ids:
            raise ValueError(f"sequence {sequence_id}: the prompt has no tokens; expected at least one")
        self.sequence_id = sequence_id
        self.sampling = sampling
        self.num_prompt_tokens = len(prompt_ids)
        self.max_length = self.num_prompt_tokens + sampling.max_tokens
        self.vocab_size = vocab_size
        self.eos_token_ids: frozenset[int] = frozenset()  # set by the engine
        self.bad_word_ids, self.rules = bad_word_ids, rules
        self.lora: str | None = None  # the name of its adapter
        self.spellings: list[np.ndarray] = []  # words of the prompt that drafts may spell anew, as tokens
        self.finish_reason: str | None = None
        self.error: str | None = None  # message, if the finish reason is an error
        self.error_code: str | None = None
        self._buffer = np.empty(self.max_length, dtype=np.int64)
        self._length = 0
        self.logprobs = None if sampling.logprobs is None else KeptLogprobs(sampling.max_tokens, sampling.logprobs)
        self.extend(prompt_ids)
        self._device = device
        self.set_rewinds(())

    def __len__(self) -> int:
        return self._length

    @property
    def token_ids(self) -> np.ndarray:
        """Return a view `[length] int64`."""
        return self._buffer[: self._length]

    @property
    def last_token_id(self) -> int:
        token_id: int = self._buffer.item(self._length - 1)
        return token_id

    @property
    def last_token_ids(self) -> tuple[int, int]:
        """Return the last two tokens. If there is only one, return it twice."""
        last = self._length - 1
        return self._buffer.item(last - 1 if last else 0), self._buffer.item(last)

    def token_id(self, position: int) -> int:
        token_id: int = self._buffer.item(position)
        return token_id

    def ahead(self, num_tokens: int) -> np.ndarray:
        """Return a view `[num_tokens] int64` of the next tokens; `extend` commits them."""
        return self._buffer[self._length : self._length + num_tokens]

    @property
    def output_ids(self) -> np.ndarray:
        """Return a view `[num_generated] int64`."""
        return self._buffer[self.num_prompt_tokens : self._length]

    @property
    def kept_logprobs(self) -> TokenLogprobs | None:
        """Return a view of the stored log-probabilities, or None if they are not requested."""
        return None if self.logprobs is None else self.logprobs.all

    @property
    def num_generated_tokens(self) -> int:
        return self._length - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        return self.max_length - self._length

    def fork(self) -> Sequence:
        """Return a copy for drafting that shares the buffer, so later commits overwrite drafted tokens."""
        return copy.copy(self)

    def set_rewinds(self, rewinds: tuple[Rewind, ...]) -> None:
        """Set the rewinds, which change later noise; call it before an engine has the sequence."""
        self.rewinds = rewinds
        self.noise_key = noise_key(self.sampling.seed or 0, self._buffer[: self.num_prompt_tokens], len(rewinds))
        self.noise = GumbelNoise(self.noise_key, self.vocab_size, self._device)

    def with_output(self, output_ids: list[int]) -> Sequence:
        """Return an independent sequence with another output, without log-probabilities."""
        again = copy.copy(self)
        again._buffer, again._length = self._buffer.copy(), self.num_prompt_tokens
        again.finish_reason = None
        again.extend(output_ids)
        return again

    def rewound(self, num_tokens: int) -> Sequence:
        """Return an independent sequence with the first `num_tokens` of the output, which continues with other
        noise.
        """
        again = copy.copy(self)
        again._buffer = self._buffer.copy()
        again.logprobs = None if self.logprobs is None else self.logprobs.first(num_tokens)
        again._length = self.num_prompt_tokens + num_tokens
        again.finish_reason = None
        again.set_rewinds((*self.rewinds, Rewind(self.num_generated_tokens, num_tokens)))
        return again

    def extend(self, token_ids: list[int] | np.ndarray) -> None:
        end = self._length + len(token_ids)
        if len(token_ids) == 1:
            self._buffer[self._length] = token_ids[0]  # the usual case; an index is three times as fast as a slice
        else:
            self._buffer[self._length : end] = token_ids
        self._length = end
