"""The contract of every drafter, and the baseline without drafts."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence


class DraftRequest(NamedTuple):
    """Request for a tree of at most `max_nodes` nodes and depth `max_depth`; the drafter may propose a smaller one."""

    sequence: Sequence
    max_nodes: int
    max_depth: int
    overhead: float = 0.0  # measured seconds of a step beside forward and drafts


MOST_GUESSED = 16  # rows of a tree that no drafter proposed
ROW_PRICE = 0.2  # tokens: for drafters that know no costs

WantedTree = tuple[Sequence, int, int]
"""A tree that is to be drafted behind a sequence: most nodes and greatest depth, which the drafter has chosen."""


@dataclass
class DraftCounters:
    """Counts of drafting so far, summed over sequences; times in seconds."""

    seconds: dict[str, float]  # by phase of proposing
    num_rounds: int = 0  # forwards with a partial cache
    num_checked_nodes: int = 0  # proposed nodes that rounds checked
    num_agreed_nodes: int = 0  # checked nodes that the partial cache's draws confirmed
    num_levels: int = 0  # forwards of a draft model that grows trees


class ReadRows(NamedTuple):
    """Tokens of a prompt or a replayed output, and the target's candidates to follow each of them."""

    previous_ids: np.ndarray  # [num_rows] int64, the tokens before them
    token_ids: np.ndarray  # [num_rows] int64
    top_ids: np.ndarray  # [num_rows, TOP_K] int64
    top_logprobs: np.ndarray  # [num_rows, TOP_K] float32, of the unprocessed logits


Verified = tuple[Sequence, Verification]
"""A sequence, and what a step has made of it."""


class Learner:
    """Observer of all sequences of one worker."""

    needs_top_k: bool = False  # it reads `Verification.top_ids` and `top_logprobs`
    needs_hidden: bool = False  # it reads `Verification.hidden`
    feature_layers: tuple[int, ...] = ()  # layers whose outputs that holds, side by side; none: final hidden states
    learns_rows: bool = False  # it takes the target's candidates to follow read tokens, which cost their logits
    phases: tuple[str, ...] = ()  # the timed parts of proposing

    @functools.cached_property
    def counters(self) -> DraftCounters:
        return DraftCounters(dict.fromkeys(self.phases, 0.0))

    def learn(self, rows: ReadRows) -> None:
        """Learn the target's candidates to follow read tokens. Called if `learns_rows`."""

    def read(self, sequence: Sequence, position: int, hidden: torch.Tensor) -> None:
        """Take the target's final hidden states `[num_rows, hidden]` of read tokens from `position` on.

        Called if `needs_hidden`.
        """

    def update(self, sequence: Sequence, verification: Verification) -> None:
        """Learn from a verified step, after its tokens were committed."""

    def update_all(self, verified: Many[Verified]) -> None:
        for sequence, verification in verified:
            self.update(sequence, verification)

    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or moved away."""

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        """Return arrays that a resumed sequence needs beyond its tokens."""
        return {}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        """Restore a result of `state`, after `start`.

        Raises ValueError for arrays that do not fit, and then changes nothing.
        """


class Drafter(Learner, ABC):
    """Proposer of draft trees, which never change the output."""

    reads_caches: bool = False  # it reads cache positions that no row of the target sees any more

    def row_prices(self, num_rows: int, length: int) -> Many[float]:
        """Return how many tokens 1, 2 and so on further rows must bring to be worth their time.

        The coming forward has `num_rows` others; the longest sequence has `length` tokens.
        """
        return [number * ROW_PRICE for number in range(1, MOST_GUESSED + 1)]

    @property
    def draft_kind(self) -> str:
        """Return the last proposal's kind, one of `metrics.counters.DRAFT_KINDS`."""
        return "tree"

    @property
    def wants_candidates(self) -> bool:
        """Return whether the drafter wants this step's candidates; may be True only if `needs_top_k`."""
        return self.needs_top_k

    @property
    def wants_hidden(self) -> bool:
        """Return whether the drafter wants this step's hidden states; may be True only if `needs_hidden`."""
        return self.needs_hidden

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        """Take a new or resumed sequence; at each `propose` its `cache` holds every token but the last."""

    def pass_plain(self, most: int) -> int:
        """Return how many plain steps, up to `most`, may follow at once; 0 if the next one has drafts.

        `propose` is not called for these steps, and `update_all` gets them as one step.
        """
        return 0

    @abstractmethod
    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        """Propose for all sequences of the coming forward. Trees may be empty. Changes no state."""


class TreeDrafter(Drafter):
    """Proposer of trees up to the allowed size; `choice/` decides which size pays."""

    @abstractmethod
    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        """Grow a tree, perhaps empty."""

    def trees(self, wanted: Many[WantedTree]) -> list[DraftTree]:
        return [self.tree(*each) for each in wanted]

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return self.trees([(r.sequence, r.max_nodes, r.max_depth) for r in requests])


class AutoregressiveDrafter(Drafter):
    """Proposes nothing, so that every step is plain decoding."""

    def __init__(self, *_: object) -> None:
        """Ignore the arguments of a `DrafterFactory`."""

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [DraftTree()] * len(requests)

    def row_prices(self, num_rows: int, length: int) -> Many[float]:
        return ()

    def pass_plain(self, most: int) -> int:
        return most
