"""Token recycling (Luo et al. 2024): the target's candidates at every verified row are kept and drafted again.

A matrix holds, for every token of the vocabulary, the candidates that the target saw behind it, rejected nodes
included. One matrix serves all jobs of a worker, so that a later job starts hot. Beyond the paper it keeps the
candidates' log-probabilities, which rank them together with the noise of the coming positions; it averages a new row
with the one that stood there, since one context of a token is a poor guess of its next one; and it keeps rows for
pairs of tokens that stood in a text, which count as much as those of the last token alone.
"""

from __future__ import annotations

import math

import numpy as np

from worker.drafters.base import ReadRows
from worker.drafters.best_first import grow_best_first
from worker.drafters.budget import BudgetedDrafter
from worker.drafters.ranking import CandidateRanker
from worker.drafters.recycling.recycling_matrix import PairTable, RecyclingMatrix
from worker.sequence import Sequence
from worker.target.step_costs import Costs
from worker.target.target import TargetModel
from worker.tree import DraftTree
from worker.verification import TOP_K, Verification

WIDTH = 2 * TOP_K  # candidates of an averaged row
NEW_SHARE = 0.3
PAIR_SHARE = 0.5  # what a pair's row counts beside the last token's


class TokenRecyclingDrafter(BudgetedDrafter):
    """Best-first trees over averaged rows of tokens and of pairs, ranked with the noise."""

    needs_top_k = True

    def __init__(self, target: TargetModel, costs: Costs | None, *_: object, with_noise: bool = True) -> None:
        super().__init__(costs)
        self._vocab_size = target.vocab_size
        self._with_noise = with_noise
        self._tokens = RecyclingMatrix(target.vocab_size, WIDTH, NEW_SHARE)
        self._pairs = PairTable(TOP_K, NEW_SHARE)

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        ranker = CandidateRanker(sequence, self._with_noise)

        def expand(pair: int, depth: int) -> list[tuple[float, int, int]]:
            ranked = ranker.rank(depth, *self.candidates(pair))
            return [(confidence, child, self.next_pair(pair, child)) for confidence, child in ranked]

        return grow_best_first(self.newest_pair(sequence), expand, max_nodes, max_depth)

    def newest_pair(self, sequence: Sequence) -> int:
        """The last two tokens of a sequence, as one integer."""
        return self._pair(sequence, len(sequence) - 1)

    def next_pair(self, pair: int, token_id: int) -> int:
        """The pair that a token makes with the last one of `pair`."""
        return pair % self._vocab_size * self._vocab_size + token_id

    def candidates(self, pair: int) -> tuple[list[int], list[float]]:
        """What may follow a pair: ids and log-probabilities, best first."""
        return mixed(self._tokens.row(pair % self._vocab_size), self._pairs.row(pair))

    def learn(self, rows: ReadRows) -> None:
        self._tokens.write(rows.token_ids, rows.top_ids, rows.top_logprobs)
        pairs = rows.previous_ids * self._vocab_size + rows.token_ids
        self._pairs.write(pairs.tolist(), rows.top_ids, rows.top_logprobs)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        super().update(sequence, verification)
        top_ids, top_logprobs = top_candidates_of(verification)
        self._tokens.write(verification.row_token_ids, top_ids, top_logprobs)
        rows = [0, *(node + 1 for node in verification.path)]  # of tokens that stand in the text now
        root = len(sequence) - len(verification.committed_ids) - 1
        keys = [self._pair(sequence, root + offset) for offset in range(len(rows))]
        self._pairs.write(keys, top_ids[rows], top_logprobs[rows])

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return {
            "recycling_ids": self._tokens.ids.copy(),
            "recycling_logprobs": self._tokens.logprobs.copy(),
            "recycling_pair_keys": self._pairs.keys.copy(),
            "recycling_pair_ids": self._pairs.matrix.ids.copy(),
            "recycling_pair_logprobs": self._pairs.matrix.logprobs.copy(),
        }

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        missing = self.state(sequence).keys() - state.keys()
        if missing:
            raise ValueError(f"recycling matrix: the state lacks {', '.join(sorted(missing))}")
        tokens = state["recycling_ids"], state["recycling_logprobs"]
        pairs = state["recycling_pair_ids"], state["recycling_pair_logprobs"]
        keys = state["recycling_pair_keys"]
        if keys.shape != self._pairs.keys.shape or keys.dtype != self._pairs.keys.dtype:
            raise ValueError(f"recycling matrix: pair keys are {keys.dtype} {keys.shape}, expected int64")
        self._tokens.check(*tokens, self._vocab_size)
        self._pairs.matrix.check(*pairs, self._vocab_size)
        self._tokens.load(*tokens)
        known = self._pairs.matrix.load(*pairs)
        self._pairs.keys[known] = keys[known]

    def _pair(self, sequence: Sequence, position: int) -> int:
        """The token at a position and the one before it, as one integer; the first token is its own neighbour."""
        token_ids = sequence.token_ids
        return int(token_ids[max(position - 1, 0)]) * self._vocab_size + int(token_ids[position])


def top_candidates_of(verification: Verification) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities of the candidates at every row. ValueError where the step kept none."""
    if verification.top_ids is None or verification.top_logprobs is None:
        raise ValueError("token recycling needs the target's top candidates at every verified row; got none")
    return verification.top_ids, verification.top_logprobs


def mixed(
    token_row: tuple[list[int], list[float]], pair_row: tuple[list[int], list[float]]
) -> tuple[list[int], list[float]]:
    """Candidates of the last token's row and of the last pair's, averaged: ids and log-probabilities, best first."""
    if not token_row[0] or not pair_row[0]:
        return token_row if token_row[0] else pair_row
    probabilities = {token: (1 - PAIR_SHARE) * math.exp(logprob) for token, logprob in zip(*token_row, strict=True)}
    for token, logprob in zip(*pair_row, strict=True):
        probabilities[token] = probabilities.get(token, 0.0) + PAIR_SHARE * math.exp(logprob)
    best = sorted(probabilities, key=probabilities.__getitem__, reverse=True)[:TOP_K]
    return best, [math.log(probabilities[token]) for token in best]
