"""Token recycling (Luo et al. 2024): the target's candidates at every verified row are kept and drafted again.

A matrix holds, for every token of the vocabulary, the candidates that the target saw behind it, rejected nodes
included. One matrix serves all jobs of a worker, so that a later job starts hot. Beyond the paper it keeps the
candidates' log-probabilities, which rank them together with the noise of the coming positions; it averages a new row
with the one that stood there, since one context of a token is a poor guess of its next one; and it keeps rows for
pairs of tokens that stood in a text, which count as much as those of the last token alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

import numpy as np

from swiftbatch.worker.drafters.drafter_interface import ReadRows, Verified, WantedTree
from swiftbatch.worker.drafters.ranking import CandidateRanker, grow_best_first, ranking_rule
from swiftbatch.worker.drafters.recycling.native_recycler import NativeRecycling, TextCandidates
from swiftbatch.worker.drafters.recycling.recycling_tables import NEW_SHARE, PAIR_SHARE, RecyclingTables
from swiftbatch.worker.drafters.shared_budget import BudgetedDrafter
from swiftbatch.worker.drawing.draft_tree import DraftTree
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.verification import Verification
from swiftbatch.worker.kernels.instruction_sets import chosen_variant
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel

ROOT_ALONE = [0]  # rows in the text


class Recycler(Protocol):
    """Grows best-first trees from tables, and writes to them: a native call each where kernels run, else in Python."""

    def trees(self, wanted: Many[WantedTree]) -> list[DraftTree]:
        """Grow trees."""

    def write(self, texts: Many[TextCandidates]) -> None:
        """Take in candidates behind tokens and pairs of tokens, text after text."""


class NativeRecycler:
    """Recycles in C."""

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
    """Recycles in Python, anywhere: the reference that the other one is held against."""

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
    """Make the fastest recycler here. Raises KernelError for instructions that this machine does not have."""
    variant = chosen_variant()
    return PythonRecycler(tables, with_noise) if variant is None else NativeRecycler(tables, with_noise, variant)


class TokenRecyclingDrafter(BudgetedDrafter):
    """Best-first trees over averaged rows of tokens and of pairs, ranked with the noise."""

    needs_top_k = True

    def __init__(self, target: TargetModel, costs: Costs | None, *_: object, with_noise: bool = True) -> None:
        super().__init__(costs)
        self.tables = RecyclingTables(target.vocab_size)
        self._recycler = create_recycler(self.tables, with_noise)

    @property
    def wants_candidates(self) -> bool:
        return self.is_drafting

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
        self.observe(verified)
        self.take([each for each in verified if each[1].top_ids is not None])  # where no drafts pay, there are none

    def take(self, verified: Many[Verified]) -> None:
        """Keep the target's candidates at the rows of a verified step, whoever proposed its trees."""
        if verified:
            self._recycler.write([_candidates_of(*each) for each in verified])

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return self.tables.state()

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        self.tables.restore(state)


def _candidates_of(sequence: Sequence, verification: Verification) -> TextCandidates:
    path, token_ids, committed = verification.path, verification.row_token_ids, verification.committed_ids
    top_ids, top_logprobs = top_candidates_of(verification)
    before = len(sequence) - len(committed) - 2  # in front of the root
    previous = [sequence.token_id(before if before > 0 else 0)]
    if not path:
        return TextCandidates(token_ids, top_ids, top_logprobs, ROOT_ALONE, previous)
    text_rows = [0, *[node + 1 for node in path]]  # of tokens that stand in the text now
    previous_ids = [*previous, token_ids[0], *committed][: len(text_rows)]
    return TextCandidates(token_ids, top_ids, top_logprobs, text_rows, previous_ids)


def top_candidates_of(verification: Verification) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities of the candidates at every row. ValueError where the step kept none."""
    if verification.top_ids is None or verification.top_logprobs is None:
        raise ValueError("token recycling needs the target's top candidates at every verified row; got none")
    return verification.top_ids, verification.top_logprobs
