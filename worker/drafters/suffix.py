"""Suffix drafting: proposes what followed the longest repeated suffix of prompt + output."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from swiftbatch.worker.drafters.choice.choosing_drafter import ChoosingDrafter, with_trees
from swiftbatch.worker.drafters.drafter_interface import TreeDrafter
from swiftbatch.worker.drafters.ranking import CandidateRanker, grow_best_first
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence

ROOT_STATE = 0
_NONE = -1

MAX_CANDIDATES = 8
MAX_CONTEXTS = 6  # suffixes tried per node, longest first
MAX_FOLLOWERS = 16  # followers tried per suffix, the most recent ones


class SuffixAutomaton:
    """Suffix automaton with counts (Blumer et al. 1985), in flat arrays, in amortised constant time per token.

    A state stands for the substrings that end at the same places (state 0: the empty string). Its link is the longest
    proper suffix that also ends elsewhere.
    """

    def __init__(self) -> None:
        self._length = array("i")  # tokens of the state's longest string
        self._link = array("i")
        self._count = array("i")  # times seen as the longest repeated suffix, plus one
        self._only_token = array("i")  # the edge of a state that does not branch
        self._only_target = array("i")
        self._branches: dict[int, dict[int, int]] = {}  # edges of branching states, least recently followed first
        self._last = self._new_state(0, _NONE, 0)

    def __len__(self) -> int:
        return self._length[self._last]

    def longest_repeated_suffix(self) -> int:
        """Return the state of the longest suffix that also occurs earlier, or `ROOT_STATE` if none does."""
        return max(self._link[self._last], ROOT_STATE)

    def link(self, state: int) -> int:
        """Return the state of the next shorter suffix."""
        return self._link[state]

    def length(self, state: int) -> int:
        return self._length[state]

    def count(self, state: int) -> int:
        """Return how often the state was the longest repeated suffix, plus one: a lower bound of its occurrences."""
        return self._count[state]

    def step(self, state: int, token: int) -> int:
        """Return the state after one more token, or -1 if this token never followed `state`."""
        if self._only_token[state] == token:
            return self._only_target[state]
        edges = self._branches.get(state)
        return edges.get(token, _NONE) if edges else _NONE

    def followers(self, state: int, limit: int) -> Iterator[tuple[int, int]]:
        """Return at most `limit` tokens that followed a state, with their states, newest first."""
        edges = self._branches.get(state)
        if edges is not None:
            return islice(reversed(edges.items()), limit)
        return iter(((self._only_token[state], self._only_target[state]),) if self._only_token[state] >= 0 else ())

    def extend(self, token: int) -> None:
        """Append the next token (an integer of at least 0)."""
        new = self._new_state(self._length[self._last] + 1, ROOT_STATE, 1)
        state = self._last
        while state != _NONE and (target := self.step(state, token)) == _NONE:
            self._add_edge(state, token, new)
            state = self._link[state]
        if state != _NONE:
            if self._length[target] > self._length[state] + 1:
                target = self._clone(state, token, target)
            self._touch(state, token)
            self._link[new] = target
            self._count[target] += 1
        self._last = new

    def _new_state(self, length: int, link: int, count: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._count.append(count)
        self._only_token.append(_NONE)
        self._only_target.append(_NONE)
        return len(self._length) - 1

    def _clone(self, state: int, token: int, target: int) -> int:
        """Split off the strings of `target` that end with the shorter context `state`."""
        clone = self._new_state(self._length[state] + 1, self._link[target], self._count[target])
        self._only_token[clone] = self._only_token[target]
        self._only_target[clone] = self._only_target[target]
        if target in self._branches:
            self._branches[clone] = dict(self._branches[target])
        self._link[target] = clone
        while state != _NONE and self.step(state, token) == target:
            self._set_edge(state, token, clone)
            state = self._link[state]
        return clone

    def _add_edge(self, state: int, token: int, target: int) -> None:
        edges = self._branches.get(state)
        if edges is not None:
            edges[token] = target
        elif self._only_token[state] == _NONE:
            self._only_token[state], self._only_target[state] = token, target
        else:
            self._branches[state] = {self._only_token[state]: self._only_target[state], token: target}
            self._only_token[state] = self._only_target[state] = _NONE

    def _set_edge(self, state: int, token: int, target: int) -> None:
        if state in self._branches:
            self._branches[state][token] = target
        else:
            self._only_target[state] = target

    def _touch(self, state: int, token: int) -> None:
        edges = self._branches.get(state)
        if edges is not None:
            edges[token] = edges.pop(token)


def suffix(target: TargetModel, costs: Costs, parts_folder: Path | None) -> ChoosingDrafter:
    return with_trees(SuffixDrafter(), costs)


class SuffixDrafter(TreeDrafter):
    """Best-first trees of what followed the longest repeated suffixes, ranked with the noise."""

    def __init__(self) -> None:
        self._automata: dict[str, SuffixAutomaton] = {}

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self._automata[sequence.sequence_id] = SuffixAutomaton()
        self._catch_up(sequence)

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        automaton = self._automata[sequence.sequence_id]
        ranker = CandidateRanker(sequence)

        def expand(state: int, depth: int) -> list[tuple[float, int, int]]:
            candidates = predict(automaton, state)
            token_ids = [token for _, token, _ in candidates]
            states = {token: target for _, token, target in candidates}
            ranked = ranker.rank(depth, token_ids, [logprob for logprob, _, _ in candidates])
            return [(confidence, token, states[token]) for confidence, token in ranked]

        return grow_best_first(automaton.longest_repeated_suffix(), expand, max_nodes, max_depth)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        self._catch_up(sequence)

    def stop(self, sequence: Sequence) -> None:
        del self._automata[sequence.sequence_id]

    def _catch_up(self, sequence: Sequence) -> None:
        automaton = self._automata[sequence.sequence_id]
        for token in sequence.token_ids[len(automaton) :].tolist():
            automaton.extend(token)


def predict(automaton: SuffixAutomaton, state: int) -> list[tuple[float, int, int]]:
    """Predict at most `MAX_CANDIDATES` of (log-probability, token, next state), likeliest first.

    Prediction by partial matching: each context, longest first, distributes the remaining probability by counts.
    """
    found: dict[int, tuple[float, int]] = {}  # token -> (probability, next state)
    left = 1.0
    for _ in range(MAX_CONTEXTS):
        if state == ROOT_STATE or len(found) >= MAX_CANDIDATES:
            break
        followers = [
            (token, target) for token, target in automaton.followers(state, MAX_FOLLOWERS) if token not in found
        ]
        counts = [automaton.count(target) for _, target in followers]
        total = sum(counts) + len(counts) / automaton.length(state)
        for (token, target), count in zip(followers, counts, strict=True):
            found[token] = (left * count / total, target)
        left *= 1.0 - sum(counts) / total if counts else 1.0
        state = automaton.link(state)
    best = sorted(((probability, token, target) for token, (probability, target) in found.items()), reverse=True)
    return [(math.log(probability), token, target) for probability, token, target in best[:MAX_CANDIDATES]]
