"""Drafts what a text repeats of itself, where that beats another drafter's proposals."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import accumulate, pairwise

import numpy as np

from swiftbatch.worker.drafters.auto.plain_trials import DraftTrials, num_steps_of
from swiftbatch.worker.drafters.drafter_interface import DraftCounters, Drafter, DraftRequest, ReadRows, Verified
from swiftbatch.worker.drafters.recycling.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.drafters.shared_budget import IdleDrafter, SharedBudget, names_of
from swiftbatch.worker.drafters.tree_budget import NODE_CHOICES
from swiftbatch.worker.forward.step_costs import seconds_now
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import Verification

NGRAM = 4  # tokens that begin a repeat
FACTORS = (1_000_003, 1_618_033_989, 2_147_483_629, 1_414_213_573)  # sums of four stay below 2**63
MOST_TOLD_APART = 32  # matched tokens
PRIORS = (0.5, 0.7, 0.85, 0.92)  # shares that go on behind 4, 8, 16 and 32 matched tokens, before any was seen
LEARNING_RATE = 0.02
PRIOR_STEPS = 8  # that a prior counts for


class RepeatShares:
    """The running shares of tokens that a repeat went on with, by how many it had matched before."""

    def __init__(self) -> None:
        self._shares = list(PRIORS)
        self._num_seen = [0] * len(PRIORS)

    def observe(self, num_matched: int, goes_on: bool) -> None:
        """Learn from one token behind `num_matched` matched ones."""
        level = _level(num_matched)
        self._num_seen[level] += 1
        rate = max(LEARNING_RATE, 1.0 / (PRIOR_STEPS + self._num_seen[level]))
        self._shares[level] += rate * (goes_on - self._shares[level])

    def tokens(self, num_matched: int, choices: tuple[int, ...]) -> list[float]:
        """The tokens that chains of so many nodes bring in a step, the bonus token included."""
        levels = (_level(num_matched + i) for i in range(max(choices)))
        reached = accumulate((self._shares[level] for level in levels), lambda path, share: path * share, initial=1.0)
        brought = list(accumulate(reached))
        return [brought[nodes] for nodes in choices]


def _level(num_matched: int) -> int:
    """The index into `PRIORS`."""
    return min(num_matched, MOST_TOLD_APART).bit_length() - NGRAM.bit_length()


class RepeatedText:
    """One sequence: the newest place behind every n-gram, and the place that its end agrees with."""

    def __init__(self, sequence: Sequence, shares: RepeatShares) -> None:
        """Index what is there; `shares` may belong to several sequences."""
        self._shares = shares
        self._places = np.zeros(2 * sequence.max_length + 1, dtype=np.int32)  # behind an n-gram, by its bucket; 0: none
        self._num_buckets = len(self._places)
        self._num_tokens = len(sequence)
        self.num_matched = 0  # tokens that the end agrees with; 0: it repeats nothing
        self._source = 0  # the place that the next token would be repeated from
        self._ngram: list[int] = sequence.token_ids[-NGRAM:].tolist()  # the last tokens
        self._index(sequence.token_ids)
        if len(sequence) >= NGRAM:
            bucket = self._bucket(self._ngram)
            self._begin(sequence.token_ids, len(sequence), self._ngram, int(self._places[bucket]))
            self._places[bucket] = len(sequence)

    @property
    def num_told_apart(self) -> int:
        """The matched tokens as far as they make a difference."""
        return min(self.num_matched, MOST_TOLD_APART)

    def catch_up(self, sequence: Sequence) -> None:
        """Follow the repeat over the tokens that came since the last call."""
        token_ids, end = sequence.token_ids, self._num_tokens
        ngram = self._ngram  # a step of every sequence waits: arrays would take longer
        for token_id in token_ids[end:].tolist():
            if self.num_matched:
                self._follow(token_ids.item(self._source) == token_id)
            end += 1
            ngram = [*ngram[-NGRAM + 1 :], token_id]
            if end < NGRAM:
                continue
            bucket = self._bucket(ngram)
            if not self.num_matched and (place := self._places.item(bucket)):
                self._begin(token_ids, end, ngram, place)
            self._places[bucket] = end
        self._num_tokens, self._ngram = end, ngram

    def tokens(self, choices: tuple[int, ...]) -> list[float]:
        """The tokens that chains of so many nodes bring in a step; 1 where the text repeats nothing."""
        return self._shares.tokens(self.num_matched, choices) if self.num_matched else [1.0] * len(choices)

    def chain(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """The tokens that follow if the repeat goes on; one that overlaps itself goes on from what it repeated."""
        period = len(sequence) - self._source
        offsets = np.arange(num_tokens) % period
        found: list[int] = sequence.token_ids[self._source + offsets].tolist()
        return found

    def _follow(self, goes_on: bool) -> None:
        self._shares.observe(self.num_matched, goes_on)
        if goes_on:
            self._source, self.num_matched = self._source + 1, self.num_matched + 1
        else:
            self.num_matched = 0

    def _begin(self, token_ids: np.ndarray, end: int, ngram: list[int], place: int) -> None:
        """Begin a repeat where the newest earlier place of its bucket has `ngram`, the tokens up to `end`, in front."""
        if not NGRAM <= place < end or token_ids[place - NGRAM : place].tolist() != ngram:
            return  # another n-gram may have the same bucket
        most, self._source = min(place, MOST_TOLD_APART), place
        earlier, ending = token_ids[place - most : place].tolist(), token_ids[end - most : end].tolist()
        self.num_matched = NGRAM
        while self.num_matched < most and earlier[-self.num_matched - 1] == ending[-self.num_matched - 1]:
            self.num_matched += 1

    def _index(self, token_ids: np.ndarray) -> None:
        """Keep the newest place of every n-gram but that of the end, which `_begin` looks for first."""
        if (num_ngrams := len(token_ids) - NGRAM) > 0:  # term by term: a window on each n-gram takes five times as long
            terms = (token_ids[i : i + num_ngrams] * factor for i, factor in enumerate(FACTORS))
            self._places[functools.reduce(operator.iadd, terms) % len(self._places)] = np.arange(NGRAM, len(token_ids))

    def _bucket(self, ngram: list[int]) -> int:
        a, b, c, d = FACTORS
        return (ngram[0] * a + ngram[1] * b + ngram[2] * c + ngram[3] * d) % self._num_buckets


# Drafts what a text repeats of itself (`lookup/repeated_text.py`), where that beats another drafter's proposals.


FEW_NODES = (7,)
PROMISING = 1.3  # tokens a step of a chain that short: a repeat that promises less is not worth planning for
BETTER = 1.05  # times the other drafter's rate
REFUSED_FOR = 16  # steps until repeats as long are planned for again: to plan takes a tenth of a batch's step
IDLE_STEPS_AT_ONCE = (
    7  # steps without drafts that pass before anything is looked at: a look takes a fifth of a short step
)
MOST_AT_ONCE = 32  # where rest after rest found no repeat


class RepeatingDrafter(Drafter):
    """A drafter of steps with repeats: sequences that repeat nothing have trees. Other steps are `otherwise`'s."""

    needs_top_k = True

    def __init__(
        self,
        otherwise: IdleDrafter,
        rate: Callable[[list[DraftRequest]], float],
        recycling: TokenRecyclingDrafter,
        budget: SharedBudget,
        turns: DraftTrials | None = None,
    ) -> None:
        """`rate`: the tokens per second that `otherwise` promises; `budget` is that of `recycling`.

        `turns` are taken where plain steps can pass by several at once.
        """
        self.otherwise, self.phases, self._rate_otherwise = otherwise, otherwise.phases, rate
        self._recycling, self._budget, self._turns = recycling, budget, turns
        self._shares = RepeatShares()
        self._texts: dict[str, RepeatedText] = {}
        self._repeated: set[str] = set()  # sequences that have chains in the newest step
        self._is_repeating = False  # in that step
        self._refused: set[tuple[int, ...]] = set()  # lengths of repeats that did not pay beside the same sequences
        self._num_since = 0  # steps since the first of them
        self._names: list[str] = []  # of these sequences
        self._idle_left: list[Sequence] = []  # that draft nothing in the coming steps
        self._num_idle = 0  # such steps to come
        self._begun: float | None = None  # when the newest step began, where it rests and its end is not known yet
        self._idle_at: list[float] = []  # the starts of steps that nobody was told of yet
        self._num_passed: list[int] = []  # how many passed at once from then on
        self._idle_steps_at_once = IDLE_STEPS_AT_ONCE
        budget.allow_drafts(turns is None or turns.has_drafts)

    @property
    def draft_kind(self) -> str:
        return "tree" if self._is_repeating else self.otherwise.draft_kind

    @property
    def wants_candidates(self) -> bool:
        return self._recycling.is_drafting if self._is_repeating else self.otherwise.wants_candidates

    @property
    def counters(self) -> DraftCounters:
        return self.otherwise.counters

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self._wake()
        self.otherwise.start(sequence, cache)  # first, since it may fail
        self._texts[sequence.sequence_id] = RepeatedText(sequence, self._shares)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        if self._turns is None:
            return self._propose(requests)
        if self._num_idle and [request.sequence for request in requests] == self._idle_left and self._turns.go_on():
            self._begun = seconds_now()
            return [DraftTree()] * len(requests)
        if self._turns.begin(requests, self.otherwise.promises_drafts):
            self._wake()
            self._budget.allow_drafts(self._turns.has_drafts, self._turns.is_trial)
        return self._propose(requests)

    def _propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        if self._stays_idle(requests):
            self._begun = seconds_now()
            return [DraftTree()] * len(requests)
        self._begun = None
        self._wake()
        if self._turns is not None:
            self._budget.measured_rate = self._turns.plain_rate
        repeats = [r.sequence for r in requests if self._text(r.sequence).num_matched]  # of few sequences as a rule
        promised = {each.sequence_id: tokens for each in repeats if (tokens := self._promised(each)) > PROMISING}
        promises_more = bool(promised) and sum(promised.values()) - len(promised) > (BETTER - 1) * len(requests)
        sizes = self._sizes(requests, set(promised)) if promises_more else None
        self._is_repeating = sizes is not None
        if sizes is None:
            return self._otherwise(requests)
        self._repeated = set(promised)
        self._budget.leave_out_step()
        trees = self._trees(requests, sizes)
        self._recycling.is_drafting = any(
            len(tree) and request.sequence.sequence_id not in self._repeated
            for request, tree in zip(requests, trees, strict=True)
        )
        return trees

    def pass_plain(self, most: int) -> int:
        if not self._num_idle:
            return 0
        if self._begun is None:  # the newest step was asked for: it passes with those behind it
            self._begun = seconds_now()
            self._num_idle += 1
        most = min(most, self._idle_steps_at_once)  # a repeat is soon seen where there were some
        missing = most - (self._num_idle - 1)
        if missing > 0:  # a call of fewer steps takes longer for each
            self._num_idle += self.otherwise.rest(missing)
        return min(most, self._num_idle - 1)

    def learn(self, rows: ReadRows) -> None:
        self.otherwise.learn(rows)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        self.update_all([(sequence, verification)])

    def update_all(self, verified: Many[Verified]) -> None:
        if self._turns is not None and verified:
            self._turns.hear(verified, not self._is_repeating)
        if self._begun is not None:
            self._pass_by(self._begun, num_steps_of(verified))
            return
        for sequence, _ in verified:
            self._text(sequence).catch_up(sequence)
        if not self._is_repeating:
            self.otherwise.update_all(verified)
            return
        repeated = [each for each in verified if each[0].sequence_id in self._repeated]
        self._recycling.update_all([each for each in verified if each[0].sequence_id not in self._repeated])
        self._recycling.take([each for each in repeated if each[1].top_ids is not None])

    def leave_out_step(self) -> None:
        """Let another drafter propose for the coming step, and learn nothing of how long that takes."""
        self._wake()
        self._is_repeating = False
        self._budget.leave_out_step()

    def hear(self, sequence: Sequence, verification: Verification) -> None:
        """Take in the text of a step that was left out, and the target's candidates along it."""
        self._text(sequence).catch_up(sequence)
        if verification.top_ids is not None:
            self._recycling.take([(sequence, verification)])

    def stop(self, sequence: Sequence) -> None:
        del self._texts[sequence.sequence_id]
        self._wake()
        self.otherwise.stop(sequence)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        self._wake()
        return self.otherwise.state(sequence)

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        self.otherwise.restore(sequence, state)

    def _otherwise(self, requests: list[DraftRequest]) -> list[DraftTree]:
        trees = self.otherwise.propose(requests)
        self._rest([request.sequence for request in requests])
        return trees

    def _stays_idle(self, requests: list[DraftRequest]) -> bool:
        """Return whether the coming step rests: where nothing begins to repeat itself, rest follows rest."""
        resting = self._idle_left
        if not resting or [request.sequence for request in requests] != resting:
            return False
        if not self._num_idle and not self._wake(seconds_now()):
            self._rest(resting)
        return self._num_idle > 0

    def _rest(self, sequences: list[Sequence]) -> None:
        self._num_idle = self.otherwise.rest(self._idle_steps_at_once)
        self._idle_left = sequences if self._num_idle else []

    def _pass_by(self, begun: float, num_steps: int) -> None:
        """Take steps of the rest that have passed; what they brought is looked at when it ends."""
        self._idle_at.append(begun)
        self._num_passed.append(num_steps)
        self._num_idle = max(0, self._num_idle - num_steps)
        self._begun = None

    def _wake(self, *ended_at: float) -> bool:
        """End a rest, and take in what its steps have brought: whether that promises repeats.

        `ended_at`: when the newest of them ended, where that is known.
        """
        promises = False
        if self._idle_at:
            staying = [sequence for sequence in self._idle_left if sequence.sequence_id in self._texts]
            for sequence in staying:
                self._text(sequence).catch_up(sequence)
            self._budget.rested(self._idle_left, sum(self._num_passed), self._num_idle, self._idle_seconds(*ended_at))
            promises = any(self._promised(sequence) > PROMISING for sequence in staying)
            self._idle_steps_at_once = (
                IDLE_STEPS_AT_ONCE if promises else min(2 * self._idle_steps_at_once + 2, MOST_AT_ONCE)
            )
        self._idle_left, self._num_idle = [], 0
        self._idle_at.clear()
        self._num_passed.clear()
        return promises

    def _idle_seconds(self, *ended_at: float) -> list[float]:
        """The seconds of each step of a rest whose end is known; those that passed at once took alike."""
        spans = [end - start for start, end in pairwise((*self._idle_at, *ended_at))]
        return [span / number for span, number in zip(spans, self._num_passed, strict=False) for _ in range(number)]

    def _promised(self, sequence: Sequence) -> float:
        """The tokens of a step that drafts a few nodes of what the sequence repeats; 1 where it repeats nothing."""
        text = self._text(sequence)
        return text.tokens(FEW_NODES)[0] if text.num_matched else 1.0

    def _text(self, sequence: Sequence) -> RepeatedText:
        return self._texts[sequence.sequence_id]

    def _sizes(self, requests: list[DraftRequest], repeated: set[str]) -> list[int] | None:
        """The nodes of each sequence; None where repeats as long as those of `repeated` did not pay just before."""
        names = names_of(requests)
        lengths = tuple(sorted(self._texts[name].num_told_apart for name in repeated))
        self._num_since += 1
        if names != self._names or self._num_since > REFUSED_FOR:
            self._names, self._num_since = names, 0
            self._refused.clear()
        if lengths in self._refused:
            return None
        sizes = self._sizes_that_pay(requests, repeated)
        if sizes is None:
            self._refused.add(lengths)
        return sizes

    def _sizes_that_pay(self, requests: list[DraftRequest], repeated: set[str]) -> list[int] | None:
        """The nodes of each sequence; None where the other drafter promises more."""
        tokens = self._budget.tokens(requests)
        for number, request in enumerate(requests):
            if request.sequence.sequence_id in repeated:
                tokens[number] = self._text(request.sequence).tokens(NODE_CHOICES)
        has_trees = len(repeated) < len(requests)
        chosen, rate = self._budget.best(requests, tokens, has_trees)
        if rate < BETTER * self._rate_otherwise(requests):
            return None
        return [NODE_CHOICES[choice] for choice in chosen]

    def _trees(self, requests: list[DraftRequest], sizes: list[int]) -> list[DraftTree]:
        """Chains of what is repeated, trees for the other sequences."""
        chains, most = dict[int, DraftTree](), [min(size, r.max_nodes) for size, r in zip(sizes, requests, strict=True)]
        for number, request in enumerate(requests):
            sequence = request.sequence
            if most[number] and sequence.sequence_id in self._repeated:
                length, most[number] = min(most[number], request.max_depth), 0
                chains[number] = DraftTree.chain(self._text(sequence).chain(sequence, length))
        trees = self._recycling.sized_trees(requests, most)
        return [chains.get(number, tree) for number, tree in enumerate(trees)]
