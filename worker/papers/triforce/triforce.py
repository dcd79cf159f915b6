"""TriForce (Sun et al. 2024): a small draft model proposes, the target with a summarised cache checks.

The draft model proposes chains, or chains with siblings (4.2, 4.3, 5.2.3). The paper's retrieval cache, which leaves
out what it does not retrieve, is one of those that `bench` compares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from swiftbatch.worker.caches.partial_cache import PartialCacheFactory
from swiftbatch.worker.caches.summary_cache import SummaryKVCache
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.drafters.two_level.chain import Chain, Proposer, RoundPlan
from swiftbatch.worker.drafters.two_level.two_level_drafter import TwoLevelDrafter
from swiftbatch.worker.drafters.two_level.two_level_plan import planner_of
from swiftbatch.worker.drawing.draft_tree import ROOT, DraftTree
from swiftbatch.worker.drawing.drawing import Drawing, penalised
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.papers.triforce.draft_model import DraftModel, window_of
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel


@dataclass(frozen=True)
class TriForceOptions:
    """The paper's parameters. Defaults are what is fastest; the paper's own are in `bench/variants.py`."""

    cache: PartialCacheFactory = SummaryKVCache  # what the middle level sees
    budget: int = ENGINES["triforce"].partial_budget
    gammas: tuple[int, int] | None = None  # gamma_1, gamma_2; None: as many as pay
    width: int = 1  # candidates at every depth of the first level


DEFAULTS = TriForceOptions()


def triforce(
    target: TargetModel, costs: Costs, parts_folder: Path | None, options: TriForceOptions = DEFAULTS
) -> TwoLevelDrafter:
    """A `DrafterFactory`. Raises ModelError where there is no draft model for this target."""
    draft_model = DraftModel.load(parts_folder, target)
    proposer = DraftModelProposer(draft_model, options.width, target.forwards.new_drawing())
    plan = None if options.gammas is None else hierarchy(*options.gammas, options.width)
    planner = planner_of(plan, costs, options.budget, proposer.node_seconds)
    return TwoLevelDrafter(target, proposer, planner, options.cache, options.budget)


def hierarchy(gamma_1: int, gamma_2: int, width: int) -> RoundPlan:
    """Algorithm 1: `gamma_1` draft tokens per middle verification, until there are at least `gamma_2` tokens.

    gamma_1 = 0 is self-speculation with the partial cache alone.
    """
    return RoundPlan(gamma_2, gamma_1 * width, gamma_2, gamma_2)


class DraftModelProposer(Proposer):
    """Draws with the coupled noise, as the target will; sequences of a batch share the draft model's forwards."""

    def __init__(self, draft_model: DraftModel, width: int, drawing: Drawing) -> None:
        """`width` candidates at every depth: the chain goes on below the drawn one, the others have no children.

        Chains' samplers are of `drawing`.
        """
        self.node_seconds = draft_model.token_seconds() / width  # seconds of each proposed node
        self._draft_model = draft_model
        self._width = width
        self._drawing = drawing

    def start(self, sequence: Sequence) -> None:
        self._draft_model.start(sequence.sequence_id)

    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        trees = [_Tree(chain, *limit, self._width) for chain, limit in zip(chains, limits, strict=True)]
        while growing := {tree.sequence_id: tree for tree in trees if tree.wants_more}:
            windows = {name: tree.window() for name, tree in growing.items()}
            found = self._draft_model.logits(windows)
            roots, samplers = [DraftTree()] * len(found), [tree.sampler for tree in growing.values()]
            walks = self._drawing.walks(samplers, roots, [logits[None] for logits in found])
            for tree, logits, walk in zip(growing.values(), found, walks, strict=True):
                tree.grow(logits, walk.drawn[0] if walk.drawn else 0)  # a damaged draft model ends no job
        return [tree.tree for tree in trees]

    def stop(self, sequence: Sequence) -> None:
        self._draft_model.stop(sequence.sequence_id)


class _Tree:
    """Nodes below a chain's newest token, one behind the other, with siblings, while they grow."""

    def __init__(self, chain: Chain, max_nodes: int, max_depth: int, width: int) -> None:
        self.tree = DraftTree()
        self.sequence_id = chain.sequence.sequence_id
        self._sequence, self.sampler = chain.sequence, chain.sampler
        if max_nodes > 0 and max_depth > 0:
            self._sequence = chain.sequence.fork()
            self.sampler = chain.sampler.fork(self._sequence)
        self._num_committed = len(chain.sequence) - chain.num_tokens
        self._max_nodes = max_nodes
        self._depth_left = max_depth
        self._width = width
        self._newest = ROOT

    @property
    def wants_more(self) -> bool:
        return self._depth_left > 0 and len(self.tree) < self._max_nodes

    def window(self) -> np.ndarray:
        return window_of(self._sequence.token_ids, self._num_committed)

    def grow(self, logits: torch.Tensor, token_id: int) -> None:
        """Add the chain's next token, drawn from the draft model's logits `[vocab]`, and the next best beside it."""
        candidates = self._siblings(logits) if self._width > 1 else []
        parent, self._newest = self._newest, len(self.tree)
        others = [other for other in candidates if other != token_id][: self._width - 1]
        for candidate in [token_id, *others][: self._max_nodes - len(self.tree)]:
            self.tree.token_ids.append(candidate)
            self.tree.parents.append(parent)
        self._sequence.extend([token_id])
        self._depth_left -= 1

    def _siblings(self, logits: torch.Tensor) -> list[int]:
        [ranked] = CandidateRanker(self._sequence).rank_logits(penalised(self.sampler, logits)[None], [1], self._width)
        return [token_id for _, token_id in ranked]
