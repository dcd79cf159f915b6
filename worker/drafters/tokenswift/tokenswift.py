"""TokenSwift (Wu et al. 2025), tuned and as published: heads and reused n-grams propose trees."""

from __future__ import annotations

import functools
import heapq
import math
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.choice.choosing_drafter import with_rounds
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.engine_options import TokenSwiftOptions
from swiftbatch.worker.drafters.ranking import CandidateRanker, grow_best_first
from swiftbatch.worker.drafters.self_speculation import (
    Chain,
    Proposer,
    RoundPlan,
    SelfSpeculationDrafter,
    partial_cache,
)
from swiftbatch.worker.drafters.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.drafters.tokenswift.decoding_heads import DecodingHeads
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES
from swiftbatch.worker.kv.sparse_cache import SparseCacheFactory
from swiftbatch.worker.sampling.batch_sampler import penalised
from swiftbatch.worker.sampling.draft_tree import DraftTree, Verification
from swiftbatch.worker.sampling.logits_processors import adjusted
from swiftbatch.worker.sampling.sequence import Sequence

Ranked = list[tuple[float, int]]  # (log-confidence, token)
Recycled = Callable[[tuple[int, ...]], Ranked]  # maps a path from the root to candidates behind it
Branches = list[dict[int, tuple[float, int]]]  # prefix tree: per node, token -> (log-confidence, node)

_OUTSIDE = 0  # a node without n-grams below
_TOP = 1  # the prefix tree's root


class Sources(NamedTuple):
    levels: list[Ranked]  # [d] holds distinct candidates of depth d + 1, best first
    ngrams: list[Ranked]  # paths from the root
    recycled: Recycled | None = None

    def others(self, path: tuple[int, ...]) -> dict[int, float]:
        return by_token(self.recycled(path)) if self.recycled else {}


class _Context(NamedTuple):
    """A node's path, its node in the prefix tree, and whether digits go on below it."""

    path: tuple[int, ...]
    node: int
    in_digits: bool


def digit_tree(sources: Sources, max_nodes: int, max_depth: int) -> DraftTree:
    """Join digits, n-grams and recycled candidates in one tree, parents before children.

    A node takes the highest confidence of its sources. Kept are the `max_nodes` nodes of highest path confidence (the
    sum from the root).
    """
    branches = _prefix_tree(sources.ngrams)
    levels = [by_token(level) for level in sources.levels]

    def expand(context: _Context, depth: int) -> list[tuple[float, int, _Context]]:
        """Return candidates below a node, best first."""
        path, node, in_digits = context
        level = levels[depth - 1] if in_digits and depth <= len(levels) else {}
        branch = branches[node]
        confidences = {token: confidence for token, (confidence, _) in branch.items()}
        for source in (level, sources.others(path)):
            for token, confidence in source.items():
                confidences[token] = max(confidence, confidences.get(token, confidence))
        ranked = sorted(((confidence, token) for token, confidence in confidences.items()), reverse=True)
        return [(c, t, _Context((*path, t), branch[t][1] if t in branch else _OUTSIDE, t in level)) for c, t in ranked]

    return grow_best_first(_Context((), _TOP, True), expand, max_nodes, max_depth)


def by_token(ranked: Ranked) -> dict[int, float]:
    return {token: confidence for confidence, token in ranked}


def _prefix_tree(ngrams: list[Ranked]) -> Branches:
    branches: Branches = [{}, {}]
    for ngram in ngrams:
        node = _TOP
        for logconf, token in ngram:
            known = branches[node].get(token)
            child = known[1] if known else len(branches)
            if not known:
                branches.append({})
            if not known or known[0] < logconf:
                branches[node][token] = (logconf, child)
            node = child
    return branches


class NgramTable:
    """Counts of the n-grams of a growing output, by their first token."""

    def __init__(self, size: int) -> None:
        self._num_tokens = 0
        self._newest = deque[int](maxlen=size)
        # first token -> the tokens after it -> count, the most recent last
        self._counts = defaultdict[int, dict[tuple[int, ...], int]](dict)

    def __len__(self) -> int:
        return self._num_tokens

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._num_tokens += 1
            self._newest.append(token_id)
            if len(self._newest) == self._newest.maxlen:
                first, *others = self._newest
                counts, behind = self._counts[first], tuple(others)
                counts[behind] = counts.pop(behind, 0) + 1

    def most_frequent(self, first_token: int, k: int) -> list[tuple[tuple[int, ...], int]]:
        """Return at most `k` pairs (tokens after `first_token`, count), most frequent first, then newest first."""
        counts = self._counts.get(first_token, {})
        return heapq.nlargest(k, reversed(counts.items()), key=operator.itemgetter(1))


TYPICAL_LOGIT = 10.0  # a likely token's logit; a penalty's cut from it decides whether an n-gram is held back


class TokenSwiftProposer(Proposer):
    needs_hidden = True

    def __init__(
        self,
        heads: DecodingHeads,
        digits: tuple[int, ...],
        options: TokenSwiftOptions,
        recycling: TokenRecyclingDrafter | None,
    ) -> None:
        """`digits` are the numbers of candidates by depth, one per head; `recycling` None: not used."""
        self.needs_top_k = recycling is not None
        self._heads = heads
        self._digits = digits
        self._options = options
        self._recycling = recycling
        self._tables: dict[str, NgramTable] = {}

    def start(self, sequence: Sequence) -> None:
        self._tables[sequence.sequence_id] = table = NgramTable(self._options.ngram_size)
        table.extend(sequence.output_ids.tolist())
        if self._recycling:
            self._recycling.read_text(sequence.token_ids)

    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        return [self._tree(chain, *limit) for chain, limit in zip(chains, limits, strict=True)]

    def sources(self, chain: Chain) -> Sources:
        recycled = self._recycled(chain, self._recycling) if self._recycling else None
        return Sources(self._levels(chain), self._ngrams(chain), recycled)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        table = self._tables[sequence.sequence_id]
        table.extend(sequence.output_ids[len(table) :].tolist())
        if self._recycling:
            self._recycling.update(sequence, verification)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return self._recycling.state(sequence) if self._recycling else {}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        if self._recycling:
            self._recycling.restore(sequence, state)

    def stop(self, sequence: Sequence) -> None:
        del self._tables[sequence.sequence_id]

    def _tree(self, chain: Chain, max_nodes: int, max_depth: int) -> DraftTree:
        if max_nodes < 1 or max_depth < 1:
            return DraftTree()
        return digit_tree(self.sources(chain), max_nodes, max_depth)

    def _levels(self, chain: Chain) -> list[Ranked]:
        if chain.hidden is None:
            return []
        logits = penalised(chain.sampler, self._heads.logits(chain.hidden))  # [num_heads, vocab]
        ranked = CandidateRanker(chain.sequence).rank_logits(logits, range(1, len(logits) + 1), max(self._digits))
        return [level[:digit] for level, digit in zip(ranked, self._digits, strict=False)]

    def _recycled(self, chain: Chain, recycling: TokenRecyclingDrafter) -> Recycled:
        """Return a ranking of the candidates that the target earlier had after the same tokens."""
        ranker, tables = CandidateRanker(chain.sequence), recycling.tables
        newest = tables.newest_pair(chain.sequence)

        def candidates(path: tuple[int, ...]) -> Ranked:
            pair = functools.reduce(tables.next_pair, path, newest)
            return ranker.rank(len(path) + 1, *tables.candidates(pair))

        return candidates

    def _ngrams(self, chain: Chain) -> list[Ranked]:
        """Return the n-grams that most often followed the newest token, with the confidence of each of their tokens."""
        table = self._tables[chain.sequence.sequence_id]
        found = table.most_frequent(chain.newest, self._options.num_ngrams)
        followers: dict[tuple[int, ...], dict[int, int]] = {}
        for tokens, count in found:
            for depth, token_id in enumerate(tokens):
                counts = followers.setdefault(tokens[:depth], {})
                counts[token_id] = counts.get(token_id, 0) + count
        confidences = self._confidences(chain, followers)
        return [list(_confident(tokens, confidences)) for tokens, _ in found]

    def _confidences(
        self, chain: Chain, followers: dict[tuple[int, ...], dict[int, int]]
    ) -> dict[tuple[int, ...], float]:
        """Compute each path's log-confidence from its last token's share of the counts, penalties, bias and noise."""
        ranker, changes = CandidateRanker(chain.sequence), self._changes(chain, followers)
        confidences: dict[tuple[int, ...], float] = {}
        for path, counts in followers.items():
            total = sum(counts.values()) + len(counts)  # a new follower is as likely as the share of distinct ones says
            scores = {
                token_id: math.log(count / total) + changes.get(token_id, 0.0) for token_id, count in counts.items()
            }
            token_ids = sorted(scores, key=scores.__getitem__, reverse=True)
            for confidence, token_id in ranker.rank(len(path) + 1, token_ids, [scores[t] for t in token_ids]):
                confidences[(*path, token_id)] = confidence
        return confidences

    def _changes(self, chain: Chain, followers: dict[tuple[int, ...], dict[int, int]]) -> dict[int, float]:
        """Compute how much penalties and bias change the followers' logits, assuming a typical logit."""
        sampling, context = chain.sequence.sampling, chain.sampler.context().on_cpu()
        if context.is_plain:
            return {}
        token_ids = sorted({token_id for counts in followers.values() for token_id in counts})
        typical = torch.full((chain.sequence.vocab_size,), TYPICAL_LOGIT)
        changed = adjusted(typical, sampling, context)[token_ids] - TYPICAL_LOGIT
        return dict(zip(token_ids, changed.tolist(), strict=True))


def _confident(tokens: tuple[int, ...], confidences: dict[tuple[int, ...], float]) -> Iterator[tuple[float, int]]:
    """Yield (log-confidence, token) along `tokens`, up to the first token that the sampling parameters cut off."""
    for depth, token_id in enumerate(tokens):
        confidence = confidences.get(tokens[: depth + 1])
        if confidence is None:
            return
        yield confidence, token_id


DIGIT = 3  # candidates of a head
CHAINS = RoundPlan(num_rounds=7, num_round_nodes=5, chain_length=7, num_nodes=7)


def tokenswift(
    target: TargetModel,
    costs: Costs,
    parts_folder: Path | None,
    options: TokenSwiftOptions,
    new_cache: SparseCacheFactory | None = None,
    new_proposer: Callable[..., TokenSwiftProposer] = TokenSwiftProposer,
) -> Drafter:
    """Make TokenSwift's drafter; `new_cache` None means the options' cache.

    Raises ModelError if heads for this target are missing or too few.
    """
    heads = DecodingHeads.load(parts_folder, target)
    digits = options.tree or (DIGIT,) * heads.num_heads
    if len(digits) > heads.num_heads:
        folder = parts_folder or target.files.path
        tree = ",".join(map(str, digits))
        raise ModelError(f"tree {tree}: the heads in {folder} are {heads.num_heads}, expected one for each number")
    recycling = TokenRecyclingDrafter(target) if options.recycles else None
    proposer = new_proposer(heads, digits, options, recycling)
    plan = whole_trees(options.rounds) if options.rounds else CHAINS
    cache = new_cache or partial_cache(options)
    drafter = SelfSpeculationDrafter(target, proposer, cache, options.partial_budget, plan, options.budget_of)
    return drafter if options.rounds else with_rounds(drafter, plan, costs)


def whole_trees(num_rounds: int) -> RoundPlan:
    """Return the paper's plan: whole trees, and one row in the first round's forward."""
    return RoundPlan(num_rounds, MAX_TREE_NODES, MAX_TREE_NODES, MAX_TREE_NODES, is_first_bare=True)
