from __future__ import annotations

import random
from statistics import fmean

import numpy as np
import pytest

from swiftbatch.scheduler.driver.expected_lengths import LengthStatistics, RunningLengths

LIMIT = 10_000
PROMPT = 50  # tokens


def test_before_anything_has_ended_a_job_is_expected_to_reach_its_limit() -> None:
    forecast = LengthStatistics().forecast(RunningLengths.of([(PROMPT, 500, LIMIT), (PROMPT, 0, LIMIT)]))
    assert [forecast.final_tokens(PROMPT, num_tokens, LIMIT) for num_tokens in (0, 500, LIMIT)] == [LIMIT] * 3


def test_the_first_job_that_ends_early_says_little() -> None:
    lengths = LengthStatistics()
    lengths.note(PROMPT, 10, LIMIT)
    assert lengths.forecast(RunningLengths()).final_tokens(PROMPT, 0, LIMIT) > 0.75 * LIMIT


def test_jobs_that_reached_their_limits_let_others_of_any_limit_be_expected_to() -> None:
    lengths = LengthStatistics()
    for _ in range(100):
        lengths.note(PROMPT, 200, 200)
    assert lengths.forecast(RunningLengths()).final_tokens(PROMPT, 40, LIMIT) == LIMIT


@pytest.mark.parametrize("num_tokens", [0, 500, 2000])
def test_jobs_that_still_run_do_not_let_others_look_short(num_tokens: int) -> None:
    """Jobs that have ended by now are the short ones of their batch."""
    rng = random.Random(0)
    lengths, now = [min(LIMIT, int(rng.expovariate(1 / 3000)) + 1) for _ in range(4000)], 2500
    known = LengthStatistics()
    for length in lengths:
        if length <= now:
            known.note(PROMPT, length, LIMIT)
    running = [(PROMPT, now, LIMIT) for length in lengths if length > now]
    law = fmean(min(num_tokens + rng.expovariate(1 / 3000), now) for _ in range(4000))
    expected = known.forecast(RunningLengths.of(running)).final_tokens(PROMPT, num_tokens, LIMIT)
    true_mean = fmean(length for length in lengths if length > num_tokens)
    assert law < true_mean < expected <= LIMIT  # nothing is known beyond `now`, so it expects up to the limit


def test_a_job_never_is_expected_to_end_before_now_or_behind_its_limit() -> None:
    rng, lengths = random.Random(1), LengthStatistics()
    for _ in range(300):
        limit = rng.randint(1, 500)
        lengths.note(PROMPT, rng.randint(1, limit), limit)
        num_tokens = rng.randint(0, limit)
        assert (
            num_tokens
            <= lengths.forecast(RunningLengths.of([(PROMPT, num_tokens, limit)])).final_tokens(
                PROMPT, num_tokens, limit
            )
            <= limit
        )


def test_prompts_whose_answers_are_long_let_others_of_their_length_be_expected_to_be_long() -> None:
    lengths = LengthStatistics()
    for _ in range(200):
        lengths.note(20, 100, LIMIT)
        lengths.note(2000, 5000, LIMIT)
    forecast = lengths.forecast(RunningLengths())
    assert forecast.final_tokens(21, 0, LIMIT) < 1000 < 4000 < forecast.final_tokens(1900, 0, LIMIT)
    assert 1000 < forecast.final_tokens(200, 0, LIMIT) < 4000, "nobody has seen such a prompt"
    prompts, limits = np.array([21, 1900, 30, 1000, 200], np.int32), np.full(5, LIMIT, np.int32)
    short, long, as_short, as_long, unseen = forecast.of_new(prompts, limits).tolist()
    assert short < as_short < 1000 < 4000 < long <= as_long < 6000
    assert unseen == LIMIT


def test_many_that_have_ended_count_as_one_by_one() -> None:
    rng = np.random.default_rng(0)
    prompts, limits = rng.integers(0, 3000, 200), rng.integers(1, 500, 200)
    tokens = np.minimum(limits, rng.integers(0, 500, 200))
    one_by_one, together = LengthStatistics(), LengthStatistics()
    for each in zip(prompts.tolist(), tokens.tolist(), limits.tolist(), strict=True):
        one_by_one.note(*each)
    together.note_all(prompts, tokens, limits)
    asked = [(n, 0, LIMIT) for n in (0, 1, 7, 100, 2999)]
    assert together.num_ended == one_by_one.num_ended == 200
    assert [together.forecast(RunningLengths()).final_tokens(*each) for each in asked] == [
        one_by_one.forecast(RunningLengths()).final_tokens(*each) for each in asked
    ]
