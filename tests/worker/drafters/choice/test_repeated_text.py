"""Drafts of what a text repeats of itself: found, followed, and counted for what they have brought."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.auto import auto
from swiftbatch.worker.drafters.choice import repeated_text
from swiftbatch.worker.drafters.choice.choosing_drafter import REPEAT, ChoosingDrafter
from swiftbatch.worker.drafters.choice.policy import PLAIN, Policy
from swiftbatch.worker.drafters.choice.repeated_text import (
    FEWEST_AT_ONCE,
    LONG_REPEAT,
    MOST_AT_ONCE,
    MOST_TOLD_APART,
    NGRAM,
    REFUSED_FOR,
    RepeatedText,
    RepeatShares,
    RepeatWay,
)
from swiftbatch.worker.drafters.choice.ways import TreeWay
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter, DraftRequest
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.draft_tree import DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence
from tests.tiny_targets import target as target
from tests.worker.drafters.drafter_parts import dear_rows, free_rows, run_together

VOCAB = 50
PHRASE = [7, 3, 9, 1, 4, 8, 2, 6]


def sequence_of(tokens: list[int], room: int = 200) -> Sequence:
    return Sequence("a", tokens, SamplingParams(max_tokens=room, seed=1), VOCAB)


def grown(tokens: list[int], shares: RepeatShares, first: int) -> tuple[Sequence, RepeatedText]:
    """A text that came token by token behind its first ones."""
    sequence = sequence_of(tokens[:first])
    text = RepeatedText(sequence, shares)
    for token in tokens[first:]:
        sequence.extend([token])
        text.catch_up(sequence)
    return sequence, text


def test_what_followed_the_newest_place_is_drafted() -> None:
    tokens = [*PHRASE, 11, 20, 21, 22, 23, *PHRASE, 12, 30, 31, 32, *PHRASE[2:]]
    sequence = sequence_of(tokens)
    assert RepeatedText(sequence, RepeatShares()).chain(sequence, 4) == [12, 30, 31, 32]
    assert RepeatedText(sequence, RepeatShares()).num_matched == len(PHRASE) - 2


def test_a_repeat_that_overlaps_itself_goes_on() -> None:
    sequence = sequence_of([40, 41, *PHRASE[:3] * 4])
    assert RepeatedText(sequence, RepeatShares()).chain(sequence, 7) == (PHRASE[:3] * 3)[:7]


@pytest.mark.parametrize("before", [[], [40, 41]])
def test_the_end_of_a_prompt_is_a_place_to_repeat_from(before: list[int]) -> None:
    prompt = [*before, *PHRASE[:NGRAM]]
    sequence, text = grown([*prompt, 30, 31, 32, *PHRASE[:NGRAM]], RepeatShares(), len(prompt))
    assert text.num_matched >= NGRAM
    assert text.chain(sequence, 3) == [30, 31, 32]


@pytest.mark.parametrize("length", [1, NGRAM, 2 * NGRAM - 1])
def test_a_text_without_repeats_promises_its_next_token_alone(length: int) -> None:
    text = RepeatedText(sequence_of(list(range(length))), RepeatShares())
    assert (text.num_matched, text.tokens((0, 1, 7))) == (0, [1.0, 1.0, 1.0])


def test_a_text_that_grows_agrees_with_one_that_is_there() -> None:
    """However it came, the repeat is one that stands there, unless an older one is still under way."""
    chance = random.Random(3)
    for _ in range(30):
        tokens = [chance.randrange(4) for _ in range(5)]
        while len(tokens) < 150:
            start = chance.randrange(len(tokens))
            tokens.extend([*tokens[start : start + chance.randrange(1, 30)], chance.randrange(VOCAB)])
        del tokens[chance.randrange(100, 150) :]  # amid a repeat, often
        sequence, text = grown(tokens, RepeatShares(), 5)
        at_once = RepeatedText(sequence, RepeatShares())
        assert bool(text.num_matched) >= bool(at_once.num_matched)
        if text.num_matched:
            source = len(tokens) - text._source
            most = min(text.num_matched, MOST_TOLD_APART) - 1  # the first stands for a token that broke a long repeat
            assert tokens[len(tokens) - most :] == tokens[len(tokens) - most - source : -source]
            assert text.chain(sequence, 1) == [tokens[-source]]


def test_a_repeat_is_followed_as_it_goes_on() -> None:
    tokens = [*PHRASE, 11, 20, *PHRASE[:4]]
    sequence, text = grown([*tokens, *PHRASE[4:7]], RepeatShares(), len(tokens))
    assert text.num_matched == 7
    assert text.chain(sequence, 3) == [PHRASE[7], 11, 20]


def test_another_n_gram_in_the_same_bucket_is_no_repeat() -> None:
    tokens = [10, 11, 12, 13, 14, 15, 20, 21, 22, 14, 15]
    text = RepeatedText(sequence_of(tokens), RepeatShares())
    text._begin(np.array(tokens), len(tokens), tokens[-4:], place=6)  # behind 14, 15
    assert text.num_matched == 0


def test_shares_are_those_of_the_tokens_that_went_on() -> None:
    shares = RepeatShares()
    for _ in range(400):
        shares.observe(5, False)
        shares.observe(40, True)
    assert shares.tokens(5, (0, 1, 7)) == pytest.approx([1.0, 1.0, 1.0], abs=0.01)
    assert shares.tokens(40, (0, 1, 7)) == pytest.approx([1.0, 2.0, 8.0], rel=0.01)


def test_a_long_repeat_goes_on_behind_another_token_until_an_n_gram_stands_elsewhere() -> None:
    passage, shares = [*range(10, 30)], RepeatShares()
    tokens = [*passage, 1, 2, *passage[:LONG_REPEAT], 45]
    sequence, text = grown(tokens, shares, 22)
    assert text.chain(sequence, 3) == passage[LONG_REPEAT + 1 : LONG_REPEAT + 4]
    assert text.tokens((1,)) == shares.tokens(NGRAM, (1,))
    sequence, text = grown([*passage, 3, 45, 19, 20, 21, 40, 41, *tokens], shares, 40)
    for token in (19, 20, 21):
        sequence.extend([token])
        text.catch_up(sequence)
    assert text.chain(sequence, 2) == [40, 41]


def test_a_token_that_breaks_a_repeat_ends_it_and_lowers_its_share() -> None:
    shares, tokens = RepeatShares(), [*PHRASE, 11, 20, *PHRASE[:6]]
    before = shares.tokens(6, (1,))
    _, text = grown([*tokens, 45], shares, len(tokens))
    assert text.num_matched == 0
    assert shares.tokens(6, (1,)) < before


@pytest.fixture
def repeats_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no other way bring anything by measured times."""
    monkeypatch.setattr(Policy, "rate", 1e-9)


@pytest.mark.sample(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_auto_drafts_repeats_beside_trees_and_draws_the_same_tokens(
    target: TargetModel, temperature: float, repeats_pay: None
) -> None:
    def sequences() -> list[Sequence]:
        params = SamplingParams(max_tokens=150, temperature=temperature, seed=5, ignore_eos=True)
        prompts = ([3, 1, 4, 1, 5], [2, 7, 1, 8] * 12, list(range(30)))
        return [Sequence(f"s{i}", prompt, params, target.vocab_size) for i, prompt in enumerate(prompts)]

    def outputs(engine: Engine) -> list[list[int]]:
        found = sequences()
        run_together(engine, found)
        return [sequence.output_ids.tolist() for sequence in found]

    plain = outputs(Engine(target, AutoregressiveDrafter(target, free_rows, None)))
    drafter = auto(target, free_rows, None)
    assert outputs(Engine(target, drafter)) == plain
    assert ways_of(drafter, target, sequences()).count(REPEAT) > 0
    assert not repeats_of(drafter)._texts


def repeats_of(drafter: ChoosingDrafter) -> RepeatWay:
    assert drafter._repeats is not None
    return drafter._repeats


def ways_of(drafter: ChoosingDrafter, target: TargetModel, sequences: list[Sequence]) -> list[str]:
    """Run sequences to their ends; return the way of each step."""
    engine, ways = Engine(target, drafter), list[str]()
    for sequence in sequences:
        engine.start(sequence)
    while any(sequence.finish_reason is None for sequence in sequences):
        if engine.step():
            ways.append(drafter.way)
    for sequence in sequences:
        engine.stop(sequence)
    return ways


def repeating(target: TargetModel, temperature: float = 0.0, num_tokens: int = 150) -> Sequence:
    params = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=5, ignore_eos=True)
    return Sequence("a", [2, 7, 1, 8] * 12, params, target.vocab_size)


def test_what_repeats_bring_is_not_learned_of_trees(target: TargetModel, repeats_pay: None) -> None:
    drafter, learned = auto(target, free_rows, None), list[int]()
    trees = drafter.ways["tree"]
    assert isinstance(trees, TreeWay)
    observe = trees.sizes.observe
    trees.sizes.observe = lambda verified: [learned.append(len(verified)), observe(verified)][1]  # type: ignore[method-assign, func-returns-value]
    ways = ways_of(drafter, target, [repeating(target)])
    assert ways.count(REPEAT) > 0
    assert sum(learned) == ways.count("tree")


def test_where_rows_cost_as_much_as_steps_repeats_are_not_drafted(target: TargetModel) -> None:
    assert REPEAT not in ways_of(auto(target, dear_rows, None), target, [repeating(target, 1.0, 60)])


def test_repeats_that_did_not_pay_are_planned_for_again_after_a_while(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_text, "NEARLY", 0.0)
    way, num_plans = repeats_of(auto(target, dear_rows, None)), 0
    planned = way._planned

    def counting(*given: Any) -> float:
        nonlocal num_plans
        num_plans += 1
        return planned(*given)

    way._planned = counting  # type: ignore[method-assign]
    sequence, phrase = sequence_of([2, 7, 1, 8] * 12), [2, 7, 1, 8]
    way.start(sequence, target.new_cache(400))
    for step in range(8 * REFUSED_FOR):
        assert not way.pays([DraftRequest(sequence, 31, 31)], 0.0, rate=1.0)
        sequence.extend([phrase[step % 4]])
        way.hear([(sequence, Verification(DraftTree(), [], [phrase[step % 4]], [1], None, None))])
    assert 7 <= num_plans <= 9 + MOST_TOLD_APART  # once for each length that is told apart, and then now and then


def test_a_repeat_that_promises_far_less_than_the_chosen_way_is_not_planned_for(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, sequence = repeats_of(auto(target, dear_rows, None)), sequence_of([2, 7, 1, 8] * 12)
    way.start(sequence, target.new_cache(400))
    monkeypatch.setattr(way, "_planned", None)
    assert not way.pays([DraftRequest(sequence, 31, 31)], 0.0, rate=1.0)


def test_plain_steps_pass_ever_more_at_once_while_no_text_repeats_itself(target: TargetModel) -> None:
    way = repeats_of(auto(target, dear_rows, None))
    sequence = sequence_of([*range(9)])
    way.start(sequence, target.new_cache(400))
    at_once = []
    for _ in range(4):
        way.pays([DraftRequest(sequence, 31, 31)], 0.0, rate=1.0)
        at_once.append(way.most_steps)
    assert at_once == [2 * FEWEST_AT_ONCE, MOST_AT_ONCE, MOST_AT_ONCE, MOST_AT_ONCE]
    sequence.extend([*range(9)])
    way.hear([(sequence, Verification(DraftTree(), [], [*range(9)], [1], None, None))])
    way.pays([DraftRequest(sequence, 31, 31)], 0.0, rate=1.0)
    assert way.most_steps == FEWEST_AT_ONCE


def test_plain_decoding_goes_on_in_runs_where_nothing_pays(target: TargetModel) -> None:
    drafter = auto(target, dear_rows, None)
    params = SamplingParams(max_tokens=300, temperature=1.0, seed=5, ignore_eos=True)
    ways = ways_of(drafter, target, [Sequence("a", [*range(9)], params, target.vocab_size)])
    assert set(ways) == {PLAIN}
    assert drafter.pass_plain(31) > 0
