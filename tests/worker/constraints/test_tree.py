from __future__ import annotations

import random

import numpy as np
import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.constraints.constrained_tree import Constraints
from swiftbatch.worker.constraints.skeleton import Skeleton
from swiftbatch.worker.sampling.draft_tree import GUESSED, ROOT, DraftTree, Verification, Walk
from swiftbatch.worker.sampling.sequence import Rule, Sequence
from swiftbatch.worker.sampling.token_masks import Constraint, ConstraintError, mask_of
from tests.worker.constraints.words import END, VOCAB, WORDS, allowed_behind, grammar, mask_behind
from tests.worker.kernels.kernel_parts import tree_of_few_tokens

TEXTS = {"abc", "abd", "abcda", "da", "dab", "cccc"}
PRICES = [0.01 * number for number in range(1, 10)]  # of rows, in tokens
CHOICE = {"choice": sorted(TEXTS)}


def sequence(rules: tuple[Rule, ...], *output_ids: int, bad_words: tuple[tuple[int, ...], ...] = ()) -> Sequence:
    words = ("any",) if bad_words else ()
    params = SamplingParams(max_tokens=50, seed=1, structured_outputs=CHOICE, bad_words=words)
    made = Sequence("s", [1, 2], params, VOCAB, bad_word_ids=bad_words, rules=rules)
    made.extend(list(output_ids))
    return made


def paths(tree: DraftTree) -> list[list[int]]:
    found: dict[int, list[int]] = {ROOT: []}
    for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        found[node] = [*found[parent], token_id]
    return [found[node] for node in range(ROOT, len(tree))]


def may_come(path: list[int]) -> bool:
    return all(
        END not in path[:i] and path[i] in allowed_behind(TEXTS, "".join(WORDS[each] for each in path[:i]))
        for i in range(len(path))
        if END not in path[:i]
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_keeps_what_may_come_and_its_rows_have_their_masks(seed: int) -> None:
    chance, rule = random.Random(seed), grammar(**CHOICE)
    for _ in range(10):
        running = sequence((rule,))
        constraints = Constraints(running)
        while END not in running.output_ids:
            tree, committed = tree_of_few_tokens(chance, 60, VOCAB), running.output_ids.tolist()
            kept = constraints.of_tree(tree)
            proposed = paths(tree)
            assert kept.numbers == [i - 1 for i, path in enumerate(proposed) if path and may_come(committed + path)]
            assert [proposed[number + 1] for number in kept.numbers] == paths(kept.tree)[1:]
            assert kept.num_left_out == len(tree) - len(kept.tree)
            for path, words in zip(paths(kept.tree), kept.masks.words, strict=True):
                if END not in path:
                    assert np.array_equal(words, mask_behind(TEXTS, committed + path))
            running.extend([chance.choice(allowed_behind(TEXTS, "".join(WORDS[i] for i in committed)))])


def test_a_resumed_sequence_stands_where_it_stood() -> None:
    rule, tree = grammar(**CHOICE), DraftTree([2, 3, 2], [ROOT, ROOT, 0])
    running = sequence((rule,))
    constraints = Constraints(running)
    for token_id in (0, 1):
        constraints.of_tree(tree)
        running.extend([token_id])
    went_on, resumed = constraints.of_tree(tree), Constraints(sequence((rule,), 0, 1)).of_tree(tree)
    assert (went_on.tree, went_on.numbers) == (resumed.tree, resumed.numbers) == (DraftTree([2, 3], [-1, -1]), [0, 1])
    assert np.array_equal(went_on.masks.words, resumed.masks.words)


def test_tokens_that_are_no_text_of_the_grammar_are_not_gone_on_with() -> None:
    with pytest.raises(ConstraintError):
        Constraints(sequence((grammar(**CHOICE),), 3, 2)).of_tree(DraftTree())


def test_without_rules_a_tree_is_as_it_was() -> None:
    plain = Sequence("s", [1], SamplingParams(max_tokens=5), VOCAB)
    given = Constraints(plain).of_tree(DraftTree.chain([1, 2]))
    assert (given.tree, given.masks, given.numbers, given.num_left_out) == (DraftTree.chain([1, 2]), None, None, 0)


class Forced:
    def __init__(self, behind: int, token_id: int) -> None:
        self._behind, self._token_id, self._num = behind, token_id, 0

    def start(self, sequence: Sequence) -> Constraint:
        return Forced(self._behind, self._token_id)

    def mask(self) -> np.ndarray | None:
        return mask_of((self._token_id,), VOCAB) if self._num == self._behind else None

    def is_free(self, token_ids: list[int]) -> bool:
        return False

    def push(self, token_id: int) -> None:
        self._num += 1

    def pop(self, num_tokens: int) -> None:
        self._num -= num_tokens


def test_a_rule_may_have_nothing_to_say_and_several_hold_at_once() -> None:
    tree = DraftTree([0, 4, 1, 2, 2], [ROOT, ROOT, 0, 2, 1])
    forced = Constraints(sequence((Forced(1, 1),))).of_tree(tree)
    assert forced.numbers == [0, 1, 2, 3]  # "c" after "ab" is not forced there
    anything = np.full(1, 0xFFFFFFFF, dtype=np.uint32)
    assert np.array_equal(forced.masks.words, [*(anything,), *(mask_of((1,), VOCAB),) * 2, *(anything,) * 2])
    assert Constraints(sequence((Forced(9, 1),))).of_tree(tree).masks is None
    both = Constraints(sequence((Forced(1, 1), grammar(**CHOICE)))).of_tree(tree)
    assert both.numbers == [0, 1, 2, 3]
    assert np.array_equal(both.masks.words[2], mask_of((), VOCAB))  # after "ab", "b" is forced


def test_where_bad_words_leave_nothing_a_walk_ends_in_front_of_it_with_the_reason() -> None:
    rule, tree = grammar(choice=["abc", "dc"]), DraftTree.chain([0, 1, 2])
    given = Constraints(sequence((rule,), bad_words=((1, 2), (3,)))).of_tree(tree)
    assert given.numbers == [0, 1]
    assert given.masks.dead.keys() == {2}
    assert np.array_equal(given.masks.words[0], mask_of((0, 4), VOCAB))
    walked = given.in_front_of_the_dead(Walk([0, 1], [0, 1, 0]))
    assert walked == Walk([0], [0, 1])
    behind = Constraints(sequence((rule,), 0, 1, bad_words=((1, 2), (3,)))).of_tree(tree)
    assert behind.in_front_of_the_dead(Walk([], [0])) == Walk([], [], 0)
    given.check_alive(0, 2)
    with pytest.raises(ConstraintError, match="position 4: no token is left that may come beside bad words"):
        behind.check_alive(0, 4)


def test_where_few_tokens_may_come_one_is_drafted_within_the_limits() -> None:
    rule = grammar(choice=["ccccab", "dabcab"])
    begun = Constraints(sequence((rule,), 2))
    assert begun.of_tree(DraftTree(), 9, 9, PRICES).tree == DraftTree.chain([2, 2, 2, 0, 1, END])
    assert begun.of_tree(DraftTree(), 9, 2, PRICES).tree == DraftTree.chain([2, 2])
    assert begun.of_tree(DraftTree(), 3, 9, PRICES).tree == DraftTree.chain([2, 2, 2])
    assert begun.of_tree(DraftTree(), 9, 0, PRICES).tree == DraftTree()
    mixed = begun.of_tree(DraftTree([3, 2, 2, 0], [ROOT, ROOT, 1, 1]), 9, 9, PRICES)
    assert mixed.tree == DraftTree.chain([2, 2, 2, 0, 1, END])
    assert (mixed.numbers, mixed.num_left_out) == ([1, 2, GUESSED, GUESSED, GUESSED, GUESSED], 2)
    told = Verification(mixed.tree, [0, 1, 2], [2, 2, 2, 0], np.zeros(7), None, None, None, "tree", mixed.numbers, 2)
    assert (told.num_proposed_tokens, told.proposed_path, told.num_accepted_tokens) == (4, [1, 2], 3)


def test_a_guess_must_be_worth_its_row() -> None:
    begun = Constraints(sequence((grammar(choice=["ccccab", "dabcab"]),), 2))
    assert begun.of_tree(DraftTree(), 9, 9, [0.97]).tree == DraftTree.chain([2])
    assert begun.of_tree(DraftTree(), 9, 9, [0.99]).tree == DraftTree()
    assert begun.of_tree(DraftTree(), 9, 9, [1.7, 1.8, 1.9]).tree == DraftTree.chain([2, 2, 2])  # two alone are not
    assert begun.of_tree(DraftTree(), 9, 9, [1.7, 1.97, 2.97]).tree == DraftTree()


def test_texts_of_the_same_rules_learn_from_each_other() -> None:
    rules, skeleton = (grammar(**CHOICE),), Skeleton()

    def tree_behind_a(own: Skeleton) -> DraftTree:
        running = sequence(rules)
        constraints = Constraints(running, own)
        constraints.of_tree(DraftTree())
        running.extend([0])
        return constraints.of_tree(DraftTree(), 9, 9, [0.2 * number for number in range(1, 10)]).tree

    first = sequence(rules)
    constraints = Constraints(first, skeleton)
    for token_id in (0, 1, 3, END):
        constraints.of_tree(DraftTree())
        first.extend([token_id])
    constraints.of_tree(DraftTree())
    assert tree_behind_a(skeleton) == DraftTree.chain([1, 3, END])
    assert tree_behind_a(Skeleton()) != DraftTree.chain([1, 3, END])
