"""Trees of the TokenSwift paper's table 7 that engines do not draft."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.drafters.drafter_interface import DraftRequest
from swiftbatch.worker.drafters.engine_options import TokenSwiftOptions
from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.drafters.self_speculation import Chain, SelfSpeculationDrafter, partial_cache
from swiftbatch.worker.drafters.tokenswift.decoding_heads import DecodingHeads
from swiftbatch.worker.drafters.tokenswift.tokenswift import TokenSwiftProposer, whole_trees
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES
from swiftbatch.worker.sampling.batch_sampler import penalised
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree


def num_nodes(digits: tuple[int, ...]) -> int:
    return sum(math.prod(digits[:depth]) for depth in range(1, len(digits) + 1))


def room_for(options: TokenSwiftOptions) -> int:
    """Return how many positions a cache needs for trees larger than those of engines."""
    return max(0, 1 + num_nodes(options.tree or ()) - MAX_TREE_NODES)


class LargeTrees(SelfSpeculationDrafter):
    """Whole trees of any size below one or more tokens of the partial cache, without n-grams."""

    num_first = 1

    @classmethod
    def make(
        cls, target: TargetModel, parts_folder: Path | None, options: TokenSwiftOptions, num_first: int
    ) -> LargeTrees:
        """Raises ModelError, and BenchError on a GPU."""
        digits = options.tree or ()
        if target.forwards.arena is not None:
            raise BenchError(f"tree {digits}: {num_nodes(digits)} nodes need a CPU; use --device cpu")
        proposer = TokenSwiftProposer(DecodingHeads.load(parts_folder, target), digits, options, None)
        plan = replace(whole_trees(options.rounds), num_nodes=1 + num_nodes(digits))
        drafter = cls(target, proposer, partial_cache(options), options.partial_budget, plan, options.budget_of)
        drafter.num_first = num_first
        return drafter

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return super().propose([request._replace(max_nodes=self.plan.num_nodes) for request in requests])

    def _close(self, chains: list[Chain]) -> list[DraftTree]:
        trees = super()._close(chains)
        for chain, tree in zip(chains, trees, strict=True):
            if self.num_first > 1 and len(tree):
                repeat_below(tree, self._other_tokens(chain))
        return trees

    def _other_tokens(self, chain: Chain) -> list[int]:
        """Return the partial cache's best tokens beside the drawn one."""
        assert chain.hidden is not None
        sampler = self._tracked[chain.sequence.sequence_id].sampler
        logits = penalised(sampler, self._target.logits(chain.hidden[None]))
        [ranked] = CandidateRanker(sampler.sequence).rank_logits(logits, [1], self.num_first)
        return [token_id for _, token_id in ranked if token_id != chain.drawn[0]][: self.num_first - 1]


def repeat_below(tree: DraftTree, token_ids: list[int]) -> None:
    """Add a copy of the tree below its only first node for each token, with that token in place of the first node."""
    own = list(zip(tree.token_ids, tree.parents, strict=True))
    for token_id in token_ids:
        first = len(tree)
        tree.token_ids += [token_id, *(token for token, _ in own[1:])]
        tree.parents += [ROOT, *(first + parent for _, parent in own[1:])]
