"""Two levels of speculation: a cheap proposer drafts trees, the target with a partial cache checks them in rounds.

The agreed chain goes to the target with the full cache (TokenSwift 3.1 to 3.3, algorithm 1 of TriForce). Every level
draws with the coupled noise, so the output has no bias.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from swiftbatch.metrics.counters import timed
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest, Learner
from swiftbatch.worker.drafters.engine_options import CacheName, PartialCacheOptions
from swiftbatch.worker.forward.forward_interface import DecodedChain, DrawChains, SparseRows, partial_rows, row_ahead
from swiftbatch.worker.forward.step_costs import seconds_now
from swiftbatch.worker.forward.target_model import RowOutputs, TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.importance_cache import ImportanceKVCache, RetrievalKVCache
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.kv.sparse_cache import SparseCache, SparseCacheFactory, SummaryKVCache
from swiftbatch.worker.sampling.batch_sampler import Sampler
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree, Verification, Walk
from swiftbatch.worker.sampling.sequence import Sequence


@dataclass(frozen=True)
class RoundPlan:
    """Limits of one proposal. Without rounds, the proposer's tree goes to the full verification."""

    num_rounds: int
    num_round_nodes: int  # size of a tree that a round checks
    chain_length: int  # no further round begins after so many tokens
    num_nodes: int  # the chain and the tree below it
    is_first_bare: bool = False  # the first round checks no tree, as in the paper


NO_ROUNDS = RoundPlan(0, 0, 0, 0)


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
    ) -> None:
        self.sequence = sequence.fork()
        self.sampler = sampler.fork(self.sequence)
        self.hidden = hidden  # [hidden] of the row in front of the newest token, if known
        self.plan = plan
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
        self.sequence.extend(walk.drawn)
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


def assemble(chain: Chain, below: DraftTree) -> ChainTree:
    """Join a chain and the tree below its newest token."""
    length, tree = chain.num_tokens, DraftTree.chain(chain.drawn)
    room = max(0, chain.num_nodes - length)
    tree.token_ids.extend(below.token_ids[:room])
    tree.parents.extend(length - 1 if parent == ROOT else length + parent for parent in below.parents[:room])
    return ChainTree(tree, length, chain.rounds)


@dataclass
class _Tracked:
    cache: FullKVCache
    partial: SparseCache | None  # None: no room for it, so no round is planned
    sampler: Sampler
    hidden: torch.Tensor | None = None  # [hidden] of the last verified row
    proposed: ChainTree = field(default_factory=ChainTree)


PARTIAL_CACHES: dict[CacheName, SparseCacheFactory] = {"summary": SummaryKVCache, "importance": ImportanceKVCache}


def partial_cache(options: PartialCacheOptions) -> SparseCacheFactory:
    """Return the factory of the partial cache that the options choose."""
    if (known := PARTIAL_CACHES.get(options.cache)) is not None:
        return known
    return functools.partial(
        RetrievalKVCache,
        chunk_size=options.chunk_size,
        stride=options.stride,
        rebuild_below=options.rebuild_below,
    )


class SelfSpeculationDrafter(Drafter):
    """Drafts by `plan`, which the owner may change before any step."""

    reads_caches = True
    phases = ("follow", "propose", "check")

    def __init__(
        self,
        target: TargetModel,
        proposer: Proposer,
        new_cache: SparseCacheFactory,
        budget: int,
        plan: RoundPlan = NO_ROUNDS,
        budget_of: Callable[[int], int] | None = None,
    ) -> None:
        """Rounds see `budget` entries, or as many as `budget_of` returns for a prompt's number of tokens, up to it."""
        self.plan = plan
        self.needs_top_k = proposer.needs_top_k
        self.needs_hidden = proposer.needs_hidden
        self._target = target
        self._batch_sampler = target.forwards.new_batch_sampler()
        self._proposer = proposer
        self._new_cache, self.budget_of = new_cache, budget_of or (lambda num_prompt_tokens: budget)
        self._new_entries = target.forwards.room_for(new_cache, budget)
        is_drawn_step_by_step = self.needs_hidden or target.forwards.arena is not None  # a GPU's chains are of slots
        self._draw_chains = None if is_drawn_step_by_step else target.forwards.draw_chains
        self._tracked: dict[str, _Tracked] = {}

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        partial = self._new_partial(sequence)
        self._proposer.start(sequence)
        self._tracked[sequence.sequence_id] = _Tracked(cache, partial, self._batch_sampler.sampler(sequence))

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        chains = [self._open(request) for request in requests]
        while active := [chain for chain in chains if chain.wants_round]:
            num_bare = min(chain.num_bare_rounds for chain in active)
            if self._draw_chains is not None and num_bare:
                self._draw(self._draw_chains, active, num_bare)
            else:
                self._round(active)
        return self._close(chains)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        tracked = self._tracked[sequence.sequence_id]
        tracked.hidden = None if verification.hidden is None else verification.hidden[-1]
        self._proposer.update(sequence, verification)
        if tracked.partial is not None and (num_checked := tracked.proposed.chain_length):
            num_accepted = min(num_checked, verification.num_accepted_tokens)
            tracked.partial.observe(num_checked, num_accepted, tracked.cache.length)
        for round_ in tracked.proposed.rounds:
            self.counters.num_rounds += 1
            self.counters.num_checked_nodes += round_.num_nodes
            self.counters.num_agreed_nodes += len(round_.path)
        tracked.proposed = ChainTree()

    def catch_up(self, sequence: Sequence, num_chunks: int) -> bool:
        """Add up to `num_chunks` chunks to a sequence's partial cache; return whether the partial cache is complete."""
        tracked = self._tracked[sequence.sequence_id]
        with timed(self.counters.seconds, "follow"):
            return tracked.partial is None or tracked.partial.catch_up(tracked.cache, num_chunks)

    def proposed(self, sequence: Sequence) -> ChainTree:
        return self._tracked[sequence.sequence_id].proposed

    def stop(self, sequence: Sequence) -> None:
        self._proposer.stop(sequence)
        del self._tracked[sequence.sequence_id]

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        tracked = self._tracked.get(sequence.sequence_id)  # None: the sequence is another drafter's
        partial = None if tracked is None else tracked.partial
        return self._proposer.state(sequence) | ({} if partial is None else partial.state())

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        if (partial := self._tracked[sequence.sequence_id].partial) is None:
            return self._proposer.restore(sequence, state)
        before = partial.state()
        partial.restore(state)
        try:
            self._proposer.restore(sequence, state)
        except ValueError:
            partial.restore(before)
            raise

    def _open(self, request: DraftRequest) -> Chain:
        """Begin a chain, with an up-to-date partial cache if the plan has rounds."""
        sequence, tracked = request.sequence, self._tracked[request.sequence.sequence_id]
        plan = self.plan
        if tracked.partial is None:
            plan = replace(plan, num_rounds=0)
        elif plan.num_rounds:
            with timed(self.counters.seconds, "follow"):
                tracked.partial.follow(tracked.cache, lambda position: self._queries(sequence, position))
        if self.needs_hidden and tracked.hidden is None and tracked.cache.length > 0:
            tracked.hidden = self._last_hidden(sequence, tracked.cache)
        return Chain(
            sequence,
            tracked.sampler,
            tracked.partial,
            tracked.hidden,
            plan,
            request.max_nodes,
            request.max_depth,
        )

    def _new_partial(self, sequence: Sequence) -> SparseCache | None:
        budget = min(self.budget_of(sequence.num_prompt_tokens), sequence.max_length)
        try:
            return self._new_cache(self._target.cache_shape, budget, sequence, self._new_entries)
        except KVRoomError:  # a draft less is no reason to refuse a job
            return None

    def _draw(self, draw_chains: DrawChains, chains: list[Chain], num_rounds: int) -> None:
        started = seconds_now()
        with timed(self.counters.seconds, "check"):
            rows, samplers = [chain.row_ahead() for chain in chains], [chain.sampler for chain in chains]
            drawn = draw_chains(rows, samplers, num_rounds)
        seconds = (seconds_now() - started) / (len(chains) * num_rounds)
        for chain, tokens in zip(chains, drawn, strict=True):
            chain.extend(tokens, seconds)

    def _round(self, chains: list[Chain]) -> None:
        """Propose below every chain and check there with the partial caches."""
        started = seconds_now()
        limits = [(chain.num_round_nodes, chain.depth_left - 1) for chain in chains]
        with timed(self.counters.seconds, "propose"):
            trees = self._proposer.propose(chains, limits)
        with timed(self.counters.seconds, "check"):
            outputs = self._target.check([chain.rows(tree) for chain, tree in zip(chains, trees, strict=True)])
            walks = self._batch_sampler.walks([chain.sampler for chain in chains], trees, outputs.logits)
            for chain, walk, rows in zip(chains, walks, outputs, strict=True):
                chain.advance(walk, rows)
        seconds = (seconds_now() - started) / len(chains)
        for chain, tree, walk in zip(chains, trees, walks, strict=True):
            chain.rounds.append(Round(len(tree), walk.path, seconds))

    def _close(self, chains: list[Chain]) -> list[DraftTree]:
        with timed(self.counters.seconds, "propose"):
            limits = [(chain.num_nodes - chain.num_tokens, chain.depth_left) for chain in chains]
            below = self._proposer.propose(chains, limits)
        for chain, tree in zip(chains, below, strict=True):
            tracked = self._tracked[chain.sequence.sequence_id]
            tracked.proposed = assemble(chain, tree)
        return [self._tracked[chain.sequence.sequence_id].proposed.tree for chain in chains]

    def _last_hidden(self, sequence: Sequence, cache: FullKVCache) -> torch.Tensor:
        """Compute the hidden state `[hidden]` that the newest token was drawn from, if no verification returned it."""
        last = cache.length - 1
        with cache.replayed(last) as before:
            rows = tree_rows(before, int(sequence.token_ids[last]), DraftTree())
            return self._target.verify([rows])[0].hidden[0]

    def _queries(self, sequence: Sequence, position: int) -> torch.Tensor:
        cache = self._tracked[sequence.sequence_id].cache
        with cache.replayed(position) as before:
            return self._target.queries(before, int(sequence.token_ids[position]))
