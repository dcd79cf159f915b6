"""The engine that chooses by itself: plain decoding, trees of recycled candidates, or chains drawn with scanned keys.

Beside these, `repeating` drafts what a text repeats of itself, wherever that promises more. Where a checkpoint has a
layer that predicts further tokens, `measured` tries that by turns, and stays with what is faster.

Where caches are short a tree costs next to nothing, and recycled candidates are free. Where they are long, the target
itself drafts, with scanned keys in place of all, and a forward verifies what it drew. Which of them brings most tokens
per second follows from measured costs, from how much of each was accepted, and from all sequences of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.auto.mtp_trials import TrialDrafter
from swiftbatch.worker.drafters.auto.plain_trials import DraftTrials
from swiftbatch.worker.drafters.auto.repeated_text import RepeatingDrafter
from swiftbatch.worker.drafters.catalogue import ENGINES, MTP, engine_entry
from swiftbatch.worker.drafters.drafter_interface import DraftCounters, Drafter, DraftRequest, ReadRows, Verified
from swiftbatch.worker.drafters.recycling.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.drafters.self_speculation.draft_chain import Chain, Proposer
from swiftbatch.worker.drafters.self_speculation.round_planner import (
    ON_A_CPU,
    RoundCosts,
    RoundsChoice,
    RoundsPlanner,
    costs_beside_a_gpu,
    costs_on_a_gpu,
)
from swiftbatch.worker.drafters.self_speculation.self_speculation import SelfSpeculationDrafter
from swiftbatch.worker.drafters.shared_budget import MUCH_LONGER, IdleDrafter, SharedBudget, lengths_of, names_of
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.scan_cache import SHORTEST_SCANNED, ScanKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import Verification

NUM_BEST = ENGINES["auto"].scanned_best  # keys that a query of a round sees exactly
ROUNDS_PER_PLAN, TREES_PER_PLAN = 8, 256  # steps: to plan takes a fifth of a short step
FIRST_PLAN = 4  # steps to the second one for new sequences: of these nothing is known at first
NEXT_PLAN = 64  # steps to the first one for sequences behind others like them that had trees
WORTH_A_PLAN = 4 * NEXT_PLAN  # tokens: what is sooner done gains less by rounds than a plan takes
CHUNKS_AT_ONCE = 128  # of all texts of a step that are taken in
ALWAYS_BETTER = 1.1  # times the other way's rate: a smaller gain is no reason to change


def auto(target: TargetModel, costs: Costs, parts_folder: Path | None) -> Drafter:
    """A `DrafterFactory`. Our own kernels scan keys where all layers see all; elsewhere there are trees and repeats."""
    recycling, rounds = TokenRecyclingDrafter(target, costs), round_costs(target)
    if recycling.budget is None:
        return recycling
    turns = None if target.forwards.draw_chains is None else DraftTrials()
    if rounds is None:
        repeating = RepeatingDrafter(recycling, recycling.budget.rate, recycling, recycling.budget, turns)
    else:
        otherwise = AutoDrafter(target, RoundsPlanner(costs(), rounds), recycling, recycling.budget)
        repeating = RepeatingDrafter(otherwise, otherwise.rate, recycling, recycling.budget, turns)
    predicting = _predicting(target, costs, parts_folder)
    return repeating if predicting is None else TrialDrafter(repeating, predicting)


def _predicting(target: TargetModel, costs: Costs, parts_folder: Path | None) -> Drafter | None:
    """The engine `mtp`, where the model has a layer for it and runs where that does; else None.

    On a GPU its room is planned, or it has none.
    """
    arena = target.forwards.arena
    if target.forwards.team is None and not (arena is not None and arena.holds_engine):
        return None
    files = target.files
    try:
        MTP.find(files.name, files.path, files.fingerprint, parts_folder)
        return engine_entry(MTP.engine).factory()(target, costs, parts_folder)
    except ModelError:
        return None


def round_costs(target: TargetModel) -> RoundCosts | None:
    """Return the costs of rounds; None where no kernel scans all keys that layers see, and where texts stay short.

    Layers with a state see all of a text by it: no part of their cache would do for drafts.
    """
    if target.forwards.has_windows or target.cache_shape.recurrent is not None:
        return None
    if target.forwards.team is not None:
        return ON_A_CPU
    arena = target.forwards.arena
    if arena is None or arena.longest_job < SHORTEST_SCANNED:
        return None
    costs_of = costs_on_a_gpu if arena.holds_all else costs_beside_a_gpu
    return costs_of(arena.shape.head_dim, arena.shape.dtype.itemsize)


class RecycledProposer(Proposer):
    """Small trees of recycled candidates, from the tables of a drafter that learns by itself."""

    def __init__(self, recycling: TokenRecyclingDrafter) -> None:
        self._recycling = recycling

    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        given = zip(chains, limits, strict=True)
        wanted = [(chain.sequence, *limit) for chain, limit in given if min(limit) > 0]
        trees = iter(self._recycling.trees(wanted) if wanted else ())
        return [next(trees) if min(limit) > 0 else DraftTree() for limit in limits]


class AutoDrafter(IdleDrafter):
    """Two drafters, of which one proposes for all sequences of a step; both have the same tables."""

    needs_top_k = True
    phases = SelfSpeculationDrafter.phases

    def __init__(
        self, target: TargetModel, planner: RoundsPlanner, recycling: TokenRecyclingDrafter, budget: SharedBudget
    ) -> None:
        self._recycling, self._budget, self._planner = recycling, budget, planner
        self._chains = SelfSpeculationDrafter(target, RecycledProposer(recycling), self._planner, ScanKVCache, NUM_BEST)
        arena = target.forwards.arena
        self._most_scanned = math.inf if arena is None else arena.num_drafted
        self._rounds: RoundsChoice | None = None  # of the coming steps; None: they have trees
        self._names: list[str] = []  # of the sequences that the plan is for
        self._were_drafts_allowed = True  # by the budget, when it was made
        self._num_steps = 0  # since then
        self._longest_planned = 0  # text of the sequences at the last plan, in tokens
        self._steps_per_plan = FIRST_PLAN
        self._caches_outside: dict[str, FullKVCache] = {}  # of sequences that no chain was drawn for yet
        self._is_chain = False  # what was proposed last

    @property
    def draft_kind(self) -> str:
        return "chain" if self._is_chain else "tree"

    @property
    def wants_candidates(self) -> bool:
        return self._is_chain or self._recycling.wants_candidates

    @property
    def counters(self) -> DraftCounters:
        return self._chains.counters

    def rate(self, requests: list[DraftRequest]) -> float:
        """The tokens per second of all that the plan promises."""
        return self._budget.rate(requests) if self._rounds is None else self._rounds.rate

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self._recycling.start(sequence, cache)
        self._caches_outside[sequence.sequence_id] = cache

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        if self._stays_idle(requests):
            return [DraftTree()] * len(requests)
        if requests:
            self._plan(requests)
        self._is_chain = self._rounds is not None and self._are_scanned(requests)
        if self._rounds is None or not self._is_chain:
            return self._recycling.propose(requests)
        self._budget.clock.begin(self._planner.begin(self._rounds, lengths_of(requests)), "chain")
        trees = self._chains.propose(requests)
        drawing = (round_.seconds for request in requests for round_ in self._chains.rounds_of(request.sequence))
        self._budget.clock.expect(sum(drawing))
        return trees

    @property
    def promises_drafts(self) -> bool:
        return self._rounds is not None or self._budget.promises_drafts

    def rest(self, most: int) -> int:
        if not self._budget.are_drafts_allowed:
            return self._budget.rest(most)
        if self._rounds is not None or self._num_steps + 1 >= self._steps_per_plan:
            return 0
        num_steps = self._budget.rest(most)  # a plan may wait for the end of a rest
        self._num_steps += num_steps
        return num_steps

    def learn(self, rows: ReadRows) -> None:
        self._recycling.learn(rows)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        self.update_all([(sequence, verification)])

    def update_all(self, verified: Many[Verified]) -> None:
        if not self._is_chain:
            self._recycling.update_all(verified)
            return
        self._recycling.take(verified)
        for sequence, verification in verified:
            self._chains.update(sequence, verification)
            for round_ in self._chains.rounds_of(sequence):
                self._budget.learn(sequence, round_.num_nodes, round_.path)

    def stop(self, sequence: Sequence) -> None:
        if self._caches_outside.pop(sequence.sequence_id, None) is None:
            self._chains.stop(sequence)
        self._recycling.stop(sequence)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        acceptance = {"tree_acceptance": self._budget.state(sequence)}
        return self._recycling.state(sequence) | self._planner.state() | acceptance

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        before = self._planner.state(), self._budget.state(sequence)
        self._planner.restore(state)
        try:
            self._budget.restore(sequence, state.get("tree_acceptance", np.empty(0)))
            self._recycling.restore(sequence, state)
        except ValueError:
            self._planner.restore(before[0])
            self._budget.restore(sequence, before[1])
            raise

    def _stays_idle(self, requests: list[DraftRequest]) -> bool:
        """Return whether the coming step drafts nothing, and no plan is due; then count it."""
        if self._rounds is not None or self._num_steps + 1 >= self._steps_per_plan or names_of(requests) != self._names:
            return False
        if not self._budget.rests(requests):
            return False
        self._num_steps += 1
        self._is_chain = self._recycling.is_drafting = False
        return True

    def _plan(self, requests: list[DraftRequest]) -> None:
        """Choose what brings most tokens per second, every few steps and where other sequences share the step."""
        names = names_of(requests)
        is_new, has_switched = names != self._names, self._budget.are_drafts_allowed != self._were_drafts_allowed
        self._were_drafts_allowed = self._budget.are_drafts_allowed
        self._num_steps += 1
        if not is_new and not has_switched and self._num_steps < self._steps_per_plan:
            return
        longest = int(lengths_of(requests).max())
        if is_new and self._is_like_those_before(longest):
            is_new = False
            if max(request.sequence.num_remaining_tokens for request in requests) > WORTH_A_PLAN:
                self._steps_per_plan = min(self._steps_per_plan, NEXT_PLAN)
        self._names = names
        if self._num_steps < self._steps_per_plan and not is_new and not has_switched:
            return
        steps = FIRST_PLAN if is_new else 2 * self._steps_per_plan
        self._num_steps, self._longest_planned = 0, longest
        self._rounds = self._rounds_that_pay(requests)
        self._steps_per_plan = min(steps, self._most_steps_per_plan)
        if self._rounds is None and self._were_drafts_allowed:
            self._planner.forget()

    def _is_like_those_before(self, longest: int) -> bool:
        """Return whether trees were better than rounds for the sequences before these, with texts as long."""
        return self._rounds is None and 0 < longest < MUCH_LONGER * self._longest_planned

    @property
    def _most_steps_per_plan(self) -> int:
        """The most steps between two plans; 1 for rounds that were never tried here: what they take is a guess."""
        if self._rounds is None:
            return TREES_PER_PLAN
        return 1 if self._planner.is_new else ROUNDS_PER_PLAN

    def _rounds_that_pay(self, requests: list[DraftRequest]) -> RoundsChoice | None:
        """Return the best rounds if they bring more than trees, and save more time than taking in the texts costs."""
        lengths = lengths_of(requests)
        if lengths.max() < SHORTEST_SCANNED or len(requests) > self._most_scanned:
            return None  # nothing would be scanned, or not all have room for it
        if not self._budget.are_drafts_allowed:
            return None
        clock = self._budget.clock
        plain = clock.beside("plain", requests[0].overhead)
        beside = clock.beside("chain", otherwise=plain + clock.drafting_seconds)
        rounds = self._planner.best(lengths, self._budget.tokens(requests), beside)
        trees = self._budget.rate(requests)
        least = trees / ALWAYS_BETTER if self._rounds else trees * ALWAYS_BETTER
        is_new = np.array([request.sequence.sequence_id in self._caches_outside for request in requests])
        num_tokens = sum(request.sequence.num_remaining_tokens for request in requests)
        saved = num_tokens * (1 / trees - 1 / rounds.rate)
        is_worth_it = not is_new.any() or saved > self._planner.taking_in_seconds(lengths[is_new])
        return rounds if rounds.rate > least and is_worth_it else None

    def _are_scanned(self, requests: list[DraftRequest]) -> bool:
        """Take some more of each sequence in for rounds; False while there is more to come: no step waits for long."""
        for request in requests:
            name = request.sequence.sequence_id
            if name in self._caches_outside:  # those that stay short never need room for a partial cache
                self._chains.start(request.sequence, self._caches_outside[name])
                del self._caches_outside[name]
        num_chunks = max(1, CHUNKS_AT_ONCE // len(requests))
        caught_up = [self._chains.catch_up(request.sequence, num_chunks) for request in requests]
        return all(caught_up)
