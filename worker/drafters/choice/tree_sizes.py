"""Sizes of draft trees: each sequence of a step gets the nodes that bring most tokens per second of all.

A tree lists its nodes best first, so the acceptance rates by node index predict the tokens of every tree size.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import accumulate

import numpy as np

from swiftbatch.worker.drafters.drafter_interface import DraftRequest, Verified
from swiftbatch.worker.forward.step_costs import StepCosts
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.sampling.sequence import Sequence

NODE_CHOICES = (0, 1, 3, 5, 7, 11, 15, 23, 31)

PRIOR_ACCEPTANCE = 0.6 * 0.75 ** np.arange(TILE_ROWS)  # prior acceptance of node i
LEARNING_RATE = 0.02
PRIOR_STEPS = 8  # weight of the prior in steps: short generations learn faster than at the final rate
MOST_PRIOR_STEPS = 24  # further weight of a prior that other sequences confirmed
EXPLORE_EVERY = 24  # steps between trials of the next larger size
PROBE_EVERY = 8  # steps between trials at first, if nothing is drafted
PROBE_CHOICE = NODE_CHOICES.index(3)  # enough to see a text begin to repeat itself
LONGEST_INTERVAL = 32 * PROBE_EVERY  # steps between trials
PROMISING = 3  # accepted tokens of a trial that shorten the interval again
NUM_ROWS = np.array(NODE_CHOICES) + 1
NUM_PASSES = 2  # over the shares, each by the rate that the last ones promise: more passes change nothing
PLAN_EVERY, PLAN_AT_LEAST_EVERY = 8, 64  # trees: to find shares takes half a short step


def together(forward_seconds: float, beside: float) -> float:
    """Return a step's seconds: `beside` may be negative, but a step takes at least half the forward's estimate."""
    return max(forward_seconds + beside, forward_seconds / 2)


class NodeAcceptance:
    """Running acceptance of the first `TILE_ROWS` nodes, and when a sequence without drafts has a trial draft."""

    def __init__(self, prior: np.ndarray = PRIOR_ACCEPTANCE, before: NodeAcceptance | None = None) -> None:
        """Continue the schedule and part of the step count of `before`, which belonged to a finished sequence."""
        # for so few values, a list takes a tenth of an array's time
        self.shares: list[float] = prior.tolist()
        self.num_steps: int = min(before.num_steps, MOST_PRIOR_STEPS) if before else 0  # steps with drafts
        self._interval: int = before._interval if before else PROBE_EVERY  # steps until the next trial draft
        self._num_waited: int = before._num_waited if before else 0  # steps without a tree

    def observe(self, num_draft_tokens: int, path: list[int]) -> None:
        """Learn from a verified tree, perhaps empty, with the accepted nodes `path`.

        After each failed trial draft, the interval to the next one doubles. One with an empty tree counts as failed.
        """
        if num_draft_tokens == 0 and self._num_waited < self._interval:
            self._num_waited += 1
        elif self._num_waited and len(path) < PROMISING:  # that was a trial
            self._num_waited, self._interval = 0, min(2 * self._interval, LONGEST_INTERVAL)
        else:
            self._num_waited, self._interval = 0, PROBE_EVERY
        self.learn(num_draft_tokens, path)

    def learn(self, num_draft_tokens: int, path: list[int]) -> None:
        """Learn from a tree without counting a step for trials."""
        if num_draft_tokens == 0:
            return
        self.num_steps += 1
        rate, shares = max(LEARNING_RATE, 1.0 / (PRIOR_STEPS + self.num_steps)), self.shares
        for node, share in enumerate(shares[: min(num_draft_tokens, TILE_ROWS)]):
            shares[node] = share + rate * ((node in path) - share)

    def looked_at(self, choice: int) -> int:
        """Return the index of the size to draft with: `choice`, the best, or sometimes a larger one to learn its gain.

        Steps without drafts, of index 0, teach nothing, so a trial draft replaces some of them.
        """
        if choice == 0:
            return PROBE_CHOICE if self._num_waited >= self._interval else 0
        return min(choice + (self.num_steps % EXPLORE_EVERY == EXPLORE_EVERY - 1), len(NODE_CHOICES) - 1)

    def state(self) -> np.ndarray:
        """Return the acceptance rates, then the step counts, `[TILE_ROWS + 3] float64`."""
        return np.array([*self.shares, self.num_steps, self._num_waited, self._interval], dtype=np.float64)

    def restore(self, state: np.ndarray) -> None:
        """Restore a result of `state`. Raises ValueError for an array of another shape, dtype or value range."""
        size = TILE_ROWS + 3
        if state.shape != (size,) or state.dtype != np.float64 or not np.isfinite(state).all():
            raise ValueError(f"node budget: found {state.dtype} {state.shape}, expected float64 ({size},)")
        counts = state[TILE_ROWS:]
        if (counts < (0, 0, 1)).any() or counts[2] > LONGEST_INTERVAL:
            raise ValueError(f"node budget: found {counts}, expected steps, those waited and up to {LONGEST_INTERVAL}")
        self.shares = state[:TILE_ROWS].tolist()
        self.num_steps, self._num_waited, self._interval = (int(count) for count in counts)

    def tokens(self) -> list[float]:
        """Return the expected tokens of a step for trees of `NODE_CHOICES` nodes, the bonus token included.

        A node's acceptance rate is capped at the rates of the nodes before it.
        """
        accepted = list(accumulate(accumulate(self.shares, min), initial=1.0))
        return [accepted[nodes] for nodes in NODE_CHOICES]


def best_shares(
    costs: StepCosts, tokens: np.ndarray, lengths: np.ndarray, beside: float, can_be_none: bool = True
) -> tuple[np.ndarray, float]:
    """Choose the index into `NODE_CHOICES` of each sequence, `[num_sequences]`, for most tokens per second of all.

    `tokens [num_sequences, num_choices]`: expected tokens by tree size; `lengths [num_sequences]`: cached positions;
    `beside`: a step's seconds outside its forward. Also returns the rate. Unless `can_be_none`, at least one sequence
    gets a tree.
    """
    own = costs.own_seconds(NUM_ROWS, lengths)  # [num_sequences, num_choices]
    rates = _rates_alike(costs, tokens, own, beside)
    first = 0 if can_be_none else 1
    best = np.full(len(lengths), first + int(np.argmax(rates[first:])))
    best_rate = rates[best[0]]
    for _ in range(NUM_PASSES if len(lengths) > 1 else 0):  # one sequence alone has no other shares than those
        for price in costs.row_prices(int(NUM_ROWS[best].sum())):
            priced = (tokens - best_rate * (own + price * NUM_ROWS)).argmax(axis=1)
            rate = rate_of(costs, tokens, own, priced, beside)
            if rate > best_rate and (can_be_none or priced.any()):
                best, best_rate = priced, rate
    return best, best_rate


def _rates_alike(costs: StepCosts, tokens: np.ndarray, own: np.ndarray, beside: float) -> list[float]:
    """Return, for each of `NODE_CHOICES`, the tokens per second if all sequences have trees of this size."""
    brought, seconds, number = tokens.sum(axis=0).tolist(), own.sum(axis=0).tolist(), len(tokens)
    return [
        brought[choice] / together(costs.shared_seconds(number * (num_nodes + 1)) + seconds[choice], beside)
        for choice, num_nodes in enumerate(NODE_CHOICES)
    ]


def rate_of(costs: StepCosts, tokens: np.ndarray, own: np.ndarray, chosen: np.ndarray, beside: float) -> float:
    """Return the tokens per second if each sequence's tree has the size at index `chosen [num_sequences]`.

    `chosen` indexes `NODE_CHOICES`; `tokens` and `own` (seconds) are `[num_sequences, num_choices]`.
    """
    sequences = np.arange(len(chosen))
    forward = costs.shared_seconds(int(NUM_ROWS[chosen].sum())) + own[sequences, chosen].sum()
    return float(tokens[sequences, chosen].sum() / together(forward, beside))


def forward_seconds(costs: StepCosts, requests: list[DraftRequest], sizes: list[int]) -> float:
    own = costs.own_seconds(np.arange(max(sizes) + 1) + 1, lengths_of(requests))
    return float(costs.shared_seconds(len(sizes) + sum(sizes)) + own[np.arange(len(sizes)), sizes].sum())


def lengths_of(requests: list[DraftRequest]) -> np.ndarray:
    """Return the cached positions of sequences, `[num_sequences]`."""
    return np.array([len(request.sequence) - 1 for request in requests])


class TreeSizes:
    """Acceptance rates of every sequence, and the tree sizes computed from them until the next verified trees."""

    def __init__(self, costs: StepCosts) -> None:
        self._probed, self.costs = costs, costs
        self._own: dict[str, NodeAcceptance] = {}
        self._mean = PRIOR_ACCEPTANCE  # acceptance of sequences that left; the next ones begin with it
        self._left: NodeAcceptance | None = None  # acceptance of the newest that left
        self._shares: dict[str, int] = {}  # planned indices into `NODE_CHOICES`
        self._num_learned = 0  # trees since the plan
        self._plan_every = PLAN_EVERY
        self._seconds: dict[tuple[int, ...], float] = {}  # sizes -> seconds of forwards since the plan

    def plan(self, requests: list[DraftRequest], beside: float) -> float:
        """Choose the sizes of the coming trees; return the expected tokens per second."""
        self.costs = self._probed.as_routed()
        shares, rate = best_shares(self.costs, self.tokens(requests), lengths_of(requests), beside, can_be_none=False)
        plan = {r.sequence.sequence_id: int(share) for r, share in zip(requests, shares, strict=True)}
        self._plan_every = min(2 * self._plan_every, PLAN_AT_LEAST_EVERY) if plan == self._shares else PLAN_EVERY
        self._shares, self._num_learned = plan, 0
        self._seconds.clear()
        return rate

    def sizes(self, requests: list[DraftRequest], beside: float) -> list[int]:
        """Return each coming tree's number of nodes; now and then more than is best, to learn their acceptance rate."""
        names = {request.sequence.sequence_id for request in requests}
        if names != self._shares.keys() or self._num_learned >= self._plan_every * len(names):
            self.plan(requests, beside)
        return [min(r.max_nodes, NODE_CHOICES[self._choice(r.sequence)]) for r in requests]

    def forward_seconds(self, requests: list[DraftRequest], sizes: list[int]) -> float:
        """Return the seconds of a forward of trees of these sizes; cached for the text lengths of the first call."""
        key = tuple(sizes)
        if key not in self._seconds:
            self._seconds[key] = forward_seconds(self.costs, requests, sizes)
        return self._seconds[key]

    def _choice(self, sequence: Sequence) -> int:
        return self._of(sequence).looked_at(self._shares[sequence.sequence_id])

    def tokens(self, requests: list[DraftRequest]) -> np.ndarray:
        """Return the tokens that trees of `NODE_CHOICES` nodes bring in a step, `[num_sequences, num_choices]`."""
        return np.array([self._of(request.sequence).tokens() for request in requests])

    def observe(self, verified: Many[Verified]) -> None:
        """Learn from verified trees; an empty tree only counts as a step."""
        for sequence, verification in verified:
            self._num_learned += verification.num_proposed_tokens > 0
            self._of(sequence).observe(verification.num_proposed_tokens, verification.proposed_path)

    def learn(self, sequence: Sequence, num_nodes: int, path: list[int]) -> None:
        """Learn from a tree that was checked in addition to the step's own tree."""
        self._of(sequence).learn(num_nodes, path)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has left; its acceptance counts in the mean for sequences to come."""
        if left := self._own.pop(sequence.sequence_id, None):
            others = min(1, len(self._own))  # one that was alone knew all that was seen before
            self._mean = (others * self._mean + np.array(left.shares)) / (others + 1)
            self._left = left

    def state(self, sequence: Sequence) -> np.ndarray:
        return self._of(sequence).state()

    def restore(self, sequence: Sequence, state: np.ndarray) -> None:
        """Restore a result of `state`. Raises ValueError for an array that does not fit, and then changes nothing."""
        self._of(sequence).restore(state)

    def _of(self, sequence: Sequence) -> NodeAcceptance:
        if (own := self._own.get(sequence.sequence_id)) is None:
            own = self._own[sequence.sequence_id] = NodeAcceptance(self._mean, self._left)
        return own
