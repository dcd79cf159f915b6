"""The accepted tokens that nothing but a reused n-gram had proposed: what beta counts (TokenSwift, figures 3 and 4)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from swiftbatch.worker.bench.long.generation import ReuseTally
from swiftbatch.worker.drafters.base import Drafter
from swiftbatch.worker.drafters.two_level.chain import Chain
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.tree import DraftTree
from swiftbatch.worker.drawing.verification import Verification
from swiftbatch.worker.papers.tokenswift.digit_tree import Sources, by_token
from swiftbatch.worker.papers.tokenswift.tokenswift import TokenSwiftOptions, TokenSwiftProposer, tokenswift
from swiftbatch.worker.papers.tokenswift.variants import PAPER
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel

BASE_OPTIONS = {"tokenswift-paper": PAPER, "tokenswift": TokenSwiftOptions()}
NOTHING = Sources([], [])


@dataclass
class _Asked:
    """The length of the text behind which a tree was asked for, and what the tree was made of."""

    start: int
    sources: Sources = NOTHING


class MeteredProposer(TokenSwiftProposer):
    """A proposer that keeps what its trees are made of until it hears which tokens were accepted."""

    def __init__(self, tally: ReuseTally, *parts: Any) -> None:
        super().__init__(*parts)
        self._tally = tally
        self._asked: dict[str, list[_Asked]] = defaultdict(list)

    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        for chain in chains:
            self._asked[chain.sequence.sequence_id].append(_Asked(len(chain.sequence)))
        return super().propose(chains, limits)

    def sources(self, chain: Chain) -> Sources:
        found = self._asked[chain.sequence.sequence_id][-1].sources = super().sources(chain)
        return found

    def update(self, sequence: Sequence, verification: Verification) -> None:
        end = len(sequence) - len(verification.committed_ids) + verification.num_accepted_tokens
        asked = [*self._asked.pop(sequence.sequence_id, []), _Asked(end + 1)]
        for one, later in itertools.pairwise(asked):  # the token in front of the later tree was drawn, not proposed
            path = tuple(sequence.token_ids[one.start : min(end, later.start - 1)].tolist())
            self._tally.num_accepted_tokens += sum(by_ngrams_alone(path, one.sources))
        super().update(sequence, verification)


def by_ngrams_alone(path: tuple[int, ...], sources: Sources) -> list[bool]:
    """Tell for every token of a path whether n-grams alone proposed it."""
    ngrams = [tuple(token for _, token in ngram) for ngram in sources.ngrams]
    in_digits, is_alone, found = True, False, []
    for depth, token in enumerate(path):
        in_digits = in_digits and depth < len(sources.levels) and token in by_token(sources.levels[depth])
        is_alone = is_alone or not (in_digits or token in sources.others(path[:depth]))
        is_alone = is_alone and any(ngram[: depth + 1] == path[: depth + 1] for ngram in ngrams)
        found.append(is_alone)
    return found


def metered_drafter(
    engine: str, target: TargetModel, costs: Costs, parts_folder: Path | None, options: TokenSwiftOptions | None = None
) -> tuple[Drafter, ReuseTally]:
    """TokenSwift's drafter, where `options` may be others than the engine's, and what its n-grams bring. ModelError."""
    tally = ReuseTally()
    new_proposer = partial(MeteredProposer, tally)
    return tokenswift(target, costs, parts_folder, options or BASE_OPTIONS[engine], new_proposer), tally
