"""Suffix drafting: the automaton of prompt + output tells what followed the longest repeated suffix."""

from __future__ import annotations

import math

from swiftbatch.worker.caches.full import FullKVCache
from swiftbatch.worker.drafters.best_first import grow_best_first
from swiftbatch.worker.drafters.lookup.suffix_automaton import ROOT_STATE, SuffixAutomaton
from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.drafters.shared_budget import BudgetedDrafter
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.tree import DraftTree
from swiftbatch.worker.drawing.verification import Verification
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel

MAX_CANDIDATES = 8
MAX_CONTEXTS = 6  # suffixes looked at for one node, longest first
MAX_FOLLOWERS = 16  # followers looked at in one suffix, the most recent ones


class SuffixDrafter(BudgetedDrafter):
    """Grows best-first trees from what followed the longest repeated suffixes, ranked with the noise."""

    def __init__(self, target: TargetModel, costs: Costs, *_: object) -> None:
        super().__init__(costs)
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
        super().update(sequence, verification)
        self._catch_up(sequence)

    def stop(self, sequence: Sequence) -> None:
        super().stop(sequence)
        del self._automata[sequence.sequence_id]

    def _catch_up(self, sequence: Sequence) -> None:
        automaton = self._automata[sequence.sequence_id]
        for token in sequence.token_ids[len(automaton) :].tolist():
            automaton.extend(token)


def predict(automaton: SuffixAutomaton, state: int) -> list[tuple[float, int, int]]:
    """Predict what follows a state: at most `MAX_CANDIDATES` of (log-probability, token, next state), likeliest first.

    Prediction by partial matching: a context shares out what the longer ones left, by counts; what it leaves itself
    falls with the number of tokens seen in it and with its length. Tokens that a longer context named are done.
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
