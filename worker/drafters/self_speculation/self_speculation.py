"""Two levels of speculation: a cheap proposer drafts trees, the target with a partial cache checks them in rounds.

The agreed chain goes to the target with the full cache (TokenSwift 3.1 to 3.3, algorithm 1 of TriForce). Every level
draws with the coupled noise, so the output has no bias.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from swiftbatch.metrics.counters import timed
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest, ReadRows
from swiftbatch.worker.drafters.self_speculation.draft_chain import Chain, ChainTree, Proposer, Round, assemble
from swiftbatch.worker.drafters.self_speculation.round_planner import Planner
from swiftbatch.worker.forward.forward_interface import DrawChains
from swiftbatch.worker.forward.step_costs import seconds_now
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.kv.sparse_cache import SparseCache, SparseCacheFactory
from swiftbatch.worker.sampling.batch_sampler import Sampler
from swiftbatch.worker.sampling.draft_tree import DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence


@dataclass
class _Tracked:
    cache: FullKVCache
    partial: SparseCache | None  # None: no room for it, so no round is planned
    sampler: Sampler
    hidden: torch.Tensor | None = None  # [hidden] of the last verified row
    proposed: ChainTree = field(default_factory=ChainTree)


class SelfSpeculationDrafter(Drafter):
    reads_caches = True
    phases = ("follow", "propose", "check")

    def __init__(
        self,
        target: TargetModel,
        proposer: Proposer,
        planner: Planner,
        new_cache: SparseCacheFactory,
        budget: int,
        num_alternatives: int = 1,
    ) -> None:
        """Rounds see `budget` entries; `num_alternatives` candidates for the last drawn token are verified in full."""
        self.needs_top_k = proposer.needs_top_k
        self.needs_hidden = proposer.needs_hidden
        self._target = target
        self._batch_sampler = target.forwards.new_batch_sampler()
        self._proposer = proposer
        self._planner = planner
        self._new_cache, self._budget = new_cache, budget
        self._new_entries = target.forwards.room_for(new_cache, budget)
        self._num_alternatives = num_alternatives
        reads_rounds = num_alternatives > 1 or self.needs_hidden  # logits or hidden states of their rows
        self._draw_chains = None if reads_rounds else target.forwards.draw_chains
        self._tracked: dict[str, _Tracked] = {}

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        partial = self._new_partial(sequence)
        self._proposer.start(sequence)
        self._tracked[sequence.sequence_id] = _Tracked(cache, partial, self._batch_sampler.sampler(sequence))

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        chains = [self._open(request, len(requests)) for request in requests]
        while active := [chain for chain in chains if chain.wants_round]:
            num_bare = min(chain.num_bare_rounds for chain in active)
            if self._draw_chains is not None and num_bare:
                self._draw(self._draw_chains, active, num_bare)
            else:
                self._round(active)
        return self._close(chains)

    def learn(self, rows: ReadRows) -> None:
        self._proposer.learn(rows)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        tracked = self._tracked[sequence.sequence_id]
        tracked.hidden = None if verification.hidden is None else verification.hidden[-1]
        self._proposer.update(sequence, verification)
        self._planner.observe(tracked.proposed, verification.proposed_path)
        for round_ in tracked.proposed.rounds:
            self.counters.num_rounds += 1
            self.counters.num_checked_nodes += round_.num_nodes
            self.counters.num_agreed_nodes += len(round_.path)

    def catch_up(self, sequence: Sequence, num_chunks: int) -> bool:
        """Add up to `num_chunks` chunks to a sequence's partial cache; return whether the partial cache is complete."""
        tracked = self._tracked[sequence.sequence_id]
        with timed(self.counters.seconds, "follow"):
            return tracked.partial is None or tracked.partial.catch_up(tracked.cache, num_chunks)

    def rounds_of(self, sequence: Sequence) -> list[Round]:
        return self._tracked[sequence.sequence_id].proposed.rounds

    def stop(self, sequence: Sequence) -> None:
        self._proposer.stop(sequence)
        del self._tracked[sequence.sequence_id]

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return self._planner.state() | self._proposer.state(sequence)

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        before = self._planner.state()
        self._planner.restore(state)
        try:
            self._proposer.restore(sequence, state)
        except ValueError:
            self._planner.restore(before)
            raise

    def _open(self, request: DraftRequest, num_sequences: int) -> Chain:
        """Begin a chain, with an up-to-date partial cache if the plan has rounds."""
        sequence, tracked = request.sequence, self._tracked[request.sequence.sequence_id]
        plan = self._planner.plan(tracked.cache.length, num_sequences, request.max_depth)
        if tracked.partial is None:
            plan = replace(plan, num_rounds=0)
        elif plan.num_rounds:
            with timed(self.counters.seconds, "follow"):
                tracked.partial.follow(tracked.cache, lambda position: self._queries(sequence, position))
        if self.needs_hidden and tracked.hidden is None and tracked.cache.length > 0:
            tracked.hidden = self._last_hidden(sequence, tracked.cache)
        max_nodes = min(request.max_nodes, self._planner.max_nodes)
        return Chain(
            sequence,
            tracked.sampler,
            tracked.partial,
            tracked.hidden,
            plan,
            max_nodes,
            request.max_depth,
            keeps_logits=self._num_alternatives > 1,
        )

    def _new_partial(self, sequence: Sequence) -> SparseCache | None:
        budget = min(self._budget, sequence.max_length)
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
        started = seconds_now()
        with timed(self.counters.seconds, "propose"):
            below = self._proposer.propose(chains, [(self._num_below(chain), chain.depth_left) for chain in chains])
        seconds = (seconds_now() - started) / len(chains)
        for chain, tree in zip(chains, below, strict=True):
            tracked = self._tracked[chain.sequence.sequence_id]
            tracked.proposed = assemble(chain, tree, self._num_alternatives, seconds)
        return [self._tracked[chain.sequence.sequence_id].proposed.tree for chain in chains]

    def _num_below(self, chain: Chain) -> int:
        num_trees = self._num_alternatives if chain.num_tokens else 1
        return (chain.num_nodes - chain.num_tokens - (num_trees - 1)) // num_trees

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
