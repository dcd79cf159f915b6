"""Log-probabilities of tokens: their storage, and their computation in torch, in float64."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch

from swiftbatch.jobs.logprobs import NO_TOKEN, TokenLogprobs


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
        room = self._room.part(self._length, self._length + len(more))
        room.logprobs[:], room.top_ids[:], room.top_logprobs[:] = more.logprobs, more.top_ids, more.top_logprobs
        self._length += len(more)

    def first(self, num_tokens: int) -> KeptLogprobs:
        """Return a copy of the first `num_tokens` entries, which can grow."""
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
    """Return the log-probabilities of tokens `drawn` along a path down a tree, from `rows [num_rows, vocab]`.

    `scores` maps a row of logits and its drawn token to scores, and is called in the order of the path.
    """
    found = TokenLogprobs.empty(len(drawn), num_top)
    for i, (node, token_id) in enumerate(zip([-1, *path], drawn, strict=False)):
        found.logprobs[i], found.top_ids[i], found.top_logprobs[i] = row_logprobs(
            scores(rows[node + 1], token_id), token_id, num_top
        )
    return found


def row_logprobs(scores: torch.Tensor, token_id: int, num_top: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Return a token's log-probability by scores `[vocab]`, and ids and log-probabilities of the best `[num_top]`.

    Equal scores are ordered by id; missing ids are NO_TOKEN.
    """
    logprobs = torch.log_softmax(scores.double(), dim=-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    ids, top = np.full(num_top, NO_TOKEN, np.int32), np.full(num_top, -np.inf, np.float32)
    if num_top:
        best = torch.sort(scores, descending=True, stable=True).indices[:num_top]
        values = logprobs[best].float().cpu().numpy()
        count = int(np.isfinite(values).sum())
        ids[:count], top[:count] = best[:count].cpu().numpy(), values[:count]
    return float(logprobs[token_id].float()), ids, top
