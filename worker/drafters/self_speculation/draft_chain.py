"""The chain of tokens that the target with a partial cache drew in rounds; also proposers and the final tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from swiftbatch.worker.drafters.drafter_interface import Learner
from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.forward.forward_interface import DecodedChain, SparseRows, partial_rows, row_ahead
from swiftbatch.worker.forward.target_model import RowOutputs
from swiftbatch.worker.kv.sparse_cache import SparseCache
from swiftbatch.worker.sampling.batch_sampler import Sampler, penalised
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree, Walk
from swiftbatch.worker.sampling.sequence import Sequence


@dataclass(frozen=True)
class RoundPlan:
    """Limits of one proposal. Without rounds, the proposer's tree goes to the full verification."""

    num_rounds: int
    num_round_nodes: int  # size of a tree that a round checks
    chain_length: int  # no further round begins after so many tokens
    num_nodes: int  # the chain and the tree below it
    is_first_bare: bool = False  # the first round checks no tree, as in the paper


@dataclass(frozen=True)
class Round:
    """One forward with the partial cache: how many nodes it checked and accepted, and how long it took."""

    num_nodes: int
    path: list[int]
    seconds: float


class Chain:
    """Drawn tokens of one proposal, with copies of the sequence and its sampler that include these tokens."""

    def __init__(
        self,
        sequence: Sequence,
        sampler: Sampler,
        cache: SparseCache | None,
        hidden: torch.Tensor | None,
        plan: RoundPlan,
        max_nodes: int,
        max_depth: int,
        keeps_logits: bool = False,
    ) -> None:
        """`keeps_logits`: keep the logits of the newest token's row."""
        self.sequence = sequence.fork()
        self.sampler = sampler.fork(self.sequence)
        self.hidden = hidden  # [hidden] of the row in front of the newest token, if known
        self.logits: torch.Tensor | None = None  # [vocab] after penalty, the newest token's
        self.plan = plan
        self._keeps_logits = keeps_logits
        self._cache = cache
        self._num_committed = len(sequence)
        self._max_nodes = max_nodes
        self._max_depth = min(max_depth, max_nodes)
        self.rounds: list[Round] = []

    @property
    def newest(self) -> int:
        return int(self.sequence.token_ids[-1])

    @property
    def drawn(self) -> list[int]:
        token_ids: list[int] = self.sequence.token_ids[self._num_committed :].tolist()
        return token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.sequence) - self._num_committed

    @property
    def depth_left(self) -> int:
        return self._max_depth - self.num_tokens

    @property
    def num_nodes(self) -> int:
        """Return the largest number of nodes of a proposal, the chain included."""
        return min(max(self.plan.num_nodes, self.num_tokens), self._max_nodes)

    @property
    def wants_round(self) -> bool:
        return self._num_rounds_left > 0

    @property
    def num_bare_rounds(self) -> int:
        """Return the number of remaining rounds if none of them checks a tree, else 0."""
        return 0 if self.plan.num_round_nodes else self._num_rounds_left

    @property
    def num_round_nodes(self) -> int:
        return 0 if self.plan.is_first_bare and not self.rounds else self.plan.num_round_nodes

    @property
    def _num_rounds_left(self) -> int:
        length = min(self.plan.chain_length, self._max_depth)
        return min(length - self.num_tokens, self.plan.num_rounds - len(self.rounds))

    def row_ahead(self) -> SparseRows:
        assert self._cache is not None
        return row_ahead(self._cache, self.newest, len(self.sequence) - 1)

    def extend(self, drawn: DecodedChain, seconds: float) -> None:
        assert self._cache is not None
        self._cache.keep_sampled(len(drawn.token_ids))
        self.sequence.extend(drawn.token_ids)
        self.rounds += [Round(0, [], seconds)] * len(drawn.token_ids)
        if drawn.has_failed:
            self._max_depth = self.num_tokens

    def rows(self, tree: DraftTree) -> SparseRows:
        assert self._cache is not None
        return partial_rows(self._cache, self.newest, len(self.sequence) - 1, tree)

    def advance(self, walk: Walk, outputs: RowOutputs) -> None:
        assert self._cache is not None
        last_row = walk.path[-1] + 1 if walk.path else 0
        self._cache.keep(walk.path)
        self.hidden = outputs.hidden[last_row]
        self.sequence.extend(walk.drawn[:-1])
        if self._keeps_logits:  # a penalty takes as long as the draw itself
            self.logits = penalised(self.sampler, outputs.logits[last_row])
        self.sequence.extend(walk.drawn[-1:])
        if walk.failed_row is not None:  # nothing can be drawn behind the newest token
            self._max_depth = self.num_tokens


class Proposer(Learner, ABC):
    """Cheap proposer of the tokens after chains, which may be empty."""

    def start(self, sequence: Sequence) -> None:
        """Take in a new or resumed sequence."""

    @abstractmethod
    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        """Return one tree below each chain's newest token, within its limits: (number of nodes, depth).

        Trees may be empty. Changes no state.
        """


@dataclass(frozen=True)
class ChainTree:
    """A tree whose first `chain_length` nodes are the chain."""

    tree: DraftTree = field(default_factory=DraftTree)
    chain_length: int = 0
    rounds: list[Round] = field(default_factory=list)
    propose_seconds: float = 0.0  # time of the tree below the chain


def assemble(chain: Chain, below: DraftTree, num_alternatives: int, seconds: float) -> ChainTree:
    """Join a chain, the tree below its newest token, and copies below that token's alternatives."""
    length, max_nodes = chain.num_tokens, chain.num_nodes
    tree = DraftTree.chain(chain.drawn)
    _graft(tree, below, length - 1, max_nodes)
    for token_id in _alternatives(chain, num_alternatives):
        if len(tree) < max_nodes:
            tree.token_ids.append(token_id)
            tree.parents.append(length - 2)
            _graft(tree, below, len(tree) - 1, max_nodes)
    return ChainTree(tree, length, chain.rounds, seconds)


def _graft(tree: DraftTree, below: DraftTree, parent: int, max_nodes: int) -> None:
    first = len(tree)
    room = max(0, max_nodes - first)
    tree.token_ids.extend(below.token_ids[:room])
    tree.parents.extend(parent if p == ROOT else first + p for p in below.parents[:room])


def _alternatives(chain: Chain, num_alternatives: int) -> list[int]:
    if num_alternatives <= 1 or chain.logits is None:
        return []
    ranker = CandidateRanker(chain.sequence)
    [ranked] = ranker.rank_logits(chain.logits[None], [0], num_alternatives)
    return [token_id for _, token_id in ranked if token_id != chain.newest][: num_alternatives - 1]
