"""Ranks candidates by their chance to be drawn and grows draft trees of the best.

The target draws argmax(logit / T + G) with known G. A drafter's log-probabilities are guessed logits, so the confidence
is softmax((log-probability + T * G) / spread). The spread is the typical error of a guess. Of the values tried (0.25 to
2, at T = 0 and 1), the default had the best acceptance rate.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

Context = TypeVar("Context")
Expand = Callable[[Context, int], list[tuple[float, int, Context]]]
"""(context, depth) -> candidates at that depth, best first: (log-confidence given the parent, token, next context)."""


def grow_best_first(root_context: Context, expand: Expand[Context], max_nodes: int, max_depth: int) -> DraftTree:
    """Grow a tree of at most `max_nodes` nodes and depth at most `max_depth`.

    `expand` finds candidates by a context, such as a token or a state. Only the best sibling left waits in the queue,
    so n nodes need at most n expansions.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    # (-log-confidence of the path, tie-breaker, parent, depth, siblings, place among them, that of the parent's path)
    queue: list[tuple[float, int, int, int, list[tuple[float, int, Context]], int, float]] = []
    num_pushed = 0

    def push(parent: int, depth: int, siblings: list[tuple[float, int, Context]], place: int, path: float) -> None:
        nonlocal num_pushed
        if place < len(siblings):
            num_pushed += 1
            heapq.heappush(queue, (-path - siblings[place][0], num_pushed, parent, depth, siblings, place, path))

    if max_nodes > 0 and max_depth > 0:
        push(ROOT, 1, expand(root_context, 1), 0, 0.0)
    while queue and len(token_ids) < max_nodes:
        cost, _, parent, depth, siblings, place, path = heapq.heappop(queue)
        _, token, context = siblings[place]
        token_ids.append(token)
        parents.append(parent)
        push(parent, depth, siblings, place + 1, path)
        if depth < max_depth and len(token_ids) < max_nodes:
            push(len(token_ids) - 1, depth + 1, expand(context, depth + 1), 0, -cost)
    return DraftTree(token_ids, parents)


NUM_KEPT_RULES = 1024  # more than the jobs of a worker, each of which asks every step
MIN_SPREAD = 0.25  # in logits; a higher temperature is the spread itself


class RankingRule(NamedTuple):
    noise_scale: float  # factor on the noise: the temperature, or 0
    spread: float  # in logits
    floor: float  # cuts off candidates so far below the best, in logits; 0 or less


def ranking_rule(sampling: SamplingParams, with_noise: bool = True, spread: float | None = None) -> RankingRule:
    """Return the rule for sampling parameters.

    `spread` is the typical error, in logits, of the drafter's guessed logits; None uses the default.
    """
    return _rule(sampling.temperature, sampling.top_k, sampling.min_p, with_noise, spread)


@functools.lru_cache(maxsize=NUM_KEPT_RULES)
def _rule(temperature: float, top_k: int, min_p: float, with_noise: bool, spread: float | None) -> RankingRule:
    if temperature == 0 or top_k == 1:
        return RankingRule(0.0, spread or MIN_SPREAD, -math.inf)
    # the highest logit is never cut off, whichever token the drafter guesses to have it
    floor = temperature * math.log(min_p) if min_p > 0 else -math.inf
    return RankingRule(temperature if with_noise else 0.0, spread or max(MIN_SPREAD, temperature), floor)


class CandidateRanker:
    """Ranks the candidate tokens that may follow one sequence, for a single proposal."""

    def __init__(self, sequence: Sequence, with_noise: bool = True, spread: float | None = None) -> None:
        self._sequence = sequence
        self._rule = ranking_rule(sequence.sampling, with_noise, spread)
        self._noise_rows: dict[int, np.ndarray] = {}

    def rank(self, depth: int, token_ids: list[int], logprobs: list[float]) -> list[tuple[float, int]]:
        """Rank distinct candidates for a node at `depth` (root: 0): (log-confidence, token), best first.

        `logprobs` must be in descending order. Sampling parameters may cut candidates off.
        """
        if not logprobs:
            return []
        floor = logprobs[0] + self._rule.floor
        kept = [logprob for logprob in logprobs if logprob >= floor]
        token_ids = token_ids[: len(kept)]
        scores = [(a + b) / self._rule.spread for a, b in zip(kept, self._shifts(depth, token_ids), strict=True)]
        best = max(scores)
        log_total = best + math.log(sum(math.exp(score - best) for score in scores))
        return sorted(
            ((score - log_total, token) for score, token in zip(scores, token_ids, strict=True)), reverse=True
        )

    def rank_logits(self, logits: torch.Tensor, depths: Iterable[int], width: int) -> list[list[tuple[float, int]]]:
        """Rank all tokens for nodes at some depths by guessed logits `[num_rows, vocab] float32` after penalty.

        Returns the best `width` of each row: (log-confidence, token), best first.
        """
        scores = logits
        if self._rule.floor > -math.inf:
            scores = scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + self._rule.floor, -math.inf)
        if self._rule.noise_scale:
            root = len(self._sequence) - 1
            noise = torch.stack([self._sequence.noise.row(root + depth) for depth in depths])
            scores = torch.add(scores, noise, alpha=self._rule.noise_scale)
        confidence = torch.log_softmax(scores / self._rule.spread, dim=-1)
        best = confidence.topk(width, dim=-1)
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [[entry for entry in zip(*pair, strict=True) if entry[0] > -math.inf] for pair in pairs]

    def _shifts(self, depth: int, token_ids: list[int]) -> list[float]:
        """Return the scaled noise T * G of the candidates at one depth."""
        if not self._rule.noise_scale:
            return [0.0] * len(token_ids)
        if depth not in self._noise_rows:
            noise = self._sequence.noise.row(len(self._sequence) + depth - 1)
            self._noise_rows[depth] = noise.cpu().numpy()
        shifts: list[float] = self._noise_rows[depth][token_ids].tolist()
        return [self._rule.noise_scale * shift for shift in shifts]
