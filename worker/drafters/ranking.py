"""How sure a drafter is of its candidates: the log-confidence that a candidate is the token that will be drawn.

The target draws argmax(logit / T + G) at every position, and G is known before anything is drafted. A drafter's
log-probabilities are only guesses of the logits, wrong by about `GUESS_ERROR`; so a candidate's chance to win is the
softmax of (log-probability + T * G) / GUESS_ERROR. At T = 0 that is the plain guess without noise.
"""

from __future__ import annotations

import math

import numpy as np

from worker.sequence import Sequence

GUESS_ERROR = 1.0  # nats by which a kept log-probability misses the one at another context
EULER_GAMMA = 0.5772156649015329  # mean of standard Gumbel noise


class CandidateRanker:
    """Ranks candidates of one sequence at the positions behind its end. Made anew for every proposal."""

    def __init__(self, sequence: Sequence, with_noise: bool = True) -> None:
        sampling = sequence.sampling
        self._sequence = sequence
        greedy = sampling.temperature == 0 or sampling.top_k == 1
        self._temperature = sampling.temperature
        self._with_noise = with_noise and not greedy
        self._min_p = 0.0 if greedy else sampling.min_p
        self._floor = sampling.temperature * math.log(self._min_p) if self._min_p > 0 else -math.inf
        self._noise_rows: dict[int, np.ndarray] = {}

    def rank(self, depth: int, token_ids: list[int], logprobs: list[float]) -> list[tuple[float, int]]:
        """Rank distinct candidates for the nodes at `depth` (1 = the root's children): (log-confidence, token), best first.

        `logprobs` falls from left to right. Candidates that the sampling parameters cut off are left out.
        """
        if not logprobs:
            return []
        floor = logprobs[0] + self._floor
        kept = [logprob for logprob in logprobs if logprob >= floor]
        token_ids = token_ids[: len(kept)]
        scores = [a + b for a, b in zip(kept, self._shifts(depth, token_ids), strict=True)]
        best = max(scores)
        rest = 1.0 - sum(map(math.exp, logprobs))
        others = math.exp((math.log(max(rest, 1e-6)) - best) / GUESS_ERROR)
        total = sum(math.exp((score - best) / GUESS_ERROR) for score in scores) + others
        log_total = best / GUESS_ERROR + math.log(total)
        ranked = [(score / GUESS_ERROR - log_total, token) for score, token in zip(scores, token_ids, strict=True)]
        ranked.sort(reverse=True)
        return ranked

    def _shifts(self, depth: int, token_ids: list[int]) -> list[float]:
        """T * G of the candidates at one depth."""
        if not self._with_noise:
            return [0.0] * len(token_ids)
        if depth not in self._noise_rows:
            noise = self._sequence.noise.row(len(self._sequence) + depth - 1)
            self._noise_rows[depth] = noise.cpu().numpy()
        shifts: list[float] = self._noise_rows[depth][token_ids].tolist()
        return [self._temperature * shift for shift in shifts]
