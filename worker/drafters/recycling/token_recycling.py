"""Token recycling (Luo et al. 2024): candidates of verified rows are kept in tables and drafted again."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Protocol

import numpy as np

from swiftbatch.worker.drafters.choice.choosing_drafter import ChoosingDrafter, with_trees
from swiftbatch.worker.drafters.drafter_interface import ReadRows, TreeDrafter, Verified, WantedTree
from swiftbatch.worker.drafters.ranking import CandidateRanker, grow_best_first, ranking_rule
from swiftbatch.worker.drafters.recycling.native_recycler import NativeRecycling, TextCandidates
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.instruction_sets import chosen_variant
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import TOP_K, Verification

MOST_ROUNDED = 1e-3  # rounding may bring averaged log-probabilities so far above 0
UNKNOWN = -np.inf  # log-probabilities of a row that was never written


class RecyclingMatrix:
    """Candidates `ids [num_rows, width] int32` and `logprobs [num_rows, width] float32`, best first.

    Rewriting a row averages: the new probabilities have weight `new_share`.
    """

    def __init__(self, num_rows: int, width: int, new_share: float) -> None:
        self._new_share = np.float32(new_share)
        self.ids = np.zeros((num_rows, width), dtype=np.int32)
        self.logprobs = np.full((num_rows, width), UNKNOWN, dtype=np.float32)

    def row(self, index: int) -> tuple[list[int], list[float]]:
        """Return a row's candidates and log-probabilities, or empty lists if the row was never written."""
        logprobs: list[float] = self.logprobs[index].tolist()
        if logprobs[0] == UNKNOWN:
            return [], []
        num_known = len(logprobs) - logprobs.count(UNKNOWN)
        return self.ids[index].tolist()[:num_known], logprobs[:num_known]

    def write(self, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Write candidates `[num_rows, TOP_K]` of rows `[num_rows]`; if a row is repeated, its last entry counts."""
        old_ids, old = self.ids[rows], np.exp(self.logprobs[rows])
        share = np.where(old[:, :1] > 0, self._new_share, np.float32(1))
        same = ids[:, :, None] == old_ids[:, None, :]  # [num_rows, new, old]
        new = share * np.exp(logprobs) + (1 - share) * (same * old[:, None, :]).sum(axis=2)
        old = np.where(same.any(axis=1), np.float32(0), (1 - share) * old)  # candidates found again count above
        probabilities = np.concatenate([new, old], axis=1)
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, : self.ids.shape[1]]
        with np.errstate(divide="ignore"):  # places without a candidate become -inf
            self.logprobs[rows] = np.log(np.take_along_axis(probabilities, best, axis=1))
        self.ids[rows] = np.take_along_axis(np.concatenate([ids, old_ids], axis=1), best, axis=1)

    def forget(self, rows: np.ndarray) -> None:
        self.logprobs[rows] = UNKNOWN

    def check(self, ids: np.ndarray, logprobs: np.ndarray, vocab_size: int) -> None:
        """Raise ValueError if another matrix does not fit this one."""
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
        """Take over another matrix's known rows; return which were known, `[num_rows] bool`."""
        known: np.ndarray = logprobs[:, 0] > UNKNOWN
        self.ids[known] = ids[known]
        self.logprobs[known] = logprobs[known]
        return known


class PairTable:
    """Candidates to follow pairs of tokens, in a fixed number of hashed rows."""

    NUM_BITS = 15

    def __init__(self, width: int, new_share: float) -> None:
        self.matrix = RecyclingMatrix(1 << self.NUM_BITS, width, new_share)
        self.keys = np.full(1 << self.NUM_BITS, -1, dtype=np.int64)  # each row's pair

    def row(self, key: int) -> tuple[list[int], list[float]]:
        index = self._index(key)
        return self.matrix.row(index) if self.keys[index] == key else ([], [])

    def write(self, keys: list[int], ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Write the candidates `[num_keys, TOP_K]` to follow some pairs."""
        # Two pairs of one call may share a row: the later takes it, so only one row may reach the matrix.
        last = {self._index(key): place for place, key in enumerate(keys)}
        rows = np.fromiter(last.keys(), dtype=np.int64, count=len(last))
        places = np.fromiter(last.values(), dtype=np.int64, count=len(last))
        new_keys = np.array(keys, dtype=np.int64)[places]
        self.matrix.forget(rows[self.keys[rows] != new_keys])
        self.keys[rows] = new_keys
        self.matrix.write(rows, ids[places], logprobs[places])

    def _index(self, key: int) -> int:
        """Hash by Fibonacci: the high bits of the product with 2^64 / golden ratio."""
        return (key * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> (64 - self.NUM_BITS)


WIDTH = 2 * TOP_K  # candidates of an averaged row
NEW_SHARE = 0.3
PAIR_SHARE = 0.5  # weight of a pair's row beside the last token's


class RecyclingTables:
    """Rows of all tokens and some pairs; a pair is `previous * vocab_size + token`."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.tokens = RecyclingMatrix(vocab_size, WIDTH, NEW_SHARE)
        self.pairs = PairTable(TOP_K, NEW_SHARE)

    def newest_pair(self, sequence: Sequence) -> int:
        """Return the pair of a sequence's last two tokens; a single token is paired with itself."""
        token_ids = sequence.token_ids
        return int(token_ids[max(len(token_ids) - 2, 0)]) * self.vocab_size + int(token_ids[-1])

    def next_pair(self, pair: int, token_id: int) -> int:
        return pair % self.vocab_size * self.vocab_size + token_id

    def candidates(self, pair: int) -> tuple[list[int], list[float]]:
        """Return the candidates to follow a pair: ids and log-probabilities, best first."""
        return mixed(self.tokens.row(pair % self.vocab_size), self.pairs.row(pair))

    def state(self) -> dict[str, np.ndarray]:
        return {
            "recycling_ids": self.tokens.ids.copy(),
            "recycling_logprobs": self.tokens.logprobs.copy(),
            "recycling_pair_keys": self.pairs.keys.copy(),
            "recycling_pair_ids": self.pairs.matrix.ids.copy(),
            "recycling_pair_logprobs": self.pairs.matrix.logprobs.copy(),
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take over a state's known rows. Raises ValueError for arrays that do not fit."""
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
    """Average a token's and a pair's candidates: ids and log-probabilities, best first."""
    if not token_row[0] or not pair_row[0]:
        return token_row if token_row[0] else pair_row
    probabilities = {token: (1 - PAIR_SHARE) * math.exp(logprob) for token, logprob in zip(*token_row, strict=True)}
    for token, logprob in zip(*pair_row, strict=True):
        probabilities[token] = probabilities.get(token, 0.0) + PAIR_SHARE * math.exp(logprob)
    best = sorted(probabilities, key=probabilities.__getitem__, reverse=True)[:TOP_K]
    return best, [math.log(probabilities[token]) for token in best]


# Token recycling (Luo et al. 2024): the target's candidates at every verified row are kept and drafted again.


ROOT_ALONE = [0]  # rows in the text


class Recycler(Protocol):
    """Grower and writer of tables, native if kernels run."""

    def trees(self, wanted: Many[WantedTree]) -> list[DraftTree]:
        """Grow trees."""

    def write(self, texts: Many[TextCandidates]) -> None:
        """Write the candidates to follow tokens and pairs, text after text."""


class NativeRecycler:
    def __init__(self, tables: RecyclingTables, with_noise: bool, variant: str) -> None:
        tokens, pairs = tables.tokens, tables.pairs.matrix
        rows = (tokens.ids, tokens.logprobs), (pairs.ids, pairs.logprobs)
        self._native = NativeRecycling(*rows, tables.pairs.keys, (NEW_SHARE, PAIR_SHARE), variant)
        self._with_noise = with_noise
        self.write = self._native.write

    def trees(self, wanted: Many[WantedTree]) -> list[DraftTree]:
        rankings = [ranking_rule(sequence.sampling, self._with_noise) for sequence, _, _ in wanted]
        return self._native.grow(wanted, rankings)


class PythonRecycler:
    """Recycles in Python: the reference for the native one."""

    def __init__(self, tables: RecyclingTables, with_noise: bool) -> None:
        self._tables = tables
        self._with_noise = with_noise

    def trees(self, wanted: Many[WantedTree]) -> list[DraftTree]:
        return [self._tree(*each) for each in wanted]

    def _tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        ranker = CandidateRanker(sequence, self._with_noise)

        def expand(pair: int, depth: int) -> list[tuple[float, int, int]]:
            ranked = ranker.rank(depth, *self._tables.candidates(pair))
            return [(confidence, child, self._tables.next_pair(pair, child)) for confidence, child in ranked]

        return grow_best_first(self._tables.newest_pair(sequence), expand, max_nodes, max_depth)

    def write(self, texts: Many[TextCandidates]) -> None:
        for text in texts:
            token_ids, text_rows = np.asarray(text.token_ids), np.asarray(text.text_rows, dtype=np.int64)
            self._tables.tokens.write(token_ids, text.top_ids, text.top_logprobs)
            pairs = np.asarray(text.previous_ids, dtype=np.int64) * self._tables.vocab_size + token_ids[text_rows]
            self._tables.pairs.write(pairs.tolist(), text.top_ids[text_rows], text.top_logprobs[text_rows])


def create_recycler(tables: RecyclingTables, with_noise: bool) -> Recycler:
    """Make the fastest recycler here. Raises KernelError for instructions that this machine lacks."""
    variant = chosen_variant()
    return PythonRecycler(tables, with_noise) if variant is None else NativeRecycler(tables, with_noise, variant)


def token_recycling(
    target: TargetModel, costs: Costs, parts_folder: Path | None, with_noise: bool = True
) -> ChoosingDrafter:
    return with_trees(TokenRecyclingDrafter(target, with_noise), costs)


class TokenRecyclingDrafter(TreeDrafter):
    """Best-first trees over averaged rows, ranked with the noise."""

    needs_top_k = True

    def __init__(self, target: TargetModel, with_noise: bool = True) -> None:
        self.tables = RecyclingTables(target.vocab_size)
        self._recycler = create_recycler(self.tables, with_noise)

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        return self.trees([(sequence, max_nodes, max_depth)])[0]

    def trees(self, wanted: Many[WantedTree]) -> list[DraftTree]:
        return self._recycler.trees(wanted)

    def learn(self, rows: ReadRows) -> None:
        token_ids, previous_ids = rows.token_ids.tolist(), rows.previous_ids.tolist()
        all_rows = list(range(len(token_ids)))
        self._recycler.write([TextCandidates(token_ids, rows.top_ids, rows.top_logprobs, all_rows, previous_ids)])

    def update(self, sequence: Sequence, verification: Verification) -> None:
        self.update_all([(sequence, verification)])

    def update_all(self, verified: Many[Verified]) -> None:
        if texts := [_candidates_of(*each) for each in verified if each[1].top_ids is not None]:
            self._recycler.write(texts)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return self.tables.state()

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        self.tables.restore(state)


def _candidates_of(sequence: Sequence, verification: Verification) -> TextCandidates:
    path, token_ids, committed = verification.path, verification.row_token_ids, verification.committed_ids
    top_ids, top_logprobs = top_candidates_of(verification)
    before = len(sequence) - len(committed) - 2  # tokens in front of the root
    previous = [sequence.token_id(before if before > 0 else 0)]
    if not path:
        return TextCandidates(token_ids, top_ids, top_logprobs, ROOT_ALONE, previous)
    text_rows = [0, *[node + 1 for node in path]]  # rows of tokens that stand in the text now
    previous_ids = [*previous, token_ids[0], *committed][: len(text_rows)]
    return TextCandidates(token_ids, top_ids, top_logprobs, text_rows, previous_ids)


def top_candidates_of(verification: Verification) -> tuple[np.ndarray, np.ndarray]:
    """Raise ValueError if the step kept no candidates."""
    if verification.top_ids is None or verification.top_logprobs is None:
        raise ValueError("token recycling needs the target's top candidates at every verified row; got none")
    return verification.top_ids, verification.top_logprobs
