"""TokenSwift (Wu et al. 2025): heads and reused n-grams propose, the target with a summarised cache checks.

From the hidden state of one row, trained heads predict the tokens behind the newest one; the most frequent n-grams of
the output that begin with that token stand beside them. Beyond the paper, candidates are ranked with the noise of the
coming positions, and what the target said behind the same tokens before is drafted again (token recycling).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.caches.full_cache import MAX_TREE_NODES
from swiftbatch.worker.caches.partial_cache import PartialCacheFactory
from swiftbatch.worker.caches.summary_cache import SummaryKVCache
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.drafters.drafter_interface import ReadRows
from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.drafters.recycling.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.drafters.two_level.chain import Chain, Proposer, RoundPlan
from swiftbatch.worker.drafters.two_level.two_level_drafter import TwoLevelDrafter
from swiftbatch.worker.drafters.two_level.two_level_plan import planner_of
from swiftbatch.worker.drawing.adjustments import adjusted
from swiftbatch.worker.drawing.draft_tree import DraftTree
from swiftbatch.worker.drawing.drawing import penalised
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.verification import Verification
from swiftbatch.worker.papers.tokenswift.digit_tree import Ranked, Recycled, Sources, digit_tree
from swiftbatch.worker.papers.tokenswift.heads import DecodingHeads
from swiftbatch.worker.papers.tokenswift.ngram_table import NgramTable
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel

TYPICAL_LOGIT = 10.0  # a likely token's logit: the penalty's cut from it decides if an n-gram is held back


class TokenSwiftProposer(Proposer):
    """One tree from all sources, whichever of them proposes a node."""

    needs_hidden = True

    def __init__(
        self,
        heads: DecodingHeads,
        digits: tuple[int, ...],
        ngram_size: int,
        num_ngrams: int,
        recycling: TokenRecyclingDrafter | None,
    ) -> None:
        """`digits` are those behind the newest token's own, one for each head; `recycling` None: not used."""
        self.needs_top_k = recycling is not None
        self._heads = heads
        self._digits = digits
        self._ngram_size = ngram_size
        self._num_ngrams = num_ngrams
        self._recycling = recycling
        self._tables: dict[str, NgramTable] = {}

    def start(self, sequence: Sequence) -> None:
        self._tables[sequence.sequence_id] = table = NgramTable(self._ngram_size)
        table.extend(sequence.output_ids)

    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        return [self._tree(chain, *limit) for chain, limit in zip(chains, limits, strict=True)]

    def sources(self, chain: Chain) -> Sources:
        """Find the sources of candidates behind a chain's newest token."""
        recycled = self._recycled(chain, self._recycling) if self._recycling else None
        return Sources(self._levels(chain), self._ngrams(chain), recycled)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        table = self._tables[sequence.sequence_id]
        table.extend(sequence.output_ids[len(table) :])
        if self._recycling:
            self._recycling.update(sequence, verification)

    def learn(self, rows: ReadRows) -> None:
        if self._recycling:
            self._recycling.learn(rows)

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
        """Candidates of the heads behind the newest token, depth by depth, as many as the digits say."""
        if not self._digits or chain.hidden is None:
            return []
        logits = penalised(chain.sampler, self._heads.logits(chain.hidden))  # [num_heads, vocab]
        ranked = CandidateRanker(chain.sequence).rank_logits(logits, range(1, len(logits) + 1), max(self._digits))
        return [level[:digit] for level, digit in zip(ranked, self._digits, strict=False)]

    def _recycled(self, chain: Chain, recycling: TokenRecyclingDrafter) -> Recycled:
        """Return the ranking of what the target said behind the same tokens before."""
        ranker, tables = CandidateRanker(chain.sequence), recycling.tables
        newest = tables.newest_pair(chain.sequence)

        def candidates(path: tuple[int, ...]) -> Ranked:
            pair = functools.reduce(tables.next_pair, path, newest)
            return ranker.rank(len(path) + 1, *tables.candidates(pair))

        return candidates

    def _ngrams(self, chain: Chain) -> list[Ranked]:
        """Find what followed the newest token most often; each token has its confidence behind those before it."""
        table = self._tables[chain.sequence.sequence_id]
        found = table.most_frequent(chain.newest, self._num_ngrams)
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
        """Log-confidence of every path's last token: its share of the counts, under penalties, bias and noise."""
        ranker, changes = CandidateRanker(chain.sequence), self._changes(chain, followers)
        confidences: dict[tuple[int, ...], float] = {}
        for path, counts in followers.items():
            total = sum(counts.values()) + len(counts)  # something new is as likely as the number of kinds says
            scores = {
                token_id: math.log(count / total) + changes.get(token_id, 0.0) for token_id, count in counts.items()
            }
            token_ids = sorted(scores, key=scores.__getitem__, reverse=True)
            for confidence, token_id in ranker.rank(len(path) + 1, token_ids, [scores[t] for t in token_ids]):
                confidences[(*path, token_id)] = confidence
        return confidences

    def _changes(self, chain: Chain, followers: dict[tuple[int, ...], dict[int, int]]) -> dict[int, float]:
        """Compute how much penalties and bias change each follower at a typical logit; empty where there are none."""
        sampling, context = chain.sequence.sampling, chain.sampler.context().on_cpu()
        if context.is_plain:
            return {}
        token_ids = sorted({token_id for counts in followers.values() for token_id in counts})
        typical = torch.full((chain.sequence.vocab_size,), TYPICAL_LOGIT)
        changed = adjusted(typical, sampling, context)[token_ids] - TYPICAL_LOGIT
        return dict(zip(token_ids, changed.tolist(), strict=True))


def _confident(tokens: tuple[int, ...], confidences: dict[tuple[int, ...], float]) -> Iterator[tuple[float, int]]:
    """The path as far as no token of it is cut off."""
    for depth, token_id in enumerate(tokens):
        confidence = confidences.get(tokens[: depth + 1])
        if confidence is None:
            return
        yield confidence, token_id


@dataclass(frozen=True)
class TokenSwiftOptions:
    """The paper's parameters. Defaults are what is fastest; the paper's own are in `bench/variants.py`."""

    digits: tuple[int, ...] = (1, 3, 3, 3)
    ngram_size: int = 4
    num_ngrams: int = 20  # k
    cache: PartialCacheFactory = SummaryKVCache  # what the rounds see
    budget: int = ENGINES["tokenswift"].partial_budget
    draft_rounds: int | None = None  # K; None: as many as pay
    recycles: bool = True  # also what the target said at the rows it verified (token recycling)


DEFAULTS = TokenSwiftOptions()


def tokenswift(
    target: TargetModel,
    costs: Costs,
    parts_folder: Path | None,
    options: TokenSwiftOptions = DEFAULTS,
    new_proposer: Callable[..., TokenSwiftProposer] = TokenSwiftProposer,
) -> TwoLevelDrafter:
    """A `DrafterFactory`. Raises ModelError where there are no heads for this target, or too few."""
    heads = DecodingHeads.load(parts_folder, target)
    if len(options.digits) > heads.num_heads + 1:
        digits = ",".join(map(str, options.digits))
        folder = parts_folder or target.files.path
        raise ModelError(f"tree {digits}: the heads in {folder} are {heads.num_heads}, for that many digits + 1")
    recycling = TokenRecyclingDrafter(target, None) if options.recycles else None
    proposer = new_proposer(heads, options.digits[1:], options.ngram_size, options.num_ngrams, recycling)
    plan = None if options.draft_rounds is None else whole_trees(options.draft_rounds)
    planner = planner_of(plan, costs, options.budget)
    return TwoLevelDrafter(target, proposer, planner, options.cache, options.budget, options.digits[0])


def whole_trees(num_rounds: int) -> RoundPlan:
    """The paper's plan: whole trees; the first round's forward has one row."""
    return RoundPlan(num_rounds, MAX_TREE_NODES, MAX_TREE_NODES, MAX_TREE_NODES, is_first_bare=True)
