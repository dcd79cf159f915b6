"""The lengths that jobs are expected to have, by what has ended in the run."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from swiftbatch.scheduler.driver.lengths import Lengths

LIMIT = 10_000


def test_before_anything_has_ended_a_job_is_expected_to_reach_its_limit() -> None:
    forecast = Lengths().forecast([(500, LIMIT), (0, LIMIT)])
    assert [forecast.final_tokens(num_tokens, LIMIT) for num_tokens in (0, 500, LIMIT)] == [LIMIT] * 3


def test_the_first_job_that_ends_early_says_little() -> None:
    lengths = Lengths()
    lengths.note(10, LIMIT)
    assert lengths.forecast([]).final_tokens(0, LIMIT) > 0.75 * LIMIT


def test_jobs_that_reached_their_limits_let_others_of_any_limit_be_expected_to() -> None:
    lengths = Lengths()
    for _ in range(100):
        lengths.note(200, 200)
    assert lengths.forecast([]).final_tokens(40, LIMIT) == LIMIT


@pytest.mark.parametrize("num_tokens", [0, 500, 2000])
def test_jobs_that_still_run_do_not_let_others_look_short(num_tokens: int) -> None:
    """Those that have ended by now are the short ones of a batch that began together."""
    rng = random.Random(0)
    lengths, now = [min(LIMIT, int(rng.expovariate(1 / 3000)) + 1) for _ in range(4000)], 2500
    known = Lengths()
    for length in lengths:
        if length <= now:
            known.note(length, LIMIT)
    running = [(now, LIMIT) for length in lengths if length > now]
    law = fmean(min(num_tokens + rng.expovariate(1 / 3000), now) for _ in range(4000))
    expected = known.forecast(running).final_tokens(num_tokens, LIMIT)
    true_mean = fmean(length for length in lengths if length > num_tokens)
    assert law < true_mean < expected <= LIMIT  # nobody has seen what comes behind `now`: up to the limit, for all


def test_a_job_never_is_expected_to_end_before_now_or_behind_its_limit() -> None:
    rng, lengths = random.Random(1), Lengths()
    for _ in range(300):
        limit = rng.randint(1, 500)
        lengths.note(rng.randint(1, limit), limit)
        num_tokens = rng.randint(0, limit)
        assert num_tokens <= lengths.forecast([(num_tokens, limit)]).final_tokens(num_tokens, limit) <= limit
