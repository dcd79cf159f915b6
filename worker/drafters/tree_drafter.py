"""Drafters that grow a tree for each sequence by itself, of any size."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many

from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest, WantedTree
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence


class TreeDrafter(Drafter):
    """Proposes trees as large as they may be; `choice/` says which sizes pay."""

    @abstractmethod
    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        """Grow a tree of at most `max_nodes` nodes, none deeper than `max_depth`; it may be empty."""

    def trees(self, wanted: Many[WantedTree]) -> list[DraftTree]:
        """Grow the trees of several sequences, as `tree` does each."""
        return [self.tree(*each) for each in wanted]

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return self.trees([(r.sequence, r.max_nodes, r.max_depth) for r in requests])

    def sized_trees(self, requests: list[DraftRequest], sizes: list[int]) -> list[DraftTree]:
        """Grow trees of at most these numbers of nodes, one for each request."""
        given = zip(requests, sizes, strict=True)
        wanted = [(request.sequence, size, request.max_depth) for request, size in given if size]
        trees = iter(self.trees(wanted) if wanted else ())
        return [next(trees) if size else DraftTree() for size in sizes]
