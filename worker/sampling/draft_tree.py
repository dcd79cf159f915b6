"""Draft trees, which a drafter proposes, and their verification by walks along the drawn tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from swiftbatch.jobs.logprobs import TokenLogprobs

ROOT = -1


@dataclass(slots=True)
class DraftTree:
    """Tree of candidate continuations, parents before children; an empty tree means plain decoding.

    `parents[i]` is the index of node i's parent, or `ROOT` for the last committed token. Siblings have different
    tokens. Freezing the class would triple its creation time.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def children(self) -> dict[int, dict[int, int]]:
        """Return {token_id: node} of each parent, also of `ROOT`."""
        children: dict[int, dict[int, int]] = {}
        for node, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            children.setdefault(parent, {})[token_id] = node
        return children

    @classmethod
    def chain(cls, token_ids: list[int]) -> DraftTree:
        return cls(list(token_ids), list(range(-1, len(token_ids) - 1)))


GUESSED = -1  # marks a node that no drafter proposed
TOP_K = 8  # target candidates that are stored per row


Candidates = tuple[np.ndarray, np.ndarray]
"""Ids `[num_rows, TOP_K] int64` and log-probabilities `[num_rows, TOP_K] float32` of the best tokens of rows."""


class Verification(NamedTuple):
    """Result of verifying one draft tree; row 0 is the root, row i + 1 is node i."""

    tree: DraftTree
    path: list[int]  # accepted nodes, from the root
    committed_ids: list[int]  # accepted tokens, then the bonus token; ends with the sequence
    row_token_ids: Many[int]  # [num_rows]
    top_ids: np.ndarray | None  # [num_rows, TOP_K] int64, the target's best candidates after each row
    top_logprobs: np.ndarray | None  # [num_rows, TOP_K] float32, of the unprocessed logits
    hidden: torch.Tensor | None = None  # [1 + num_accepted, hidden] final states of the root and the accepted path
    draft_kind: str = "tree"  # one of `metrics.worker_counters.DRAFT_KINDS`
    numbers: list[int] | None = None  # indices of the nodes in the proposed tree; None if the whole tree was verified
    num_left_out: int = 0  # number of proposed nodes that were not verified
    num_steps: int = 1  # number of model steps; several are possible if nothing was drafted

    @property
    def num_draft_tokens(self) -> int:
        return len(self.tree)

    @property
    def num_proposed_tokens(self) -> int:
        if self.numbers is None:
            return len(self.tree.token_ids) + self.num_left_out
        return len(self.tree) + self.num_left_out - self.numbers.count(GUESSED)

    @property
    def proposed_path(self) -> list[int]:
        """Return the accepted nodes by their indices in the proposed tree."""
        if self.numbers is None:
            return self.path
        numbers = self.numbers
        return [numbers[node] for node in self.path if numbers[node] != GUESSED]

    @property
    def num_accepted_tokens(self) -> int:
        """Return the number of accepted draft tokens, without the bonus token."""
        return len(self.path)


class Walk(NamedTuple):
    """Result of one walk down a draft tree."""

    path: list[int]  # accepted nodes, from the root
    drawn: list[int]  # tokens of the path, then the bonus token
    failed_row: int | None = None  # row from which nothing can be drawn after `drawn`
    candidates: Candidates | None = None  # None if not requested
    logprobs: TokenLogprobs | None = None  # of the drawn tokens, and of those that were cut off; None if not requested

    def until(self, num_tokens: int) -> Walk:
        """Return the walk cut to its first `num_tokens` tokens, because the sequence ends there."""
        return self._replace(path=self.path[:num_tokens], drawn=self.drawn[:num_tokens], failed_row=None)


def walk(
    tree: DraftTree,
    logits: torch.Tensor,
    draw: Callable[[torch.Tensor], int],
    is_drawable: Callable[[torch.Tensor], bool] = lambda logits: True,
    masked: Callable[[torch.Tensor, int], torch.Tensor] = lambda logits, row: logits,
) -> Walk:
    """Draw from the root on and follow matching children, up to a row that is not `is_drawable`.

    `logits [num_rows, vocab] float32`, row 0 the root's. Drafts cannot bias the drawn tokens.
    """
    children = tree.children()
    path: list[int] = []
    drawn: list[int] = []
    node: int | None = ROOT
    while node is not None:
        if not is_drawable(logits[node + 1]):
            return Walk(path, drawn, node + 1)
        drawn.append(draw(masked(logits[node + 1], node + 1)))
        node = children.get(node, {}).get(drawn[-1])
        if node is not None:
            path.append(node)
    return Walk(path, drawn)
