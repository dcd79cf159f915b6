"""Drafts repeats of earlier text if they promise more than the chosen way."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence as Many
from itertools import accumulate

import numpy as np

from swiftbatch.worker.drafters.choice.tree_sizes import NODE_CHOICES, best_shares, lengths_of, together
from swiftbatch.worker.drafters.choice.ways import DraftWay, TreeWay
from swiftbatch.worker.drafters.drafter_interface import DraftRequest, Verified
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

NGRAM = 4  # tokens that begin a repeat
FACTORS = (1_000_003, 1_618_033_989, 2_147_483_629, 1_414_213_573)  # sums of four stay below 2**63
MOST_TOLD_APART = 32  # matched tokens
LONG_REPEAT = 8  # matched tokens: behind another token in its place, such a repeat goes on
PRIORS = (0.5, 0.7, 0.85, 0.92)  # shares that go on behind 4, 8, 16 and 32 matched tokens, before any was seen
LEARNING_RATE = 0.02
PRIOR_STEPS = 8  # a prior's weight in steps


class RepeatShares:
    """Running acceptance rates of tokens that continue a repeat, grouped by how many tokens matched before them."""

    def __init__(self) -> None:
        self._shares = list(PRIORS)
        self._num_seen = [0] * len(PRIORS)

    def observe(self, num_matched: int, goes_on: bool) -> None:
        """Learn whether the repeat went on for one more token after `num_matched` matching tokens."""
        level = _level(num_matched)
        self._num_seen[level] += 1
        rate = max(LEARNING_RATE, 1.0 / (PRIOR_STEPS + self._num_seen[level]))
        self._shares[level] += rate * (goes_on - self._shares[level])

    def tokens(self, num_matched: int, choices: tuple[int, ...]) -> list[float]:
        """Return the expected tokens of a step with chains of each number of nodes, the bonus token included."""
        levels = (_level(num_matched + i) for i in range(max(choices)))
        reached = accumulate((self._shares[level] for level in levels), lambda path, share: path * share, initial=1.0)
        brought = list(accumulate(reached))
        return [brought[nodes] for nodes in choices]


def _level(num_matched: int) -> int:
    return min(max(num_matched, NGRAM), MOST_TOLD_APART).bit_length() - NGRAM.bit_length()


class RepeatedText:
    """One sequence: the position after the latest occurrence of every n-gram, and the position it repeats from."""

    def __init__(self, sequence: Sequence, shares: RepeatShares) -> None:
        """Index the sequence's tokens; `shares` may belong to several sequences."""
        self._shares = shares
        self._places = np.zeros(2 * sequence.max_length + 1, dtype=np.int32)  # bucket -> place behind n-gram; 0: none
        self._num_buckets = len(self._places)
        self._num_tokens = len(sequence)
        self.num_matched = 0  # tokens that agree, behind the last that did not; 0: it repeats nothing
        self._source = 0  # the place that the next token would be repeated from
        self._ngram: list[int] = sequence.token_ids[-NGRAM:].tolist()  # the last tokens
        self._index(sequence.token_ids)
        if len(sequence) >= NGRAM:
            bucket = self._bucket(self._ngram)
            self._begin(sequence.token_ids, len(sequence), self._ngram, int(self._places[bucket]))
            self._places[bucket] = len(sequence)

    @property
    def num_told_apart(self) -> int:
        """Return the number of matched tokens, capped where more of them no longer change the acceptance rate."""
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
            if self.num_matched <= NGRAM and (place := self._places.item(bucket)):
                self._begin(token_ids, end, ngram, place)
            self._places[bucket] = end
        self._num_tokens, self._ngram = end, ngram

    def tokens(self, choices: tuple[int, ...]) -> list[float]:
        """Return the expected tokens of a step with chains of each number of nodes; 1 without a repeat."""
        return self._shares.tokens(self.num_matched, choices) if self.num_matched else [1.0] * len(choices)

    def chain(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Return the next tokens if the repeat goes on; a repeat that reaches the end continues with its own tokens."""
        period = len(sequence) - self._source
        offsets = np.arange(num_tokens) % period
        found: list[int] = sequence.token_ids[self._source + offsets].tolist()
        return found

    def _follow(self, goes_on: bool) -> None:
        self._shares.observe(self.num_matched, goes_on)
        if not goes_on and self.num_matched < LONG_REPEAT:
            self.num_matched = 0
        else:
            self._source, self.num_matched = self._source + 1, self.num_matched + 1 if goes_on else 1

    def _begin(self, token_ids: np.ndarray, end: int, ngram: list[int], place: int) -> None:
        """Begin a repeat from `place` if the tokens before it are `ngram`, the last tokens before `end`."""
        if not NGRAM <= place < end or token_ids[place - NGRAM : place].tolist() != ngram:
            return  # another n-gram may have the same bucket
        most, self._source = min(place, MOST_TOLD_APART), place
        earlier, ending = token_ids[place - most : place].tolist(), token_ids[end - most : end].tolist()
        self.num_matched = NGRAM
        while self.num_matched < most and earlier[-self.num_matched - 1] == ending[-self.num_matched - 1]:
            self.num_matched += 1

    def _index(self, token_ids: np.ndarray) -> None:
        """Store the latest position of every n-gram except the last, which `_begin` must look up first."""
        if (num_ngrams := len(token_ids) - NGRAM) > 0:  # term by term: a window on each n-gram takes five times as long
            terms = (token_ids[i : i + num_ngrams] * factor for i, factor in enumerate(FACTORS))
            self._places[functools.reduce(operator.iadd, terms) % len(self._places)] = np.arange(NGRAM, len(token_ids))

    def _bucket(self, ngram: list[int]) -> int:
        a, b, c, d = FACTORS
        return (ngram[0] * a + ngram[1] * b + ngram[2] * c + ngram[3] * d) % self._num_buckets


FEW_NODES = 7
NEARLY = 0.85  # times the rate of the chosen way, by a few nodes: a repeat that promises less is not planned for
PROMISING = 1.3  # tokens a step of a chain that short: a repeat that promises less is not worth planning for
BETTER = 1.05  # times the rate of the chosen way
REFUSED_FOR = 16  # steps until repeats as long are planned for again: to plan takes a tenth of a batch's step
FEWEST_AT_ONCE, MOST_AT_ONCE = 8, 32  # plain steps between two looks at a text: they double while nothing is found


class RepeatWay(DraftWay):
    """Drafts chains for sequences that repeat earlier text, and trees of another way for the other sequences."""

    def __init__(self, trees: TreeWay) -> None:
        self._trees = trees
        self._shares = RepeatShares()
        self._texts: dict[str, RepeatedText] = {}
        self._repeated: set[str] = set()  # sequences that have chains in the newest step
        self._sizes: list[int] = []  # nodes of that step
        self._refused: set[tuple[int, ...]] = set()  # lengths of repeats that did not pay beside the same sequences
        self._num_since = 0  # steps since the first of them
        self._names: list[str] = []  # ids of these sequences
        self.most_steps = FEWEST_AT_ONCE  # plain ones, until a text is looked at

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self._texts[sequence.sequence_id] = RepeatedText(sequence, self._shares)

    def promise(self, requests: list[DraftRequest], beside: float) -> float:
        return 0.0  # the step alone says whether a text repeats itself: see `pays`

    def pays(self, requests: list[DraftRequest], beside: float, rate: float) -> bool:
        """Return whether chains bring more in the coming step than `rate` tokens per second."""
        names = [request.sequence.sequence_id for request in requests]
        promised = {name: tokens for name in names if (tokens := self._promised(name)) > PROMISING}
        self.most_steps = FEWEST_AT_ONCE if promised else min(2 * self.most_steps, MOST_AT_ONCE)
        if sum(promised.values()) - len(promised) <= (BETTER - 1) * len(requests):
            return False
        few = [FEW_NODES if name in promised else 0 for name in names]
        seconds = together(self._trees.sizes.forward_seconds(requests, few), beside)
        if len(requests) + sum(promised.values()) - len(promised) < NEARLY * rate * seconds:
            return False
        lengths = tuple(sorted(self._texts[name].num_told_apart for name in promised))
        self._num_since += 1
        if names != self._names or self._num_since > REFUSED_FOR:
            self._names, self._num_since = names, 0
            self._refused.clear()
        if lengths in self._refused:
            return False
        if self._planned(requests, set(promised), beside) < BETTER * rate:
            self._refused.add(lengths)
            return False
        return True

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        chains, sizes = dict[int, DraftTree](), list(self._sizes)
        for number, request in enumerate(requests):
            size = min(sizes[number], request.max_nodes)
            if size and _name(request) in self._repeated:
                chain = self._texts[_name(request)].chain(request.sequence, min(size, request.max_depth))
                chains[number], sizes[number] = DraftTree.chain(chain), 0
            else:
                sizes[number] = size
        trees = self._trees.sized(requests, sizes)
        self.wants_candidates = self._trees.wants_candidates
        self.expected_seconds = None
        return [chains.get(number, tree) for number, tree in enumerate(trees)]

    def update_all(self, verified: Many[Verified]) -> None:
        self._trees.update_all([each for each in verified if each[0].sequence_id not in self._repeated])
        self._trees.hear([each for each in verified if each[0].sequence_id in self._repeated])
        self.hear(verified)

    def hear(self, verified: Many[Verified]) -> None:
        for sequence, _ in verified:
            self._texts[sequence.sequence_id].catch_up(sequence)

    def stop(self, sequence: Sequence) -> None:
        del self._texts[sequence.sequence_id]

    def _promised(self, name: str) -> float:
        """Return the expected tokens of a step with a few nodes of a repeat; 1 without a repeat."""
        text = self._texts[name]
        return text.tokens((FEW_NODES,))[0] if text.num_matched else 1.0

    def _planned(self, requests: list[DraftRequest], repeated: set[str], beside: float) -> float:
        """Choose each sequence's number of nodes; return the expected tokens per second."""
        tokens = self._trees.sizes.tokens(requests)
        for number, request in enumerate(requests):
            if _name(request) in repeated:
                tokens[number] = self._texts[_name(request)].tokens(NODE_CHOICES)
        shares, rate = best_shares(self._trees.sizes.costs, tokens, lengths_of(requests), beside)
        self._repeated, self._sizes = repeated, [NODE_CHOICES[share] for share in shares]
        return rate


def _name(request: DraftRequest) -> str:
    return request.sequence.sequence_id
