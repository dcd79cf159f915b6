from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenacity import RetryCallState, Retrying, wait_random_exponential

from swiftbatch.jobs.storage.retries import MIN_JITTER_SECONDS, Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(first=0.5, longest=60.0)
    assert [backoff.seconds(number) for number in range(1, 10)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize("num_failures", [100, 2000, 10**9])
def test_any_number_of_failures_has_a_pause(num_failures: int) -> None:
    assert Backoff(first=1.0, longest=30.0).seconds(num_failures) == 30.0


@given(first=st.sampled_from([0.2, 0.5]), num_failures=st.integers(1, 3000), seed=st.integers(0, 99))
def test_random_pauses_are_those_of_tenacity(first: float, num_failures: int, seed: int) -> None:
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = num_failures
    random.seed(seed)
    expected = wait_random_exponential(multiplier=first, min=MIN_JITTER_SECONDS, max=10)(state)
    random.seed(seed)
    assert Backoff(first, longest=10).at_random(state) == expected
