"""The contract of every drafter."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import Verification


class DraftRequest(NamedTuple):
    """A tree is wanted behind a sequence's end: at most `max_nodes` nodes, none deeper than `max_depth`.

    How many pay is the drafter's to say.
    """

    sequence: Sequence
    max_nodes: int
    max_depth: int
    overhead: float = 0.0  # seconds that a step of the engine takes beside forward and drafts, so far


WantedTree = tuple[Sequence, int, int]
"""A tree that is to be drafted behind a sequence: most nodes and greatest depth, which the drafter has chosen."""


@dataclass
class DraftCounters:
    """Counts of drafting so far, each sequence's by itself; times in seconds."""

    seconds: dict[str, float]  # parts of proposing
    num_rounds: int = 0  # forwards with a partial cache
    num_checked_nodes: int = 0  # proposed nodes that rounds checked
    num_agreed_nodes: int = 0  # those that the target with a partial cache drew as well
    num_levels: int = 0  # forwards of a draft model that grows trees


class ReadRows(NamedTuple):
    """Tokens that were only read, of a prompt or a replayed output, and the target's candidates behind them."""

    previous_ids: np.ndarray  # [num_rows] int64, the tokens before them
    token_ids: np.ndarray  # [num_rows] int64
    top_ids: np.ndarray  # [num_rows, TOP_K] int64
    top_logprobs: np.ndarray  # [num_rows, TOP_K] float32, of the unprocessed logits


Verified = tuple[Sequence, Verification]
"""A sequence, and what a step has made of it."""


class Learner:
    """Hears of all that happens to the sequences of one worker.

    One instance serves all of them; what it learns from one may help the next (hot start).
    """

    needs_top_k: bool = False  # whether `Verification.top_ids` and `top_logprobs` must be filled
    needs_hidden: bool = False  # whether `Verification.hidden` may have to be filled

    def learn(self, rows: ReadRows) -> None:
        """Take in the target's candidates behind tokens that were only read. Called where `needs_top_k`."""

    def read(self, sequence: Sequence, position: int, hidden: torch.Tensor) -> None:
        """Take in the target's final hidden states `[num_rows, hidden]` from a position on, of tokens only read.

        Called where `needs_hidden`.
        """

    def update(self, sequence: Sequence, verification: Verification) -> None:
        """Learn from a verified step, after its tokens were committed to the sequence."""

    def update_all(self, verified: Many[Verified]) -> None:
        """Learn from a verified step of several sequences, as `update` does from one."""
        for sequence, verification in verified:
            self.update(sequence, verification)

    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or moved away."""

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        """Arrays that a resumed sequence needs beyond its tokens; empty where the tokens suffice."""
        return {}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` returned, after `start`. Unfit arrays raise ValueError and change nothing."""


class Drafter(Learner, ABC):
    """Proposes draft trees. Whatever it proposes, the output stays the same."""

    drafts: bool = True  # whether a step may verify more than its root
    reads_caches: bool = False  # whether it reads positions of caches that no row of the target sees any more
    phases: tuple[str, ...] = ()  # parts of proposing that it takes the time of

    @property
    def draft_kind(self) -> str:
        """The kind of its last proposal, of `metrics.worker_counters.DRAFT_KINDS`, where that is not empty."""
        return "tree"

    @property
    def wants_candidates(self) -> bool:
        """True if it is to learn candidates from the step that it proposed for; only where `needs_top_k`."""
        return self.needs_top_k

    @property
    def wants_hidden(self) -> bool:
        """True if it is to hear hidden states of the step that it proposed for; only where `needs_hidden`."""
        return self.needs_hidden

    @functools.cached_property
    def counters(self) -> DraftCounters:
        """The drafter's own counts, beside the engine's."""
        return DraftCounters(dict.fromkeys(self.phases, 0.0))

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        """Take in a new or resumed sequence, whose prompt and committed tokens are there already.

        `cache` is the sequence's own; from the first `propose` on it holds every token but the last.
        """

    def pass_plain(self, most: int) -> int:
        """Take up to `most` plain steps behind the newest one at once, and return how many; 0 where that has drafts.

        None of them is proposed for; `update_all` hears of all that they brought as of one step.
        """
        return 0

    @abstractmethod
    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        """Propose for all sequences that share the coming forward. Trees may be empty. Changes no state."""
