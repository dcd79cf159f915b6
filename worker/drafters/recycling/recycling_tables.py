"""The tables of token recycling: rows of candidates behind tokens and behind pairs of tokens that stood in a text."""

from __future__ import annotations

import math

import numpy as np

from swiftbatch.worker.drafters.recycling.recycling_matrix import PairTable, RecyclingMatrix
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.verification import TOP_K

WIDTH = 2 * TOP_K  # candidates of an averaged row
NEW_SHARE = 0.3
PAIR_SHARE = 0.5  # what a pair's row counts beside the last token's


class RecyclingTables:
    """Rows of all tokens and of some pairs; a pair is one integer, `previous * vocab_size + token`."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.tokens = RecyclingMatrix(vocab_size, WIDTH, NEW_SHARE)
        self.pairs = PairTable(TOP_K, NEW_SHARE)

    def newest_pair(self, sequence: Sequence) -> int:
        """The last two tokens of a sequence; the first token is its own neighbour."""
        token_ids = sequence.token_ids
        return int(token_ids[max(len(token_ids) - 2, 0)]) * self.vocab_size + int(token_ids[-1])

    def next_pair(self, pair: int, token_id: int) -> int:
        """The pair that a token makes with the last one of `pair`."""
        return pair % self.vocab_size * self.vocab_size + token_id

    def candidates(self, pair: int) -> tuple[list[int], list[float]]:
        """The candidates that may follow a pair: ids and log-probabilities, best first."""
        return mixed(self.tokens.row(pair % self.vocab_size), self.pairs.row(pair))

    def state(self) -> dict[str, np.ndarray]:
        """Copies of all rows."""
        return {
            "recycling_ids": self.tokens.ids.copy(),
            "recycling_logprobs": self.tokens.logprobs.copy(),
            "recycling_pair_keys": self.pairs.keys.copy(),
            "recycling_pair_ids": self.pairs.matrix.ids.copy(),
            "recycling_pair_logprobs": self.pairs.matrix.logprobs.copy(),
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take over the known rows of a state. Unfit arrays raise ValueError and change nothing."""
        missing = self.state().keys() - state.keys()
        if missing:
            raise ValueError(f"recycling matrix: the state lacks {', '.join(sorted(missing))}")
        tokens = state["recycling_ids"], state["recycling_logprobs"]
        pairs = state["recycling_pair_ids"], state["recycling_pair_logprobs"]
        keys = state["recycling_pair_keys"]
        if keys.shape != self.pairs.keys.shape or keys.dtype != self.pairs.keys.dtype:
            raise ValueError(f"recycling matrix: pair keys are {keys.dtype} {keys.shape}, expected int64")
        self.tokens.check(*tokens, self.vocab_size)
        self.pairs.matrix.check(*pairs, self.vocab_size)
        self.tokens.load(*tokens)
        known = self.pairs.matrix.load(*pairs)
        self.pairs.keys[known] = keys[known]


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
