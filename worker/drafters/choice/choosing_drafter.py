"""A drafter with several ways to draft and a policy that chooses among them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch

from swiftbatch.worker.drafters.choice.policy import PLAIN, Policy, StepCall
from swiftbatch.worker.drafters.choice.repeated_text import RepeatWay
from swiftbatch.worker.drafters.choice.ways import ChainWay, DraftWay, MeasuredWay, PartialCacheWay, PlainWay, TreeWay
from swiftbatch.worker.drafters.drafter_interface import (
    MOST_GUESSED,
    DraftCounters,
    Drafter,
    DraftRequest,
    ReadRows,
    TreeDrafter,
    Verified,
)
from swiftbatch.worker.drafters.self_speculation import RoundPlan, SelfSpeculationDrafter
from swiftbatch.worker.forward.step_costs import Costs, StepCosts, seconds_now
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence

TREE, CHAIN, REPEAT = "tree", "chain", "repeat"
MASK_SECONDS = 3e-4  # to find the tokens that a rule allows behind a row
HEARD = 512  # tokens in front of a trial, whose hidden states are taken


class ChoosingDrafter(Drafter):
    """Drafts each step the way that brings most tokens per second."""

    def __init__(
        self,
        costs: StepCosts,
        trees: DraftWay,
        repeats: RepeatWay | None = None,
        chains: ChainWay | None = None,
        others: dict[str, DraftWay] | None = None,
        clock: Callable[[], float] = seconds_now,
    ) -> None:
        """Choose between plain decoding, trees, chains and others; `repeats` take a step wherever they promise more."""
        self.policy, self._costs, self._clock = Policy(), costs, clock
        self.ways: dict[str, DraftWay] = {PLAIN: PlainWay(costs), TREE: trees, **(others or {})}
        if chains is not None:
            self.ways[CHAIN] = chains
        self._repeats, self._chains = repeats, chains
        self._all = [*self.ways.values(), *([repeats] if repeats is not None else [])]
        self.needs_top_k = any(way.needs_top_k for way in self._all)
        self.needs_hidden = any(way.needs_hidden for way in self._all)
        self.feature_layers = trees.feature_layers
        self.learns_rows = any(way.learns_rows for way in self._all)
        self._counted = trees if chains is None else chains
        self.phases = self._counted.phases
        self.way, self._newest = PLAIN, self.ways[PLAIN]  # the newest step's way
        self._sequences: list[Sequence] = []  # the newest step's sequences
        self._is_chosen = False  # it has been proposed for and not verified yet
        self._begun = 0.0

    @property
    def draft_kind(self) -> str:
        return self._newest.draft_kind

    @property
    def reads_caches(self) -> bool:  # type: ignore[override]
        return self.ways[TREE].reads_caches

    def row_prices(self, num_rows: int, length: int) -> Many[float]:
        costs, rate = self._costs.as_routed(), self.policy.rate
        own = costs.at(2, length) - costs.at(1, length) - costs.shared_seconds(2) + costs.shared_seconds(1)
        seconds, before = own + MASK_SECONDS, costs.shared_seconds(num_rows)
        found = (costs.shared_seconds(num_rows + n) - before + n * seconds for n in range(1, MOST_GUESSED + 1))
        return [rate * each / (1 + rate * MASK_SECONDS) for each in found]  # an accepted row needs its mask anyway

    @property
    def wants_candidates(self) -> bool:
        return self._newest.wants_candidates

    @property
    def wants_hidden(self) -> bool:
        return self.needs_hidden and any(
            way.needs_hidden and (name == self.way or self.policy.num_tokens_to_trial(name) < HEARD)
            for name, way in self.ways.items()
        )

    @property
    def counters(self) -> DraftCounters:
        return self._counted.counters

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        for way in self._all:
            way.start(sequence, cache)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        if not requests:
            return []
        sequences = [request.sequence for request in requests]
        if not (self._is_chosen and sequences == self._sequences):
            self._begun, self._sequences, self._is_chosen = self._clock(), sequences, True
            self._choose(requests)
        trees = self._newest.propose(requests)
        if trees is None:
            self.way, self._newest = TREE, self.ways[TREE]
            trees = self._newest.propose(requests)
            assert trees is not None
        return trees

    def pass_plain(self, most: int) -> int:
        if self.way != PLAIN or self.wants_hidden:
            return 0
        most = min(most, self.policy.most_steps - 1)
        return most if self._repeats is None else min(most, self._repeats.most_steps - 1)

    def learn(self, rows: ReadRows) -> None:
        for way in self._all:
            way.learn(rows)

    def read(self, sequence: Sequence, position: int, hidden: torch.Tensor) -> None:
        for way in self._all:
            way.read(sequence, position, hidden)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        self.update_all([(sequence, verification)])

    def update_all(self, verified: Many[Verified]) -> None:
        newest, self._is_chosen = self._newest, False
        newest.update_all(verified)
        for way in self._all:
            if way is not newest:
                way.hear(verified)
        if verified:
            self.policy.observe(self.way, _call_of(verified), self._clock() - self._begun, newest.expected_seconds)

    def stop(self, sequence: Sequence) -> None:
        for way in self._all:
            way.stop(sequence)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        """Return what ways keep. Rates are left out: another machine soon finds its own."""
        kept = [self.ways[TREE], *([] if self._chains is None else [self._chains])]
        return {name: array for way in kept for name, array in way.state(sequence).items()}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        before = {} if self._chains is None else self._chains.state(sequence)
        if self._chains is not None:
            self._chains.restore(sequence, state)
        try:
            self.ways[TREE].restore(sequence, state)
        except ValueError:
            if self._chains is not None:
                self._chains.restore(sequence, before)
            raise

    def _choose(self, requests: list[DraftRequest]) -> None:
        if not any(request.max_nodes for request in requests):
            self.way, self._newest = PLAIN, self.ways[PLAIN]
            return
        times, otherwise = self.policy.times, requests[0].overhead

        def promises() -> dict[str, float | None]:
            return {name: way.promise(requests, times.beside(name, otherwise)) for name, way in self.ways.items()}

        self.way = self.policy.choose(requests, promises)
        self._newest = self.ways[self.way]
        if self._repeats is not None and self._repeats.pays(requests, times.beside(TREE, otherwise), self.policy.rate):
            self.way, self._newest = REPEAT, self._repeats


def _call_of(verified: Many[Verified]) -> StepCall:
    num_tokens = num_steps = num_nodes = 0
    for _, verification in verified:
        num_guessed = len(verification.path) - len(verification.proposed_path)  # no way drafted them
        num_tokens += len(verification.committed_ids) - num_guessed
        num_steps = max(num_steps, verification.num_steps)
        num_nodes += len(verification.tree)
    return StepCall(num_tokens, num_steps, num_nodes)


def with_trees(drafter: TreeDrafter, costs: Costs) -> ChoosingDrafter:
    """Choose between plain decoding and the trees of a drafter."""
    return ChoosingDrafter(costs(), TreeWay(drafter, costs()))


def with_measured(drafter: Drafter, costs: Costs) -> ChoosingDrafter:
    """Choose between plain decoding and the drafts of a drafter, by trials alone."""
    return ChoosingDrafter(costs(), MeasuredWay(drafter))


def with_rounds(drafter: SelfSpeculationDrafter, plan: RoundPlan, costs: Costs) -> ChoosingDrafter:
    """Choose between plain decoding and the chains that a drafter draws by a plan."""
    return ChoosingDrafter(costs(), PartialCacheWay(drafter, plan))
