"""The suffix automaton against brute force, and its drafter."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftbatch.worker.drafters.suffix import MAX_CANDIDATES, ROOT_STATE, SuffixAutomaton, predict

token_lists = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def automaton_of(tokens: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.extend(token)
    return automaton


def state_of(automaton: SuffixAutomaton, tokens: list[int]) -> int:
    state = ROOT_STATE
    for token in tokens:
        state = automaton.step(state, token)
        if state < 0:
            break
    return state


def ends(tokens: list[int], part: list[int]) -> set[int]:
    return {i + len(part) for i in range(len(tokens) - len(part) + 1) if tokens[i : i + len(part)] == part}


def longest_repeated_suffix(tokens: list[int]) -> list[int]:
    for start in range(1, len(tokens)):
        if len(ends(tokens, tokens[start:])) > 1:
            return tokens[start:]
    return []


@settings(max_examples=75)
@given(token_lists, st.lists(st.integers(0, 3), max_size=5))
def test_it_holds_the_substrings_and_no_others(tokens: list[int], part: list[int]) -> None:
    assert (state_of(automaton_of(tokens), part) >= 0) == bool(ends(tokens, part))


@settings(max_examples=75)
@given(token_lists)
def test_the_longest_repeated_suffix_is_found_after_every_token(tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token in enumerate(tokens, start=1):
        automaton.extend(token)
        expected = longest_repeated_suffix(tokens[:end])
        state = automaton.longest_repeated_suffix()
        assert automaton.length(state) == len(expected)
        assert state == state_of(automaton, expected)


@settings(max_examples=50)
@given(token_lists)
def test_followers_are_the_tokens_that_followed(tokens: list[int]) -> None:
    automaton = automaton_of(tokens)
    for start in range(len(tokens)):
        part = tokens[start : start + 3]
        expected = {tokens[end] for end in ends(tokens, part) if end < len(tokens)}
        assert {token for token, _ in automaton.followers(state_of(automaton, part), 99)} == expected


@settings(max_examples=50)
@given(token_lists)
def test_links_lead_to_the_longest_suffix_that_stands_in_more_places(tokens: list[int]) -> None:
    automaton = automaton_of(tokens)
    state, part = state_of(automaton, tokens), tokens
    while state != ROOT_STATE:
        shorter = next(
            part[i:] for i in range(1, len(part) + 1) if len(ends(tokens, part[i:])) > len(ends(tokens, part))
        )
        state, part = automaton.link(state), shorter
        assert state == state_of(automaton, part)


def test_counts_grow_with_every_return() -> None:
    automaton = automaton_of([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 3])
    state = state_of(automaton, [1, 2])
    counts = {token: automaton.count(target) for token, target in automaton.followers(state, 9)}
    assert counts == {3: 3, 4: 1}


def test_followers_come_most_recent_first() -> None:
    automaton = automaton_of([1, 2, 1, 3, 1, 4, 1, 2, 1])
    assert [token for token, _ in automaton.followers(state_of(automaton, [1]), 9)] == [2, 4, 3]
    assert [token for token, _ in automaton.followers(state_of(automaton, [1]), 1)] == [2]


@pytest.mark.parametrize("name", ["constant", "period", "random", "growing repeats"])
def test_growing_costs_amortised_constant_time_and_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(1)
    num_tokens = 20_000
    tokens = {
        "constant": [7] * num_tokens,
        "period": [i % 97 for i in range(num_tokens)],
        "random": [random.randrange(50) for _ in range(num_tokens)],
        "growing repeats": [token for n in range(200) for token in range(n)][:num_tokens],
    }[name]
    num_visits = 0
    step = SuffixAutomaton.step

    def counted(automaton: SuffixAutomaton, state: int, token: int) -> int:
        nonlocal num_visits
        num_visits += 1
        return step(automaton, state, token)

    monkeypatch.setattr(SuffixAutomaton, "step", counted)
    automaton = automaton_of(tokens)
    assert len(automaton._length) <= 2 * len(tokens), "states"
    assert num_visits <= 6 * len(tokens), "edges looked at while growing"
    assert num_bytes(automaton) <= 400 * len(tokens)


def num_bytes(automaton: SuffixAutomaton) -> int:
    """Count arrays, dicts and integers."""
    parts = (automaton._length, automaton._link, automaton._count, automaton._only_token, automaton._only_target)
    branches = automaton._branches
    size = sum(part.itemsize * len(part) for part in parts) + branches.__sizeof__()
    return size + sum(edges.__sizeof__() + 60 * len(edges) for edges in branches.values())


def test_predictions_are_a_distribution_and_prefer_what_followed_more_often() -> None:
    automaton = automaton_of([1, 2, 3, 1, 2, 3, 1, 2, 3, 5, 1, 2, 4, 1, 2])
    predictions = predict(automaton, automaton.longest_repeated_suffix())
    assert [token for _, token, _ in predictions][:2] == [3, 4]
    assert predictions == sorted(predictions, reverse=True)
    assert all(logprob < 0 for logprob, _, _ in predictions)


def test_a_common_token_with_hundreds_of_followers_gives_few_candidates() -> None:
    automaton = automaton_of([token for follower in range(1, 500) for token in (0, follower)] + [0])
    assert len(predict(automaton, automaton.longest_repeated_suffix())) == MAX_CANDIDATES
