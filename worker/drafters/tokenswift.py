"""TokenSwift (Wu et al. 2025): heads and reused n-grams propose, the target with a partial cache checks.

From the hidden state of one row, trained heads predict the tokens behind the newest one; the most frequent n-grams of
the output that begin with that token stand beside them in one tree. Beyond the paper, candidates are ranked with the
noise of the coming positions, and several rounds with the partial cache may come before one full verification.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from worker.budget import measure_step_costs
from worker.cache import CacheShape
from worker.draft_cache import DraftCache
from worker.drafters.digit_tree import Ranked, Recycled, digit_tree
from worker.drafters.draft import Draft
from worker.drafters.draft_plan import MeasuredPlanner, PaperPlanner
from worker.drafters.heads import DecodingHeads
from worker.drafters.ngram_table import NgramTable
from worker.drafters.proposer import Proposal, Proposer
from worker.drafters.ranking import CandidateRanker
from worker.drafters.token_recycling import TokenRecyclingDrafter
from worker.drafters.two_level import TwoLevelDrafter
from worker.model_files import ModelError
from worker.partial_cache import PartialKVCache
from worker.sequence import Sequence
from worker.summary_cache import SummaryKVCache
from worker.target import TargetModel
from worker.verification import Verification

TYPICAL_LOGIT = 10.0  # of a likely token: what the penalty takes from it decides whether an n-gram is held back


@dataclass(frozen=True)
class TokenSwiftOptions:
    """The paper's parameters. Defaults are what is fastest; `PAPER_OPTIONS` are the paper's own."""

    digits: tuple[int, ...] = (1, 3, 3, 3)
    ngram_size: int = 4
    num_ngrams: int = 20  # k
    strategy: str = "summary"
    budget: int = 2048
    draft_rounds: int | None = None  # K; None: as many as pay
    recycles: bool = True  # also what the target said at the rows it verified (token recycling)


PAPER_OPTIONS = TokenSwiftOptions(strategy="dynamic", budget=4096, draft_rounds=1, recycles=False)


class TokenSwiftProposer(Proposer):
    """Heads and n-grams in one tree."""

    def __init__(self, heads: DecodingHeads, options: TokenSwiftOptions, vocab_size: int) -> None:
        self.needs_top_k = options.recycles
        self._heads = heads
        self._options = options
        self._recycling = TokenRecyclingDrafter(vocab_size)
        self._tables: dict[str, NgramTable] = {}

    def start(self, sequence: Sequence) -> None:
        self._tables[sequence.sequence_id] = table = NgramTable(self._options.ngram_size)
        table.extend(sequence.output_ids)

    def propose(self, draft: Draft, max_nodes: int, max_depth: int) -> Proposal:
        if max_nodes < 1 or max_depth < 1:
            return Proposal()
        digits = self._options.digits[1:]  # the first one is the newest token's own
        levels = self._levels(draft, draft.hidden, max(digits)) if digits and draft.hidden is not None else []
        recycled = self._recycled(draft) if self._options.recycles else None
        return Proposal(*digit_tree(levels, digits, self._ngrams(draft), max_nodes, max_depth, recycled))

    def update(self, sequence: Sequence, verification: Verification) -> None:
        table = self._tables[sequence.sequence_id]
        table.extend(sequence.output_ids[len(table) :])
        if self._options.recycles:
            self._recycling.update(sequence, verification)

    def learn(
        self, previous_ids: np.ndarray, row_token_ids: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray
    ) -> None:
        self._recycling.learn(previous_ids, row_token_ids, top_ids, top_logprobs)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return self._recycling.state(sequence) if self._options.recycles else {}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        if self._options.recycles:
            self._recycling.restore(sequence, state)

    def stop(self, sequence: Sequence) -> None:
        del self._tables[sequence.sequence_id]

    def _levels(self, draft: Draft, hidden: torch.Tensor, width: int) -> list[Ranked]:
        """Candidates of the heads behind the newest token, depth by depth."""
        logits = draft.sampler.penalised(self._heads.logits(hidden))  # [num_heads, vocab]
        return CandidateRanker(draft.sequence).rank_logits(logits, 1, width)

    def _recycled(self, draft: Draft) -> Recycled:
        """What the target said behind the same tokens before."""
        ranker = CandidateRanker(draft.sequence)
        newest = self._recycling.newest_pair(draft.sequence)

        def candidates(path: tuple[int, ...]) -> Ranked:
            pair = functools.reduce(self._recycling.next_pair, path, newest)
            return ranker.rank(len(path) + 1, *self._recycling.candidates(pair))

        return candidates

    def _ngrams(self, draft: Draft) -> list[Ranked]:
        """What followed the newest token most often, each token with its confidence behind those in front of it."""
        table = self._tables[draft.sequence.sequence_id]
        found = table.most_frequent(draft.newest, self._options.num_ngrams)
        followers: dict[tuple[int, ...], dict[int, int]] = {}
        for tokens, count in found:
            for depth, token_id in enumerate(tokens):
                counts = followers.setdefault(tokens[:depth], {})
                counts[token_id] = counts.get(token_id, 0) + count
        confidences = self._confidences(draft, followers)
        return [list(_confident(tokens, confidences)) for tokens, _ in found]

    def _confidences(
        self, draft: Draft, followers: dict[tuple[int, ...], dict[int, int]]
    ) -> dict[tuple[int, ...], float]:
        """Log-confidence of every path's last token: its share of the counts, under penalty and noise."""
        theta = draft.sequence.sampling.repetition_penalty
        held_back = TYPICAL_LOGIT * (1.0 - 1.0 / theta)
        ranker = CandidateRanker(draft.sequence)
        confidences: dict[tuple[int, ...], float] = {}
        for path, counts in followers.items():
            total = sum(counts.values()) + len(counts)  # something new is as likely as the number of kinds says
            scores = {
                token_id: math.log(count / total) - held_back * draft.sampler.is_penalised(token_id)
                for token_id, count in counts.items()
            }
            token_ids = sorted(scores, key=scores.__getitem__, reverse=True)
            for confidence, token_id in ranker.rank(len(path) + 1, token_ids, [scores[t] for t in token_ids]):
                confidences[(*path, token_id)] = confidence
        return confidences


def _confident(tokens: tuple[int, ...], confidences: dict[tuple[int, ...], float]) -> Iterator[tuple[float, int]]:
    """The path as far as no token of it is cut off."""
    for depth, token_id in enumerate(tokens):
        confidence = confidences.get(tokens[: depth + 1])
        if confidence is None:
            return
        yield confidence, token_id


def tokenswift(target: TargetModel, heads_folder: Path, options: TokenSwiftOptions) -> TwoLevelDrafter:
    """Put the engine's parts together. Raises ModelError where `heads_folder` has no heads for this target."""
    heads = DecodingHeads.load(heads_folder, target)
    if len(options.digits) > heads.num_heads + 1:
        digits = ",".join(map(str, options.digits))
        raise ModelError(f"tree {digits}: the heads in {heads_folder} are {heads.num_heads}, for that many digits + 1")
    proposer = TokenSwiftProposer(heads, options, target.vocab_size)
    planner = (
        MeasuredPlanner(measure_step_costs(target), options.budget)
        if options.draft_rounds is None
        else PaperPlanner(options.draft_rounds)
    )
    new_cache = functools.partial(STRATEGIES[options.strategy], target.cache_shape, options.budget)
    return TwoLevelDrafter(target, proposer, new_cache, planner, options.digits[0])


def _dynamic(shape: CacheShape, budget: int, sequence: Sequence) -> DraftCache:
    return PartialKVCache(shape, min(budget, sequence.max_length), sequence.num_prompt_tokens - 1)


def _static(shape: CacheShape, budget: int, sequence: Sequence) -> DraftCache:
    end = sequence.num_prompt_tokens - 1
    return PartialKVCache(shape, min(budget, sequence.max_length), end, last_fed=end)


def _full(shape: CacheShape, budget: int, sequence: Sequence) -> DraftCache:
    return PartialKVCache(shape, sequence.max_length, sequence.num_prompt_tokens - 1)


def _summary(shape: CacheShape, budget: int, sequence: Sequence) -> DraftCache:
    return SummaryKVCache(shape, budget, sequence.max_length)


STRATEGIES: dict[str, Callable[[CacheShape, int, Sequence], DraftCache]] = {
    "dynamic": _dynamic,  # follows the output
    "static": _static,  # built once, behind the prompt
    "full": _full,  # everything
    "summary": _summary,  # the most important chunks, and the others as one slot each
}
"""What the drafts see of the cache: the first three are those of table 5."""
