"""A thought's place against its definition; budgets, and structures after it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.constraints.constrained_tree import Constraints
from swiftbatch.worker.constraints.thinking import Markers, Opening, Thinking, ThinkingConstraint, ThinkingRule, Thought
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.token_masks import Constraint, ConstraintError, mask_of, tokens_of
from tests.worker.constraints.words import END, VOCAB, WORDS, allowed_behind, grammar, mask_behind

PAIRS = (((0,), (1,)), ((0, 0, 1), (0, 1, 0, 1)), ((0, 1), (1, 1)), ((2, 0), (0, 2, 0)))
TEXTS = {"abc", "abd", "abcda", "da", "dab", "cccc"}
OPENINGS: tuple[Opening, ...] = ("anywhere", "first", "never")


def find(output: list[int], marker: tuple[int, ...], start: int) -> int | None:
    """Return the tokens up to the end of the first marker after `start`."""
    for i in range(start, len(output) - len(marker) + 1):
        if tuple(output[i : i + len(marker)]) == marker:
            return i + len(marker)
    return None


def places(output: list[int], thinking: Thinking) -> tuple[int | None, int | None]:
    start = thinking.markers.start
    opened = 0 if thinking.is_open else find(output, start, 0)
    if not thinking.is_open and thinking.opening != "anywhere" and opened != len(start):
        opened = None
    if not thinking.is_open and thinking.opening == "never":
        opened = None
    return opened, None if opened is None else find(output, thinking.markers.end, opened)


def running(rule: ThinkingRule, *output_ids: int, max_tokens: int = 60) -> Sequence:
    made = Sequence("s", [1, 2], SamplingParams(max_tokens=max_tokens, seed=1), VOCAB, rules=(rule,))
    made.extend(list(output_ids))
    return made


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_thought_lies_between_its_markers_whatever_was_pushed_and_popped(
    pair: tuple[tuple[int, ...], tuple[int, ...]], is_open: bool, opening: Opening
) -> None:
    chance, thinking = random.Random(1), Thinking(Markers(*pair), is_open, opening)
    for _ in range(150):
        thought, output = Thought(thinking), list[int]()
        for _ in range(chance.randrange(40)):
            if output and chance.random() < 0.2:
                num_gone = chance.randint(1, len(output))
                thought.pop(num_gone)
                del output[-num_gone:]
            else:
                output.append(chance.choice([0, 0, 1, 1, 2]))
                thought.push(output[-1])
            assert (thought.opened_at, thought.closed_at) == places(output, thinking)


def test_the_last_marker_of_a_prompt_is_found() -> None:
    markers = Markers((1,), (2,), ("<a>", "</a>"))
    prompts = {"": None, "<a> x": "start", "<a></a> <": "end", "</a> <a> </": "start", "<": None, "x</a>": "end"}
    assert {prompt: markers.last_in(prompt) for prompt in prompts} == prompts
    inner = Markers((1,), (2,), ("a:", "no a:"))
    assert [inner.last_in(prompt) for prompt in ("a: b", "a: no a:", "no a: a:")] == ["start", "end", "start"]
    assert [markers.last_in("b<a>b", number) for number in (3, 4, 5)] == ["start", None, None]


@pytest.mark.parametrize("opening", ["anywhere", "never"])
@pytest.mark.parametrize("budget", [0, 1, 3, 7])
@pytest.mark.parametrize("pair", PAIRS)
def test_no_thought_is_longer_than_its_budget_and_nothing_else_is_forced(
    pair: tuple[tuple[int, ...], tuple[int, ...]], budget: int, opening: Opening
) -> None:
    """Texts are random; at the budget, a begun marker is completed."""
    chance, end, num_forced = random.Random(budget), pair[1], 0
    rule = ThinkingRule(Thinking(Markers(*pair), opening == "never", opening), budget)
    for _ in range(40):
        sequence = running(rule)
        constraint: Constraint = rule.start(sequence)
        output: list[int] = []
        for _ in range(40):
            opened, closed = places(output, rule.thinking)
            mask = constraint.mask()
            is_forced = opened is not None and closed is None and len(output) - opened >= budget
            assert (mask is not None) == is_forced
            token_id = chance.choice([0, 0, 0, 0, 1, 2])
            if is_forced:
                [token_id] = tokens_of(mask)
                num_forced += 1
                with pytest.raises(ConstraintError):
                    constraint.push((token_id + 1) % 3)
            constraint.push(token_id)
            output.append(token_id)
        opened, closed = places(output, rule.thinking)
        assert opened is None or (closed or len(output)) - opened <= budget + len(end)
        if opened is not None and closed is not None:
            assert closed - len(end) - opened <= budget
    assert num_forced


@pytest.mark.parametrize("budget", [None, 4])
@pytest.mark.parametrize(("is_open", "opening"), [(True, "never"), (False, "first")])
def test_a_structure_begins_behind_the_thought_or_with_the_text_that_has_none(
    is_open: bool, opening: Opening, budget: int | None
) -> None:
    chance, start, end = random.Random(3), (1, 3), (2, 2)
    thinking = Thinking(Markers(start, end), is_open, opening)
    rule = ThinkingRule(thinking, budget, grammar(choice=sorted(TEXTS)))
    seen = set()
    for _ in range(60):
        constraint, output = ThinkingConstraint(rule, running(rule)), list[int]()
        while END not in output and len(output) < 30:
            mask, (opened, closed) = constraint.mask(), places(output, thinking)
            if opened is not None and closed is None:
                is_used_up = budget is not None and len(output) - opened >= budget
                assert (mask is not None) == is_used_up
            elif output and opened is None and output[0] == start[0]:
                assert tokens_of(mask).tolist() == [start[1]]
            else:
                text = "".join(WORDS[each] for each in output[closed or 0 :])
                may_come = allowed_behind(TEXTS, text) + [start[0]] * (opening == "first" and not output)
                assert tokens_of(mask).tolist() == sorted({*may_come})
            token_id = chance.choice([0, 2, 2, 3] if mask is None else tokens_of(mask).tolist())
            constraint.push(token_id)
            output.append(token_id)
            if chance.random() < 0.3:
                num_gone = chance.randint(1, len(output))
                gone = output[-num_gone:]
                constraint.pop(num_gone)
                for each in gone:
                    constraint.push(each)
        opened, closed = places(output, thinking)
        seen.add(opened is not None)
        if END in output and (opened is None or closed is not None):
            assert "".join(WORDS[each] for each in output[closed or 0 : -1]) in TEXTS
    assert seen == ({True} if is_open else {True, False})


@pytest.mark.parametrize("text", [None, {"choice": sorted(TEXTS)}])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_tree_that_is_taken_as_it_is_would_have_been_left_as_it_is(
    is_open: bool, text: dict[str, list[str]] | None
) -> None:
    """The quick check must not skip a tree that would change."""
    chance, num_free = random.Random(5), 0
    thinking = Thinking(
        Markers((1, 3), (2, 0)), is_open, "anywhere" if text is None else "never" if is_open else "first"
    )
    rule = ThinkingRule(thinking, 9, None if text is None else grammar(**text))
    for _ in range(300):
        constraint = ThinkingConstraint(rule, running(rule))
        for _ in range(chance.randrange(16)):
            mask = constraint.mask()
            tokens = [0, 1, 2, 3, 4] if mask is None else tokens_of(mask).tolist()
            constraint.push(chance.choice(tokens))
        token_ids = [chance.randrange(VOCAB - 1) for _ in range(chance.randrange(5))]
        if constraint.is_free(token_ids):
            num_free += 1
            for _ in range(20):
                path = chance.sample(token_ids, chance.randint(0, len(token_ids)))
                assert constraint.mask() is None
                for number, token_id in enumerate(path):
                    constraint.push(token_id)
                    assert constraint.mask() is None, (path, number)
                constraint.pop(len(path))
    assert num_free > 5


def test_a_tree_is_masked_from_where_the_budget_is_used_up_and_the_marker_is_drafted() -> None:
    rule = ThinkingRule(Thinking(Markers((1,), (3, 4, 5)), True), 3)
    for num_committed, expected in ((0, None), (2, [0, 3, 4]), (3, [3, 4, 5]), (5, [5]), (6, None)):
        output = [0, 0, 0, 3, 4, 5][:num_committed]
        given = Constraints(running(rule, *output)).of_tree(DraftTree([0], [ROOT]), 64, 3, [0.1, 0.2, 0.3])
        if expected is None:
            assert (given.tree, given.masks) == (DraftTree([0], [ROOT]), None)
            continue
        assert given.tree == DraftTree.chain(expected)
        anything = np.full(1, 0xFFFFFFFF, dtype=np.uint32)
        forced = [mask_of((token_id,), VOCAB) for token_id in expected if token_id]
        rows = ([anything] if 0 in expected else []) + forced
        assert np.array_equal(given.masks.words[: len(rows)], rows)


def test_half_a_marker_that_the_model_wrote_is_gone_on_with() -> None:
    """The budget ends inside the marker, which must not begin again."""
    rule = ThinkingRule(Thinking(Markers((1,), (3, 4, 5)), True), 3)
    given = Constraints(running(rule, 0, 3, 4)).of_tree(DraftTree())
    assert np.array_equal(given.masks.words, [mask_of((5,), VOCAB)])
    assert rule.thinking.in_output([0, 3, 4, 5]).num_tokens == 1


def test_tokens_that_a_structure_can_t_have_are_none_behind_a_thought() -> None:
    rule = ThinkingRule(Thinking(Markers((1,), (2,)), True, "never"), None, grammar(choice=sorted(TEXTS)))
    constraint = rule.start(running(rule))
    for token_id in (5, 2, 0):
        constraint.push(token_id)
    before = constraint.mask()
    with pytest.raises(ConstraintError):
        constraint.push(3)
    after = constraint.mask()
    assert np.array_equal(before, after)
    assert np.array_equal(after, mask_behind(TEXTS, [0]))
