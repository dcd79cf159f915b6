"""The tables of token recycling: rows of candidates behind tokens and pairs of tokens that stood in a text."""

from __future__ import annotations

import math

import numpy as np

from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.verification import TOP_K

MOST_ROUNDED = 1e-3  # above 0 that averaged log-probabilities may come to
UNKNOWN = -np.inf  # the log-probabilities of a row that was never written


class RecyclingMatrix:
    """Candidates `ids [num_rows, width] int32` and `logprobs [num_rows, width] float32`, best first.

    A row that is written again becomes an average: the new probabilities count `new_share`, the old ones the rest.
    """

    def __init__(self, num_rows: int, width: int, new_share: float) -> None:
        self._new_share = np.float32(new_share)
        self.ids = np.zeros((num_rows, width), dtype=np.int32)
        self.logprobs = np.full((num_rows, width), UNKNOWN, dtype=np.float32)

    def row(self, index: int) -> tuple[list[int], list[float]]:
        """Candidates of a row and their log-probabilities; empty lists where nothing is known."""
        logprobs: list[float] = self.logprobs[index].tolist()
        if logprobs[0] == UNKNOWN:
            return [], []
        num_known = len(logprobs) - logprobs.count(UNKNOWN)
        return self.ids[index].tolist()[:num_known], logprobs[:num_known]

    def write(self, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Take in candidates `[num_rows, TOP_K]` of some rows `[num_rows]`; where a row comes twice, the last stays."""
        old_ids, old = self.ids[rows], np.exp(self.logprobs[rows])
        share = np.where(old[:, :1] > 0, self._new_share, np.float32(1))
        same = ids[:, :, None] == old_ids[:, None, :]  # [num_rows, new, old]
        new = share * np.exp(logprobs) + (1 - share) * (same * old[:, None, :]).sum(axis=2)
        old = np.where(same.any(axis=1), np.float32(0), (1 - share) * old)  # those found again count above
        probabilities = np.concatenate([new, old], axis=1)
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, : self.ids.shape[1]]
        with np.errstate(divide="ignore"):  # places without a candidate become -inf
            self.logprobs[rows] = np.log(np.take_along_axis(probabilities, best, axis=1))
        self.ids[rows] = np.take_along_axis(np.concatenate([ids, old_ids], axis=1), best, axis=1)

    def forget(self, rows: np.ndarray) -> None:
        """Make rows unknown."""
        self.logprobs[rows] = UNKNOWN

    def check(self, ids: np.ndarray, logprobs: np.ndarray, vocab_size: int) -> None:
        """Raise ValueError where another matrix does not fit this one."""
        for name, array, own in (("ids", ids, self.ids), ("logprobs", logprobs, self.logprobs)):
            if array.shape != own.shape or array.dtype != own.dtype:
                raise ValueError(
                    f"recycling matrix: {name} is {array.dtype} {array.shape}, expected {own.dtype} {own.shape}"
                )
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(f"recycling matrix: ids outside the vocabulary of {vocab_size} tokens")
        if np.isnan(logprobs).any() or logprobs.max() > MOST_ROUNDED or (logprobs[:, 1:] > logprobs[:, :-1]).any():
            raise ValueError("recycling matrix: found log-probabilities that are none, or not the best first")

    def load(self, ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Take over the known rows of another matrix, keep the rest; returns which were known, `[num_rows] bool`."""
        known: np.ndarray = logprobs[:, 0] > UNKNOWN
        self.ids[known] = ids[known]
        self.logprobs[known] = logprobs[known]
        return known


class PairTable:
    """Candidates behind pairs of tokens: a fixed number of rows found by hash; a new pair takes over its row."""

    NUM_BITS = 15

    def __init__(self, width: int, new_share: float) -> None:
        self.matrix = RecyclingMatrix(1 << self.NUM_BITS, width, new_share)
        self.keys = np.full(1 << self.NUM_BITS, -1, dtype=np.int64)  # the pair that each row belongs to

    def row(self, key: int) -> tuple[list[int], list[float]]:
        """Candidates behind a pair; empty lists where nothing is known."""
        index = self._index(key)
        return self.matrix.row(index) if self.keys[index] == key else ([], [])

    def write(self, keys: list[int], ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Take in candidates `[num_keys, TOP_K]` behind some pairs."""
        # Two pairs of one call may share a row: the later takes it, so only one row may reach the matrix.
        last = {self._index(key): place for place, key in enumerate(keys)}
        rows = np.fromiter(last.keys(), dtype=np.int64, count=len(last))
        places = np.fromiter(last.values(), dtype=np.int64, count=len(last))
        new_keys = np.array(keys, dtype=np.int64)[places]
        self.matrix.forget(rows[self.keys[rows] != new_keys])
        self.keys[rows] = new_keys
        self.matrix.write(rows, ids[places], logprobs[places])

    def _index(self, key: int) -> int:
        """Fibonacci hashing: the high bits of the product with 2^64 / golden ratio."""
        return (key * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> (64 - self.NUM_BITS)


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
