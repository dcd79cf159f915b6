"""Log-probabilities of drawn tokens, as a job has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probabilities of consecutive tokens. A token that can't come has -inf."""

    logprobs: NDArray[np.float32]  # [num_tokens], of the drawn tokens
    top_ids: NDArray[np.int32]  # [num_tokens, num_top], the likeliest first; NO_TOKEN where no more could come
    top_logprobs: NDArray[np.float32]  # [num_tokens, num_top]

    @classmethod
    def empty(cls, num_tokens: int, num_top: int) -> TokenLogprobs:
        """Make room for the log-probabilities of `num_tokens` tokens, without values yet."""
        ids, values = np.empty((num_tokens, num_top), np.int32), np.empty((num_tokens, num_top), np.float32)
        return cls(np.empty(num_tokens, np.float32), ids, values)

    @classmethod
    def joined(cls, parts: Iterable[TokenLogprobs], num_top: int) -> TokenLogprobs:
        """Parts that follow each other, as one."""
        all_parts = [cls.empty(0, num_top), *parts]
        return cls(
            np.concatenate([part.logprobs for part in all_parts]),
            np.concatenate([part.top_ids for part in all_parts]),
            np.concatenate([part.top_logprobs for part in all_parts]),
        )

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def num_top(self) -> int:
        return int(self.top_ids.shape[1])

    def part(self, start: int, end: int) -> TokenLogprobs:
        """A view of the log-probabilities of the tokens from `start` up to `end`."""
        return TokenLogprobs(self.logprobs[start:end], self.top_ids[start:end], self.top_logprobs[start:end])
