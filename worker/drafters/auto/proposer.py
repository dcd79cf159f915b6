"""Small trees of recycled candidates below chains, for rounds to check."""

from __future__ import annotations

from swiftbatch.worker.drafters.recycling.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.drafters.two_level.chain import Chain
from swiftbatch.worker.drafters.two_level.proposer import Proposer
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.tree import DraftTree


class RecycledProposer(Proposer):
    """Reads the tables of a drafter that learns by itself."""

    def __init__(self, recycling: TokenRecyclingDrafter) -> None:
        self._recycling = recycling

    def start(self, sequence: Sequence) -> None:
        """Keep nothing of a sequence."""

    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        return [self._tree(chain, *limit) for chain, limit in zip(chains, limits, strict=True)]

    def _tree(self, chain: Chain, max_nodes: int, max_depth: int) -> DraftTree:
        if max_nodes < 1 or max_depth < 1:
            return DraftTree()
        return self._recycling.tree(chain.sequence, max_nodes, max_depth)
