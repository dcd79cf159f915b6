"""Shares the rows of a forward between sequences: draft nodes go where they bring most tokens a second."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many

import numpy as np

from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest, Verified, WantedTree
from swiftbatch.worker.drafters.step_clock import StepClock, together
from swiftbatch.worker.drafters.tree_budget import NODE_CHOICES, PRIOR_ACCEPTANCE, PROBE_CHOICE, NodeAcceptance
from swiftbatch.worker.forward.step_costs import Costs, StepCosts
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import Verification

NUM_ROWS = np.array(NODE_CHOICES) + 1
WORTH_DRAFTING = 1.05  # times the rate without drafts, for a start
NUM_PASSES = 2  # over the shares, each by the rate that the last ones promise: more passes change nothing


def best_shares(
    costs: StepCosts,
    tokens: np.ndarray,
    lengths: np.ndarray,
    overhead: float,
    proposing: float,
    worth: float = WORTH_DRAFTING,
) -> np.ndarray:
    """Choose which of `NODE_CHOICES` each sequence gets, `[num_sequences]`, for most tokens per second of all.

    `tokens [num_sequences, num_choices]` are those that trees of these sizes bring in a step, `lengths [num_sequences]`
    those of the caches. A step takes `overhead` beside its forward, and `proposing` where anything is proposed, in
    seconds. Nothing is drafted where drafts bring less than `worth` times the rate without, which may be less than 1.
    """
    own = costs.own_seconds(NUM_ROWS, lengths)  # [num_sequences, num_choices]
    rates = _rates_alike(costs, tokens, own, overhead, proposing)
    first = int(worth < 1)
    none, best = np.zeros(len(lengths), dtype=int), np.full(len(lengths), first + int(np.argmax(rates[first:])))
    best_rate = rates[best[0]]
    for _ in range(NUM_PASSES if len(lengths) > 1 else 0):  # one sequence alone has no other shares than those
        prices = costs.row_prices(int(NUM_ROWS[best].sum()))
        for price in prices:
            priced = (tokens - best_rate * (own + price * NUM_ROWS)).argmax(axis=1)
            rate = rate_of(costs, tokens, own, priced, overhead, proposing)
            if rate > best_rate:
                best, best_rate = priced, rate
    return best if best_rate > worth * rates[0] else none


def _rates_alike(
    costs: StepCosts, tokens: np.ndarray, own: np.ndarray, overhead: float, proposing: float
) -> list[float]:
    """Tokens per second where all sequences have the same one of `NODE_CHOICES`, for each of these."""
    brought, seconds, number = tokens.sum(axis=0).tolist(), own.sum(axis=0).tolist(), len(tokens)
    rates = []
    for choice, num_nodes in enumerate(NODE_CHOICES):
        forward = costs.shared_seconds(number * (num_nodes + 1)) + seconds[choice]
        rates.append(brought[choice] / (together(forward, overhead) + proposing * bool(num_nodes)))
    return rates


def rate_of(
    costs: StepCosts, tokens: np.ndarray, own: np.ndarray, chosen: np.ndarray, overhead: float, proposing: float
) -> float:
    """Tokens per second where the sequences have the `chosen` ones of `NODE_CHOICES`, `[num_sequences]`.

    `tokens` and `own` seconds are `[num_sequences, num_choices]`, the others as `best_shares` has them.
    """
    sequences = np.arange(len(chosen))
    forward = costs.shared_seconds(int(NUM_ROWS[chosen].sum())) + own[sequences, chosen].sum()
    return float(tokens[sequences, chosen].sum() / (together(forward, overhead) + proposing * bool(chosen.any())))


# Shares the rows of a forward between sequences: each gets draft nodes where they bring most for their time.


PLAN_EVERY, PLAN_AT_LEAST_EVERY = 8, 64  # trees: to find shares takes half a short step; those that stay wait
STEPS_PER_PLAN = 320  # at most, without anything learned: texts grow, and steps take longer
RETRIAL_EVERY = 16  # steps between plans for nothing; where looks come one behind the other, what they find is new
RETRIAL_EVERY_TOGETHER = 128  # of several sequences: to try again costs all of them, and there are more looks to tell
WORTH_TRYING = 0.9  # times the rate without drafts, in a trial: what is near it shows in the end
WORTH_STAYING = 1.02  # such rates, where drafts are made: less than for a start, since looks tell less than drafts do
MOST_IDLE_STEPS = 127  # steps in a row that nothing is asked about: where none drafts, to ask takes a tenth of a step
MUCH_LONGER = 1.5  # times the text of other sequences: a plan for these says nothing of it
NUM_TRIED = 8  # trees of a trial: of fewer little is known


class SharedBudget:
    """The running acceptance of every sequence, and what follows from it."""

    def __init__(self, costs: StepCosts) -> None:
        self._probed = self._costs = costs
        self._own: dict[str, NodeAcceptance] = {}
        self._mean = PRIOR_ACCEPTANCE  # of the sequences that left: what the next one begins with
        self._left: NodeAcceptance | None = None  # of the newest of them; where its looks found nothing, few are due
        self.clock = StepClock()  # times all steps, also those of other drafters in turn with this one
        self._plan: dict[str, int] = {}  # the index into `NODE_CHOICES` that each sequence has
        self._is_drafting = False  # by the plan
        self._num_idle_steps = 0  # coming steps of the same sequences that draft nothing
        self._is_idle = False  # whether the newest step drafts nothing, in front of these
        self._plain_seconds = 0.0  # that the forward of such a step should take
        self._num_observed = 0  # trees since the last plan, empty ones included
        self._num_learned = 0  # trees since then that something was drafted in
        self._plan_every = PLAN_EVERY  # of these
        self._num_planned, self._longest_planned = 0, 0  # sequences of the plan, and tokens of the longest one then
        self._vacant: list[int] = []  # what those of them had that have left
        self._forward_seconds: dict[tuple[int, ...], float] = {}  # by numbers of nodes, since the last plan
        self.are_drafts_allowed = True
        self._is_trial = False  # else drafts are made only where they pay
        self._num_to_try = 0  # steps with trees that are made whatever they promise
        self.measured_rate: float | None = None  # tokens per second of steps without drafts, where that is known

    def allow_drafts(self, are_allowed: bool, is_trial: bool = False) -> None:
        """Plan anew: with drafts where they promise more, or with none, and no look at one.

        A trial begins with some in any case, and what was accepted long before counts little beside them.
        """
        self.are_drafts_allowed = are_allowed
        self._is_trial = are_allowed and is_trial
        self._num_to_try = NUM_TRIED if self._is_trial else 0
        for own in self._own.values() if self._is_trial else ():
            own.num_steps = 0
        self._plan.clear()
        self._vacant.clear()
        self._num_idle_steps, self._is_idle = 0, False

    @property
    def promises_drafts(self) -> bool:
        """Return whether there are trees beside looks in the coming steps."""
        return self.are_drafts_allowed and (self._num_to_try > 0 or self._is_drafting)

    def rests(self, requests: list[DraftRequest]) -> bool:
        """Return whether the coming step drafts nothing, known from those before it; if not, ask for `num_nodes`."""
        self._is_idle = self._num_idle_steps > 0 and self._is_planned_for(requests)
        if self._is_idle:
            self._num_idle_steps -= 1
            self.clock.begin(self._plain_seconds, "plain")
        else:
            self._num_idle_steps = 0
        return self._is_idle

    def rest(self, most: int) -> int:
        """Take up to `most` of the steps behind one that drafts nothing, and return how many: none asks `rests`.

        `rested` has to be called when they have passed. Where no drafts are allowed, a plan may wait for their end.
        """
        left = self._num_idle_steps if self.are_drafts_allowed else most
        num_steps = max(0, min(most, left)) if self._is_idle else 0
        self._num_idle_steps = max(0, self._num_idle_steps - num_steps)
        return num_steps

    def rested(self, sequences: list[Sequence], num_steps: int, num_left: int, seconds: list[float]) -> None:
        """Note that the sequences took so many steps without drafts, and those `seconds`, of as many as are known.

        Of the steps that were to rest `num_left` are left.
        """
        self._num_idle_steps += num_left
        self._num_observed += num_steps * len(sequences)
        self.clock.pass_by(self._plain_seconds, seconds)
        for sequence in sequences:
            self._of(sequence).waited(num_steps)

    def num_nodes(self, requests: list[DraftRequest]) -> list[int]:
        """Choose how many nodes pay for each of the sequences that share the coming forward."""
        if not requests:
            return []
        self.clock.end()
        names = names_of(requests)
        self._keep_planned(names, requests)
        planned = [self._plan[name] for name in names]
        is_plain_due = self.clock.is_plain_due and not self._are_plain_steps_cheap  # else they have turns of their own
        if is_plain_due or not self.are_drafts_allowed:
            choices = [0] * len(names)
        else:
            least = PROBE_CHOICE if self._num_to_try else 0
            choices = [
                self._of(r.sequence).looked_at(max(choice, least), len(NODE_CHOICES))
                for r, choice in zip(requests, planned, strict=True)
            ]
            self._num_to_try = max(0, self._num_to_try - 1)
        sizes = [min(r.max_nodes, NODE_CHOICES[choice]) for r, choice in zip(requests, choices, strict=True)]
        expected = self._expected_seconds(requests, tuple(sizes))
        self.clock.begin(expected, "tree" if any(sizes) else "plain")
        self._plain_seconds = expected
        self._num_idle_steps = 0 if any(sizes) else self._num_quiet_steps(requests, any(planned))
        self._is_idle = self._num_idle_steps > 0
        return sizes

    def rate(self, requests: list[DraftRequest]) -> float:
        """Tokens per second of all that the planned trees promise, by all that was seen since they were planned.

        No less than what steps without drafts were measured to bring.
        """
        if self.measured_rate is not None and not self.are_drafts_allowed:
            return self.measured_rate
        names = names_of(requests)
        self._keep_planned(names, requests)
        shares = np.array([self._plan[name] for name in names])
        own = self._costs.own_seconds(NUM_ROWS, lengths_of(requests))
        overhead, proposing = self._overhead(requests), self.clock.drafting_seconds
        promised = rate_of(self._costs, self.tokens(requests), own, shares, overhead, proposing)
        return max(promised, self.measured_rate or 0.0)

    def best(self, requests: list[DraftRequest], tokens: np.ndarray, has_trees: bool) -> tuple[np.ndarray, float]:
        """Choose shares for other drafts, that bring `tokens [num_sequences, num_choices]`; and their rate.

        `has_trees`: whether to propose them takes as long as trees do; else it takes nothing.
        """
        lengths, overhead = lengths_of(requests), self._overhead(requests)
        proposing = self.clock.drafting_seconds if has_trees or self._are_plain_steps_cheap else 0.0
        shares = best_shares(self._costs, tokens, lengths, overhead, proposing)
        own = self._costs.own_seconds(NUM_ROWS, lengths)
        return shares, rate_of(self._costs, tokens, own, shares, overhead, proposing)

    @property
    def _are_plain_steps_cheap(self) -> bool:
        """Return whether several pass in a call: then no step with drafts takes as little beside its forward."""
        return self.measured_rate is not None

    def leave_out_step(self) -> None:
        """Learn nothing from the coming step, which has other drafts than trees."""
        self.clock.end()
        self._is_idle = False

    def tokens(self, requests: list[DraftRequest]) -> np.ndarray:
        """The tokens that trees of `NODE_CHOICES` nodes bring in a step, `[num_sequences, num_choices]`."""
        return np.array([self._of(request.sequence).tokens(NODE_CHOICES) for request in requests])

    def learn(self, sequence: Sequence, num_draft_tokens: int, path: list[int]) -> None:
        """Learn from a tree that was checked beside a step's own."""
        self._count(num_draft_tokens)
        self._of(sequence).learn(num_draft_tokens, path)

    def state(self, sequence: Sequence) -> np.ndarray:
        """Return what was learned of a sequence, as `NodeAcceptance.state` has it."""
        return self._of(sequence).state()

    def restore(self, sequence: Sequence, state: np.ndarray) -> None:
        """Take back what `state` returned. Unfit arrays raise ValueError and change nothing."""
        self._of(sequence).restore(state)

    def observe(self, sequence: Sequence, num_draft_tokens: int, path: list[int]) -> None:
        """Learn from one verified tree whose accepted nodes are `path`; from an empty one, that a step went by."""
        self._count(num_draft_tokens)
        self._of(sequence).observe(num_draft_tokens, path)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has left; its shares count in the mean for sequences to come."""
        if (share := self._plan.pop(sequence.sequence_id, None)) is not None:
            self._vacant.append(share)
        if left := self._own.pop(sequence.sequence_id, None):
            others = min(1, len(self._own))  # where none is there, the one that left knew all that was seen before
            self._mean = (others * self._mean + np.array(left.shares)) / (others + 1)
            self._left = left

    def _count(self, num_draft_tokens: int) -> None:
        self._num_observed += 1
        self._num_learned += num_draft_tokens > 0

    def _keep_planned(self, names: list[str], requests: list[DraftRequest]) -> None:
        """Plan anew for other sequences, where enough was learned, and after many steps."""
        has_learned = self._num_learned >= self._plan_every * len(names)
        if has_learned or self._num_observed >= STEPS_PER_PLAN * len(names) or not self._is_planned_for(requests):
            self._plan_shares(names, requests)

    def _is_planned_for(self, requests: list[DraftRequest]) -> bool:
        """Return whether the plan is for these sequences: it is for those in place of others like them, too."""
        names = {request.sequence.sequence_id for request in requests}
        if self._plan.keys() == names:
            return True
        new = names - self._plan.keys()
        if len(names) != self._num_planned or len(new) != len(self._vacant) or not self._are_as_long(requests):
            return False
        shares = sorted((*self._plan.values(), *self._vacant))
        self._plan |= dict.fromkeys(new, shares[len(shares) // 2])
        self._vacant.clear()
        return True

    def _are_as_long(self, requests: list[DraftRequest]) -> bool:
        longest = max(len(request.sequence) for request in requests)
        return longest < MUCH_LONGER * self._longest_planned and self._longest_planned < MUCH_LONGER * longest

    def _plan_shares(self, names: list[str], requests: list[DraftRequest]) -> None:
        self._costs = self._probed.as_routed()
        lengths = lengths_of(requests)
        shares = self._best_shares(requests, lengths) if self.are_drafts_allowed else np.zeros(len(names), dtype=int)
        self._is_drafting = bool(shares.any())
        plan = dict(zip(names, shares.tolist(), strict=True))
        if not self._is_drafting:
            retrial_every = RETRIAL_EVERY if len(names) == 1 else RETRIAL_EVERY_TOGETHER
            if self._num_observed >= retrial_every * len(names):
                self.clock.doubt("tree")
            self._plan_every = 1  # the next look tells
        else:
            self._plan_every = min(2 * self._plan_every, PLAN_AT_LEAST_EVERY) if plan == self._plan else PLAN_EVERY
        self._plan, self._num_observed, self._num_learned = plan, 0, 0
        self._num_planned, self._longest_planned = len(names), int(lengths.max()) + 1
        self._vacant.clear()
        self._forward_seconds.clear()

    def _best_shares(self, requests: list[DraftRequest], lengths: np.ndarray) -> np.ndarray:
        """The shares that bring most, as `best_shares` finds them."""
        tokens, overhead, proposing = self.tokens(requests), self._overhead(requests), self.clock.drafting_seconds
        worth = WORTH_TRYING if self._is_trial else WORTH_STAYING if self._is_drafting else WORTH_DRAFTING
        return best_shares(self._costs, tokens, lengths, overhead, proposing, worth)

    def _num_quiet_steps(self, requests: list[DraftRequest], are_trees_planned: bool) -> int:
        """Steps behind the coming one, without drafts, that nothing is due in: no look and no plan."""
        if are_trees_planned:
            return self.clock.num_plain_due
        to_plan = STEPS_PER_PLAN - self._num_observed // len(requests)
        if not self.are_drafts_allowed:
            return max(1, min(MOST_IDLE_STEPS, to_plan - 1))
        to_look = min(self._of(request.sequence).num_steps_to_probe for request in requests)
        return max(0, min(MOST_IDLE_STEPS, to_plan - 1, to_look - 1))

    def _overhead(self, requests: list[DraftRequest]) -> float:
        """Seconds that a step takes beside its forward where nothing is drafted."""
        return self.clock.beside("plain", requests[0].overhead)

    def _expected_seconds(self, requests: list[DraftRequest], sizes: tuple[int, ...]) -> float:
        if sizes not in self._forward_seconds:
            own = self._costs.own_seconds(np.arange(max(sizes) + 1) + 1, lengths_of(requests))
            shared = self._costs.shared_seconds(len(sizes) + sum(sizes))
            self._forward_seconds[sizes] = float(shared + own[np.arange(len(sizes)), list(sizes)].sum())
        return self._forward_seconds[sizes]

    def _of(self, sequence: Sequence) -> NodeAcceptance:
        if (own := self._own.get(sequence.sequence_id)) is None:
            own = self._own[sequence.sequence_id] = NodeAcceptance(self._mean, self._left)
        return own


def lengths_of(requests: list[DraftRequest]) -> np.ndarray:
    """Cached positions of sequences, `[num_sequences]`."""
    return np.array([len(request.sequence) - 1 for request in requests])


def names_of(requests: list[DraftRequest]) -> list[str]:
    """The ids of sequences that share a step, in their order."""
    return [request.sequence.sequence_id for request in requests]


class IdleDrafter(Drafter):
    """Knows of coming steps that draft nothing."""

    @property
    @abstractmethod
    def promises_drafts(self) -> bool:
        """Return whether the coming steps have drafts that promise more than steps without; a look promises nothing."""

    @abstractmethod
    def rest(self, most: int) -> int:
        """Take up to `most` resting steps at once, and return how many: none of them is proposed for, nor updated."""


class BudgetedDrafter(IdleDrafter):
    """Drafts for each sequence by itself, with as many nodes as pay."""

    def __init__(self, costs: Costs | None) -> None:
        """Take the costs of steps; without them, trees are as large as they may be."""
        self.budget = None if costs is None else SharedBudget(costs())
        self.is_drafting = True  # in the coming step

    @abstractmethod
    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        """Grow a tree of at most `max_nodes` nodes, none deeper than `max_depth`; it may be empty."""

    def trees(self, wanted: Many[WantedTree]) -> list[DraftTree]:
        """Grow the trees of several sequences, as `tree` does each."""
        return [self.tree(*each) for each in wanted]

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        if self.budget is None:
            return self.trees([(r.sequence, r.max_nodes, r.max_depth) for r in requests])
        if self.budget.rests(requests):
            self.is_drafting = False
            return [DraftTree()] * len(requests)
        sizes = self.budget.num_nodes(requests)
        self.is_drafting = any(sizes)
        return self.sized_trees(requests, sizes)

    def sized_trees(self, requests: list[DraftRequest], sizes: list[int]) -> list[DraftTree]:
        """Grow trees of at most these numbers of nodes, one for each request."""
        given = zip(requests, sizes, strict=True)
        wanted = [(request.sequence, size, request.max_depth) for request, size in given if size]
        trees = iter(self.trees(wanted) if wanted else ())
        return [next(trees) if size else DraftTree() for size in sizes]

    @property
    def promises_drafts(self) -> bool:
        return self.budget is None or self.budget.promises_drafts

    def rest(self, most: int) -> int:
        return 0 if self.budget is None else self.budget.rest(most)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        self.observe([(sequence, verification)])

    def observe(self, verified: Many[Verified]) -> None:
        """Let the budget learn from the trees of a verified step."""
        if self.budget is not None:
            for sequence, verification in verified:
                self.budget.observe(sequence, verification.num_proposed_tokens, verification.proposed_path)

    def stop(self, sequence: Sequence) -> None:
        if self.budget is not None:
            self.budget.forget(sequence)
