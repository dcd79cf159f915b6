"""Log-probabilities of a sequence's tokens: the room for them, and how they are computed where no kernels are.

A row's are those of this row alone: they follow from its logits and the tokens before it, whatever else was computed
beside it. Sums are in float64; the results are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch

from swiftbatch.jobs.logprobs import NO_TOKEN, TokenLogprobs


class KeptLogprobs:
    """The log-probabilities of one output so far. They never change, so parts of them may be read at any time."""

    def __init__(self, max_tokens: int, num_top: int) -> None:
        self._room = TokenLogprobs.empty(max_tokens, num_top)
        self._length = 0

    @property
    def num_top(self) -> int:
        """The number of likeliest tokens that are kept at each place."""
        return self._room.num_top

    @property
    def all(self) -> TokenLogprobs:
        """A view of all that are kept."""
        return self._room.part(0, self._length)

    def extend(self, more: TokenLogprobs) -> None:
        """Append the log-probabilities of committed tokens."""
        room = self._room.part(self._length, self._length + len(more))
        room.logprobs[:], room.top_ids[:], room.top_logprobs[:] = more.logprobs, more.top_ids, more.top_logprobs
        self._length += len(more)

    def first(self, num_tokens: int) -> KeptLogprobs:
        """The log-probabilities of the first tokens, with room of their own."""
        kept = KeptLogprobs(len(self._room), self.num_top)
        kept.extend(self._room.part(0, num_tokens))
        return kept


def path_logprobs(
    rows: torch.Tensor,
    path: Many[int],
    drawn: Many[int],
    num_top: int,
    scores: Callable[[torch.Tensor, int], torch.Tensor],
) -> TokenLogprobs:
    """The log-probabilities of the tokens `drawn` along a path down a tree, from `rows [num_rows, vocab]`, root first.

    `scores` takes a row and the token drawn from it, and returns the scores to take log-probabilities of. It is called
    in order.
    """
    found = TokenLogprobs.empty(len(drawn), num_top)
    for i, (node, token_id) in enumerate(zip([-1, *path], drawn, strict=False)):
        found.logprobs[i], found.top_ids[i], found.top_logprobs[i] = row_logprobs(
            scores(rows[node + 1], token_id), token_id, num_top
        )
    return found


def row_logprobs(scores: torch.Tensor, token_id: int, num_top: int) -> tuple[float, np.ndarray, np.ndarray]:
    """The log-probability of a token by scores `[vocab]`, and ids and log-probabilities of the likeliest `[num_top]`.

    Of equals the one with the lower id comes first. Where fewer tokens can come, the others are NO_TOKEN.
    """
    logprobs = torch.log_softmax(scores.double(), dim=-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    ids, top = np.full(num_top, NO_TOKEN, np.int32), np.full(num_top, -np.inf, np.float32)
    if num_top:
        best = torch.sort(scores, descending=True, stable=True).indices[:num_top]
        values = logprobs[best].float().cpu().numpy()
        count = int(np.isfinite(values).sum())
        ids[:count], top[:count] = best[:count].cpu().numpy(), values[:count]
    return float(logprobs[token_id].float()), ids, top
