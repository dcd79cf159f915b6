"""Draft trees under constraints, without impossible nodes, and with the allowed tokens after each row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from swiftbatch.worker.sampling.draft_tree import GUESSED, ROOT, DraftTree, Walk
from swiftbatch.worker.sampling.logits_processors import bias_pairs, masked_behind
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.token_masks import Constraint, ConstraintError, allows, mask_of, tokens_of

FEW = 4  # if at most this many tokens are allowed, one of them is drafted without the drafter
MAX_GUESSED = 12  # most such nodes in a tree
NOTHING_LEFT = "no_token_left"  # error code of a job without allowed tokens


@dataclass(frozen=True)
class RowMasks:
    """Allowed tokens after a tree's rows (root first)."""

    words: np.ndarray  # [num_rows, num_mask_words] uint32
    dead: dict[int, str] = field(default_factory=dict)  # rows after which nothing is allowed, and why


class ConstrainedTree(NamedTuple):
    """Allowed nodes of a proposed tree, and added ones where few tokens are allowed."""

    tree: DraftTree
    # numbers of nodes in the proposed tree, or GUESSED; None: the tree is the proposed one
    numbers: list[int] | None = None
    masks: RowMasks | None = None  # None if all tokens are allowed everywhere
    num_left_out: int = 0

    def in_front_of_the_dead(self, walk: Walk) -> Walk:
        """Return the walk up to the first row without allowed tokens; it fails only at the root."""
        if self.masks is None:
            return walk
        for i, row in enumerate([0, *(node + 1 for node in walk.path)]):
            if row in self.masks.dead and i < len(walk.drawn):
                path = walk.path[: max(0, i - 1)]
                return walk._replace(path=path, drawn=walk.drawn[:i], failed_row=row if i == 0 else None)
        return walk

    def check_alive(self, row: int, position: int) -> None:
        if self.masks and row in self.masks.dead:
            raise ConstraintError(f"position {position}: {self.masks.dead[row]}")


@dataclass(frozen=True)
class Looked:
    """Tree under inspection: its own nodes, guessed ones, and the masks after them."""

    tree: DraftTree
    children: dict[int, dict[int, int]]
    num_proposed: int
    max_nodes: int
    max_depth: int
    masks: dict[int, np.ndarray | None] = field(default_factory=dict)  # has the root and allowed nodes

    def guess(self, parent: int, depth: int, constraint: Constraint) -> None:
        """Draft below a node where few tokens are allowed."""
        mask = self.masks[parent]
        if mask is None or depth >= self.max_depth or len(self.tree) >= self.max_nodes:
            return
        token_ids = tokens_of(mask)
        if not 0 < len(token_ids) <= FEW:
            return
        token_id, below = constraint.guess(token_ids), self.children.setdefault(parent, {})
        if token_id not in below:
            below[token_id] = len(self.tree)
            self.tree.token_ids.append(token_id)
            self.tree.parents.append(parent)


class Constraints:
    """Constraints of one sequence, up to date with its committed tokens."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._constraints: list[Constraint] = [rule.start(sequence) for rule in sequence.rules]
        self._num_seen = 0
        self._never = tuple(token_id for token_id, bias in bias_pairs(sequence) if bias == float("-inf"))
        self._may_ban = bool(sequence.bad_word_ids) or sequence.sampling.min_tokens > 0
        self._follow()

    def of_tree(self, proposed: DraftTree, max_nodes: int = 0, max_depth: int = 0) -> ConstrainedTree:
        """Return the tree without impossible nodes; add nodes, up to the limits, where few tokens are allowed."""
        if not self._constraints:
            return ConstrainedTree(proposed)
        try:
            self._follow()
            if all(constraint.is_free(proposed.token_ids) for constraint in self._constraints):
                return ConstrainedTree(proposed)
            root_mask = self._mask([])
        except ConstraintError as error:
            nothing = mask_of((), self._sequence.vocab_size)[None]
            return ConstrainedTree(DraftTree(), [], RowMasks(nothing, {0: str(error)}), len(proposed))
        tree, num_proposed = DraftTree([*proposed.token_ids], [*proposed.parents]), len(proposed)
        most = min(max_nodes, num_proposed + MAX_GUESSED)
        looked = Looked(tree, proposed.children(), num_proposed, most, max_depth, {ROOT: root_mask})
        self._visit(ROOT, [], looked)
        return _kept(looked, self._sequence)

    def _visit(self, parent: int, path: list[int], looked: Looked) -> None:
        """Find the masks of all nodes below one; impossible nodes get no mask."""
        looked.guess(parent, len(path), self._constraints[0])
        mask = looked.masks[parent]
        for token_id, node in looked.children.get(parent, {}).items():
            if mask is not None and not allows(mask, token_id):
                continue
            below = [*path, token_id]
            num_pushed = 0
            try:
                for constraint in self._constraints:
                    constraint.push(token_id)
                    num_pushed += 1
                looked.masks[node] = self._mask(below)
                self._visit(node, below, looked)
            except ConstraintError:  # loses only a draft; the root reports the error if the token comes
                looked.masks.pop(node, None)
            finally:
                for constraint in self._constraints[:num_pushed]:
                    constraint.pop(1)

    def _follow(self) -> None:
        for token_id in self._sequence.output_ids[self._num_seen :].tolist():
            for constraint in self._constraints:
                constraint.push(token_id)
            self._num_seen += 1

    def _mask(self, path: list[int]) -> np.ndarray | None:
        """Return the tokens that constraints, bias, bad words and `min_tokens` all allow."""
        found = [mask for constraint in self._constraints if (mask := constraint.mask()) is not None]
        if not found:
            return None
        common: np.ndarray = np.bitwise_and.reduce(found)
        banned = (*self._never, *masked_behind(self._sequence, path)) if self._may_ban else ()
        return common & ~mask_of(banned, self._sequence.vocab_size) if banned else common


def _kept(looked: Looked, sequence: Sequence) -> ConstrainedTree:
    whole, nodes = looked.tree, [node for node in range(len(looked.tree)) if node in looked.masks]
    new = {ROOT: ROOT} | {node: number for number, node in enumerate(nodes)}
    tree = DraftTree([whole.token_ids[node] for node in nodes], [new[whole.parents[node]] for node in nodes])
    numbers = [node if node < looked.num_proposed else GUESSED for node in nodes]
    num_left_out = looked.num_proposed - (len(numbers) - numbers.count(GUESSED))
    rows = [looked.masks[node] for node in (ROOT, *nodes)]
    if all(row is None for row in rows):
        return ConstrainedTree(tree, numbers, None, num_left_out)
    anything = np.full_like(next(row for row in rows if row is not None), 0xFFFFFFFF)
    words = np.stack([anything if row is None else row for row in rows])
    reason = "no token is left that may come" + (" beside bad words" if sequence.bad_word_ids else "")
    dead = dict.fromkeys(np.flatnonzero(~words.any(1)).tolist(), reason)
    return ConstrainedTree(tree, numbers, RowMasks(words, dead), num_left_out)
