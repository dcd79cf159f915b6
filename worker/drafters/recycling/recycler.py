"""Recycles candidates: one native call for a tree and one to learn where kernels run, in Python elsewhere."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from swiftbatch.worker.drafters.best_first import grow_best_first
from swiftbatch.worker.drafters.ranking import CandidateRanker, ranking_rule
from swiftbatch.worker.drafters.recycling.native_recycler import NativeRecycling
from swiftbatch.worker.drafters.recycling.recycling_tables import NEW_SHARE, PAIR_SHARE, RecyclingTables
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.tree import DraftTree
from swiftbatch.worker.kernels.instruction_sets import chosen_variant


class Recycler(Protocol):
    """Grows best-first trees from tables, and writes to them."""

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        """Grow a tree of at most `max_nodes` nodes, none deeper than `max_depth`."""

    def write(
        self,
        token_ids: np.ndarray,
        top_ids: np.ndarray,
        top_logprobs: np.ndarray,
        text_rows: np.ndarray,
        previous_ids: np.ndarray,
    ) -> None:
        """Take in candidates `[num_rows, TOP_K]` behind tokens `[num_rows]`; where one comes twice, the last counts.

        Those of `text_rows` stand behind `previous_ids` in a text: they count for these pairs too.
        """


class NativeRecycler:
    """Recycles in C."""

    def __init__(self, tables: RecyclingTables, with_noise: bool, variant: str) -> None:
        tokens, pairs = tables.tokens, tables.pairs.matrix
        rows = (tokens.ids, tokens.logprobs), (pairs.ids, pairs.logprobs)
        self._native = NativeRecycling(*rows, tables.pairs.keys, (NEW_SHARE, PAIR_SHARE), variant)
        self._with_noise = with_noise
        self.write = self._native.write

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        return self._native.grow(sequence, ranking_rule(sequence.sampling, self._with_noise), max_nodes, max_depth)


class PythonRecycler:
    """Recycles in Python, anywhere: the reference that the other one is held against."""

    def __init__(self, tables: RecyclingTables, with_noise: bool) -> None:
        self._tables = tables
        self._with_noise = with_noise

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        ranker = CandidateRanker(sequence, self._with_noise)

        def expand(pair: int, depth: int) -> list[tuple[float, int, int]]:
            ranked = ranker.rank(depth, *self._tables.candidates(pair))
            return [(confidence, child, self._tables.next_pair(pair, child)) for confidence, child in ranked]

        return grow_best_first(self._tables.newest_pair(sequence), expand, max_nodes, max_depth)

    def write(
        self,
        token_ids: np.ndarray,
        top_ids: np.ndarray,
        top_logprobs: np.ndarray,
        text_rows: np.ndarray,
        previous_ids: np.ndarray,
    ) -> None:
        self._tables.tokens.write(token_ids, top_ids, top_logprobs)
        pairs = previous_ids * self._tables.vocab_size + token_ids[text_rows]
        self._tables.pairs.write(pairs.tolist(), top_ids[text_rows], top_logprobs[text_rows])


def create_recycler(tables: RecyclingTables, with_noise: bool) -> Recycler:
    """Make the fastest recycler here. Raises KernelError for instructions that this machine does not have."""
    variant = chosen_variant()
    return PythonRecycler(tables, with_noise) if variant is None else NativeRecycler(tables, with_noise, variant)
