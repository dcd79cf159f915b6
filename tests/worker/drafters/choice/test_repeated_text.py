"""Drafts of what a text repeats of itself: found, followed, and counted for what they have brought."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.auto.auto import auto
from swiftbatch.worker.drafters.auto.repeated_text import (
    IDLE_STEPS_AT_ONCE,
    MOST_TOLD_APART,
    NGRAM,
    REFUSED_FOR,
    RepeatedText,
    RepeatingDrafter,
    RepeatShares,
)
from swiftbatch.worker.drafters.autoregressive import AutoregressiveDrafter
from swiftbatch.worker.drafters.drafter_interface import DraftRequest
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.step_costs import StepCosts
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import Verification
from tests.worker.drafters.drafter_parts import free_rows, run_together

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
            most = min(text.num_matched, MOST_TOLD_APART)
            assert tokens[-most:] == tokens[-most - source : -source]
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


def test_a_token_that_breaks_a_repeat_ends_it_and_lowers_its_share() -> None:
    shares, tokens = RepeatShares(), [*PHRASE, 11, 20, *PHRASE[:6]]
    before = shares.tokens(6, (1,))
    _, text = grown([*tokens, 45], shares, len(tokens))
    assert text.num_matched == 0
    assert shares.tokens(6, (1,)) < before


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> TargetModel:
    return TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu")


@pytest.mark.sample(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_auto_drafts_repeats_beside_trees_and_draws_the_same_tokens(target: TargetModel, temperature: float) -> None:
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
    assert isinstance(drafter, RepeatingDrafter)
    num_repeating = count_repeating_steps(drafter)
    assert outputs(Engine(target, drafter)) == plain
    assert num_repeating[0] > 0
    assert not drafter._texts


def test_what_repeats_bring_is_not_learned_of_trees(target: TargetModel) -> None:
    drafter = auto(target, free_rows, None)
    assert isinstance(drafter, RepeatingDrafter)
    num_repeating, num_drafted = count_repeating_steps(drafter), 0
    engine, params = Engine(target, drafter), SamplingParams(max_tokens=150, temperature=0.0, seed=5, ignore_eos=True)
    sequence = Sequence("a", [2, 7, 1, 8] * 12, params, target.vocab_size)
    engine.start(sequence)
    drafter._budget.clock.begin(1.0, "tree")
    while sequence.finish_reason is None:
        num_drafted += sum(verification.num_proposed_tokens > 0 for _, verification in engine.step())
        assert drafter._budget.clock._open is None or not drafter._is_repeating  # such a step is not timed
    assert num_repeating[0] > 0
    assert drafter._budget.state(sequence)[TILE_ROWS] == num_drafted - num_repeating[0]


def count_repeating_steps(drafter: RepeatingDrafter) -> list[int]:
    """A number that grows with every step in which the drafter itself proposed."""
    counted, choose = [0], drafter._sizes_that_pay

    def counting(*given: object) -> list[int] | None:
        sizes = choose(*given)  # type: ignore[arg-type]
        counted[0] += sizes is not None
        return sizes

    drafter._sizes_that_pay = counting  # type: ignore[method-assign, assignment]
    return counted


def test_where_rows_cost_as_much_as_steps_repeats_are_not_drafted(target: TargetModel) -> None:
    dear = StepCosts((64, 8192), np.outer([1.0, 2.0], [1, 2, 4, 8, 16, 32]) * 4.0)
    drafter = auto(target, lambda: dear, None)
    assert isinstance(drafter, RepeatingDrafter)
    num_repeating = count_repeating_steps(drafter)
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=5, ignore_eos=True)
    sequence = Sequence("a", [2, 7, 1, 8] * 12, params, target.vocab_size)
    run_together(Engine(target, drafter), [sequence])
    assert num_repeating[0] == 0


def test_repeats_that_did_not_pay_are_planned_for_again_after_a_while(target: TargetModel) -> None:
    dear = StepCosts((64, 8192), np.outer([1.0, 2.0], [1, 2, 4, 8, 16, 32]) * 4.0)
    drafter = auto(target, lambda: dear, None)
    assert isinstance(drafter, RepeatingDrafter)
    num_plans, choose = 0, drafter._sizes_that_pay

    def counting(requests: list[DraftRequest], repeated: set[str]) -> list[int] | None:
        nonlocal num_plans
        num_plans += 1
        return choose(requests, repeated)

    drafter._sizes_that_pay = counting  # type: ignore[method-assign]
    sequence, phrase = sequence_of([2, 7, 1, 8] * 12), [2, 7, 1, 8]
    drafter.start(sequence, target.new_cache(400))
    for step in range(8 * REFUSED_FOR):  # of which many rest
        assert not any(map(len, drafter.propose([DraftRequest(sequence, 31, 31, 0.0)])))
        sequence.extend([phrase[step % 4]])
        drafter.update(sequence, Verification(DraftTree(), [], [phrase[step % 4]], [1], None, None, None))
        drafter._texts["a"].catch_up(sequence)
    assert 2 <= num_plans <= 5


def plain_steps(drafter: RepeatingDrafter, sequences: list[Sequence], num_steps: int) -> None:
    """Steps that draft nothing, or have nothing accepted, over texts that repeat nothing."""
    for _ in range(num_steps):
        trees = drafter.propose([DraftRequest(sequence, 31, 31, 0.0) for sequence in sequences])
        for sequence, tree in zip(sequences, trees, strict=True):
            sequence.extend([random.Random(len(sequence)).randrange(VOCAB)])
            rows = np.array([1, *tree.token_ids])
            drafter.update(sequence, Verification(tree, [], sequence.token_ids[-1:].tolist(), rows, None, None, None))


def test_steps_that_rest_ask_nobody_and_are_counted_behind_the_rest(target: TargetModel) -> None:
    dear = StepCosts((64, 8192), np.outer([1.0, 2.0], [1, 2, 4, 8, 16, 32]) * 4.0)
    drafter = auto(target, lambda: dear, None)
    assert isinstance(drafter, RepeatingDrafter)
    asked, propose = [], drafter.otherwise.propose

    def asking(requests: list[DraftRequest]) -> list[DraftTree]:
        asked.append(len(requests))
        return propose(requests)

    drafter.otherwise.propose = asking  # type: ignore[method-assign]
    noted, rested = [], drafter._budget.rested

    def resting(sequences: list[Sequence], num_steps: int, *others: Any) -> None:
        noted.append(num_steps)
        rested(sequences, num_steps, *others)

    drafter._budget.rested = resting  # type: ignore[method-assign]
    first, second = (Sequence(name, [*range(9)], SamplingParams(max_tokens=800), VOCAB) for name in "ab")
    for sequence in (first, second):  # of the second one there is text to read yet
        drafter.start(sequence, target.new_cache(900))
    plain_steps(drafter, [first], 300)
    drafter.state(first)
    asked.clear()
    noted.clear()
    plain_steps(drafter, [first], 300)
    drafter.state(first)
    assert 0 < len(asked) < 30
    assert max(noted) > IDLE_STEPS_AT_ONCE
    assert len(asked) + sum(noted) == 300
    assert drafter._texts["a"]._num_tokens == len(first)
    plain_steps(drafter, [first], 1)
    while not drafter._num_idle:
        plain_steps(drafter, [first], 1)
    asked.clear()
    plain_steps(drafter, [first, second], 1)
    assert asked == [2]
