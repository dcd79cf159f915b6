"""Draft trees under constraints, without impossible nodes, and with the allowed tokens after each row."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from swiftbatch.worker.constraints.skeleton import FREE, Guess, Skeleton, TextPlace, num_tokens_in
from swiftbatch.worker.sampling.draft_tree import GUESSED, ROOT, DraftTree, Walk
from swiftbatch.worker.sampling.logits_processors import bias_pairs, masked_behind
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.token_masks import Constraint, ConstraintError, allows, mask_of, tokens_of

ONLY_ONE = 0.98  # share of guesses that come true where a rule allows one token; the text may end in front of it
PROPOSED = 0.85  # share of a drafter's best nodes that are accepted, below nodes that were
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
    row_prices: Many[float]  # tokens that 1, 2 and so on guesses must bring
    masks: dict[int, np.ndarray | None] = field(default_factory=dict)  # has the root and allowed nodes
    num_allowed: dict[int, int] = field(default_factory=dict)  # tokens behind them
    guessed: dict[int, float] = field(default_factory=dict)  # node -> probability that the text reaches it

    def take(self, node: int, mask: np.ndarray | None) -> None:
        self.masks[node], self.num_allowed[node] = mask, num_tokens_in(mask)

    def shares_below(self, parent: int, guess: Guess | None, share: float) -> dict[int, float]:
        """Add a guess below a node if it may be worth its row; return how probably the text reaches each child."""
        below = self.children.setdefault(parent, {})
        shares = {token_id: share * PROPOSED / (1 + rank) for rank, token_id in enumerate(below)}
        if guess is None:
            return shares
        token_id, share = guess.token_id, share * guess.share
        if token_id not in below and share > self.least_share:
            below[token_id] = len(self.tree)
            self.guessed[len(self.tree)] = share
            self.tree.token_ids.append(token_id)
            self.tree.parents.append(parent)
        return shares | {token_id: share}

    @functools.cached_property
    def least_share(self) -> float:
        return min((price / number for number, price in enumerate(self.row_prices, 1)), default=1.0)

    def drop_guesses(self) -> None:
        """Keep as many guesses, the most probable ones, as bring most tokens beyond their price."""
        best_first = sorted(self.guessed, key=self.guessed.__getitem__, reverse=True)[: len(self.row_prices)]
        brought = accumulate(self.guessed[node] for node in best_first)
        gains = [0.0, *(tokens - price for tokens, price in zip(brought, self.row_prices, strict=False))]
        for node in self.guessed.keys() - best_first[: gains.index(max(gains))]:
            self.masks.pop(node, None)


class Constraints:
    """Constraints of one sequence, up to date with its committed tokens."""

    def __init__(self, sequence: Sequence, skeleton: Skeleton | None = None) -> None:
        """Begin with an output; sequences with the same rules may share a skeleton, so that they learn together."""
        self._sequence = sequence
        self._constraints: list[Constraint] = [rule.start(sequence) for rule in sequence.rules]
        self._num_seen = 0
        self._skeleton = Skeleton() if skeleton is None else skeleton
        self._place: TextPlace | None = None  # the last one that the skeleton knows
        self._last_id: int | None = None  # the token in it, until it is known how the text goes on
        self._looked: Looked | None = None  # at the tree of the last step
        self._never = tuple(token_id for token_id, bias in bias_pairs(sequence) if bias == float("-inf"))
        self._may_ban = bool(sequence.bad_word_ids) or sequence.sampling.min_tokens > 0
        self._follow()

    def of_tree(
        self, proposed: DraftTree, max_nodes: int = 0, max_depth: int = 0, row_prices: Many[float] = ()
    ) -> ConstrainedTree:
        """Return the tree without impossible nodes; add guesses within the limits.

        1, 2 and so on further rows must bring more tokens than `row_prices`.
        """
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
        looked = Looked(tree, proposed.children(), num_proposed, max_nodes, max_depth, row_prices)
        looked.take(ROOT, root_mask)
        self._visit(ROOT, [], self._pass(looked.num_allowed[ROOT]), 1.0, looked)
        looked.drop_guesses()
        kept, self._looked = _kept(looked, self._sequence), looked
        looked.masks.clear()  # they are large
        return kept

    def _visit(self, parent: int, path: list[int], place: TextPlace, share: float, looked: Looked) -> None:
        """Find the masks of all nodes below one; impossible nodes get no mask.

        The text reaches the node with the probability `share`.
        """
        mask = looked.masks[parent]
        has_room = len(path) < looked.max_depth and len(looked.tree) < looked.max_nodes
        guess = self._guess(place, mask) if mask is not None and has_room else None
        shares = looked.shares_below(parent, guess, share)
        for token_id, node in looked.children.get(parent, {}).items():
            if mask is not None and not allows(mask, token_id):
                continue
            below = [*path, token_id]
            num_pushed = 0
            try:
                for constraint in self._constraints:
                    constraint.push(token_id)
                    num_pushed += 1
                looked.take(node, self._mask(below))
                self._visit(node, below, place.behind(token_id, looked.num_allowed[node]), shares[token_id], looked)
            except ConstraintError:  # loses only a draft; the root reports the error if the token comes
                looked.masks.pop(node, None)
            finally:
                for constraint in self._constraints[:num_pushed]:
                    constraint.pop(1)

    def _guess(self, place: TextPlace, mask: np.ndarray) -> Guess | None:
        if (guess := self._skeleton.guess(place, mask)) is not None:
            return guess
        return Guess(int(tokens_of(mask)[0]), ONLY_ONE) if place.num_allowed == 1 else None

    def _follow(self) -> None:
        looked, node, self._looked = self._looked, ROOT, None
        if looked is None:
            self._place = self._last_id = None
        for token_id in self._sequence.output_ids[self._num_seen :].tolist():
            if looked is not None:
                self._pass(looked.num_allowed[node])
                self._last_id, node = token_id, looked.children.get(node, {}).get(token_id, ROOT)
            for constraint in self._constraints:
                constraint.push(token_id)
            self._num_seen += 1

    def _pass(self, num_allowed: int) -> TextPlace:
        """Go on to the place behind the last token."""
        place = self._place or TextPlace(num_allowed=num_allowed)
        if self._last_id is not None:
            before, place = place, place.behind(self._last_id, num_allowed)
            self._skeleton.learn(before, FREE if place.num_free else self._last_id)
        self._place, self._last_id = place, None
        return place

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
