"""Drafters that the Token Recycling paper compares with: guessed n-grams, matches in other texts, Medusa's heads."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np

from swiftbatch.worker.drafters.drafter_interface import TreeDrafter
from swiftbatch.worker.drafters.engine_options import TokenSwiftOptions
from swiftbatch.worker.drafters.self_speculation import RoundPlan, SelfSpeculationDrafter
from swiftbatch.worker.drafters.tokenswift.decoding_heads import DecodingHeads
from swiftbatch.worker.drafters.tokenswift.tokenswift import TokenSwiftProposer
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.sparse_cache import NUM_PINNED, SummaryKVCache
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence

WINDOW, NGRAM_SIZE, NUM_NGRAMS = 15, 5, 15  # Lookahead's, for models of 7 billion parameters
MEDUSA_WIDTH, MEDUSA_NODES = 10, 63  # candidates of a head, and most nodes of a tree without its root
LONGEST_MATCH, NUM_MATCHES, MATCH_DEPTH, MATCH_NODES = 16, 5000, 10, 64  # REST's


def tree_of(paths: Iterable[Many[int]], max_nodes: int, max_depth: int) -> DraftTree:
    """Join paths from the root in a tree; earlier paths come first."""
    tree, known = DraftTree(), dict[tuple[int, ...], int]({(): ROOT})
    for path in paths:
        for depth in range(1, min(len(path), max_depth) + 1):
            prefix = tuple(path[:depth])
            if prefix not in known and len(tree) < max_nodes:
                known[prefix] = len(tree)
                tree.token_ids.append(prefix[-1])
                tree.parents.append(known[prefix[:-1]])
            elif prefix not in known:
                break
    return tree


class LookaheadDrafter(TreeDrafter):
    """Lookahead decoding (Fu et al. 2024): n-grams of successive guesses at the coming tokens.

    Guesses of all coming positions are verified as a chain and improve at each step (Jacobi iteration). The paper's own
    branch keeps the last four guesses in one forward; ours keeps them between steps.
    """

    needs_top_k = True  # the next guesses

    def __init__(self) -> None:
        self._ngrams: defaultdict[int, deque[tuple[int, ...]]] = defaultdict(lambda: deque(maxlen=NUM_NGRAMS))
        self._guesses: dict[str, deque[dict[int, int]]] = {}  # of a sequence: {position: token}, newest last

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        known, end = self._guesses.get(sequence.sequence_id), len(sequence)
        newest = known[-1] if known else {}
        chain = [newest.get(end + place, sequence.last_token_id) for place in range(WINDOW)]
        return tree_of([chain, *reversed(self._ngrams[sequence.last_token_id])], max_nodes, max_depth)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        if verification.top_ids is None:
            return
        end = len(sequence) - len(verification.committed_ids)  # position of the first drafted token
        next_ids, children = verification.top_ids[:, 0].tolist(), verification.tree.children()
        node, row, guesses = ROOT, 0, {end: next_ids[0]}
        while (child := min(children.get(node, {}).values(), default=None)) is not None:  # the chain's nodes come first
            node, row = child, child + 1
            guesses[end + len(guesses)] = next_ids[row]
        guesses |= dict(zip(range(end, len(sequence)), verification.committed_ids, strict=True))
        history = self._guesses.setdefault(sequence.sequence_id, deque(maxlen=NGRAM_SIZE))
        history.append(guesses)
        self._collect(history)

    def stop(self, sequence: Sequence) -> None:
        self._guesses.pop(sequence.sequence_id, None)

    def _collect(self, history: deque[dict[int, int]]) -> None:
        """Keep the n-grams whose tokens are each a step newer than the one before."""
        if len(history) < NGRAM_SIZE:
            return
        for start in history[0]:
            ngram = tuple(guesses.get(start + place, -1) for place, guesses in enumerate(history))
            pool = self._ngrams[ngram[0]]
            if -1 not in ngram and ngram[1:] not in pool:
                pool.append(ngram[1:])


class DatastoreDrafter(TreeDrafter):
    """REST (He et al. 2023): what followed the longest match of the newest tokens in other texts, by frequency."""

    def __init__(self, token_ids: list[int]) -> None:
        self._ids = token_ids
        padded = np.append(np.array(token_ids, dtype=np.int64), np.zeros(LONGEST_MATCH, np.int64))
        columns = [padded[place : len(token_ids) + place] for place in reversed(range(LONGEST_MATCH))]
        self._order: list[int] = np.lexsort(columns).tolist()  # positions, by the tokens from there on

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        suffix: list[int] = sequence.token_ids[-LONGEST_MATCH:].tolist()
        for length in range(min(len(suffix), LONGEST_MATCH), 0, -1):
            if follow := self._after(suffix[-length:]):
                counts = Counter(path[:depth] for path in follow for depth in range(1, len(path) + 1))
                best = sorted(counts, key=lambda path: (-counts[path], len(path)))[:MATCH_NODES]
                return tree_of(best, max_nodes, max_depth)
        return DraftTree()

    def _after(self, tokens: list[int]) -> list[tuple[int, ...]]:
        def from_position(position: int) -> list[int]:
            return self._ids[position : position + len(tokens)]

        first = bisect.bisect_left(self._order, tokens, key=from_position)
        last = bisect.bisect_right(self._order, tokens, lo=first, key=from_position)
        found = (position + len(tokens) for position in self._order[first : min(last, first + NUM_MATCHES)])
        return [path for start in found if (path := tuple(self._ids[start : start + MATCH_DEPTH]))]


def medusa(target: TargetModel, parts_folder: Path | None) -> SelfSpeculationDrafter:
    """Return Medusa-1 (Cai et al. 2024): a tree of the heads' candidates at every step.

    Raises ModelError without heads for this target.
    """
    heads = DecodingHeads.load(parts_folder, target)
    options = TokenSwiftOptions(num_ngrams=0, recycles=False)
    proposer = TokenSwiftProposer(heads, (MEDUSA_WIDTH,) * heads.num_heads, options, None)
    plan = RoundPlan(num_rounds=0, num_round_nodes=0, chain_length=0, num_nodes=MEDUSA_NODES)
    # no round ever uses the cache
    return SelfSpeculationDrafter(target, proposer, SummaryKVCache, NUM_PINNED, plan)
