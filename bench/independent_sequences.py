"""Trees of several chains that the draft model draws independently (figure 6c of the TriForce paper)."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from swiftbatch.worker.drafters.self_speculation import Chain
from swiftbatch.worker.drafters.triforce import DraftModel, DraftModelProposer
from swiftbatch.worker.sampling.batch_sampler import BatchSampler
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree

SEED_STEP = 1_000_003  # between the seeds of two chains


class IndependentSequences(DraftModelProposer):
    """Draws the first chain with the target's coupled noise, and each other chain with noise of its own."""

    def __init__(self, draft_model: DraftModel, drawing: BatchSampler, num_chains: int) -> None:
        super().__init__(draft_model, drawing)
        self._num_chains = num_chains

    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        own = [(num_nodes // self._num_chains, depth) for num_nodes, depth in limits]
        drawn = []
        for number in range(self._num_chains):
            drawn.append(super().propose([self._noised(chain, number) for chain in chains], own))
        return [joined(trees) for trees in zip(*drawn, strict=True)]

    def _noised(self, chain: Chain, number: int) -> Chain:
        if number == 0:
            return chain
        other, sequence = copy.copy(chain), chain.sequence.fork()
        seed = (sequence.sampling.seed or 0) + number * SEED_STEP
        sequence.sampling = sequence.sampling.model_copy(update={"seed": seed})
        sequence.set_rewinds(sequence.rewinds)
        other.sequence, other.sampler = sequence, self._batch_sampler.sampler(sequence)
        return other


def joined(trees: Iterable[DraftTree]) -> DraftTree:
    """Join trees, with common beginnings once."""
    both, nodes = DraftTree(), dict[tuple[int, int], int]()
    for tree in trees:
        places = {ROOT: ROOT}
        for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            key = places[parent], token_id
            if key not in nodes:
                nodes[key] = len(both)
                both.token_ids.append(token_id)
                both.parents.append(key[0])
            places[node] = nodes[key]
    return both
