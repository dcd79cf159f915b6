"""Distinct-n equals a set of tuples."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftbatch.worker.session.running_job import distinct, distinct_shares
from tests.work_counts import num_lines
from tests.worker.session.session_parts import body, make_run, record, run_to_end


def brute_force(tokens: list[int], n: int) -> float:
    ngrams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


@settings(max_examples=200)
@given(st.lists(st.integers(0, 3) | st.integers(150_000, 150_001), max_size=40), st.integers(1, 6))
def test_it_is_the_share_of_distinct_ngrams(tokens: list[int], n: int) -> None:
    assert list(distinct_shares(np.array(tokens, dtype=np.int64), n))[-1] == brute_force(tokens, n)


def test_distinct_1_to_4_have_names_and_four_places() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    expected = {f"distinct_{n}": round(brute_force(tokens, n), 4) for n in (1, 2, 3, 4)}
    assert distinct(np.array(tokens, dtype=np.uint32)) == expected
    assert expected["distinct_2"] == 0.7143


def test_no_text_and_texts_too_short_count_as_zero() -> None:
    assert set(distinct(np.array([], dtype=np.int64)).values()) == {0.0}
    assert distinct(np.array([5, 5])) == {"distinct_1": 0.5, "distinct_2": 1.0, "distinct_3": 0.0, "distinct_4": 0.0}


def test_ngrams_of_any_vocabulary_stay_apart() -> None:
    """A plain product of token ids would collide or overflow."""
    rng = random.Random(1)
    tokens = [rng.choice([0, 1, 2**31 - 2, 2**31 - 1]) for _ in range(3000)]
    assert list(distinct_shares(np.array(tokens, dtype=np.int64), 8))[-1] == brute_force(tokens, 8)


def test_a_hundred_thousand_tokens_take_python_no_more_than_a_hundred() -> None:
    tokens = np.random.default_rng(1).integers(0, 150_000, 100_000)
    assert num_lines(lambda: distinct(tokens)) == num_lines(lambda: distinct(tokens[:100]))


def test_a_job_s_result_shows_them(tmp_path: Path, tiny_model: Path) -> None:
    run, job = make_run(tmp_path / "run"), record("fox")
    run_to_end(run, tiny_model, job)
    metrics = body(run, job)["metrics"]
    assert 0 < metrics["distinct_1"] <= metrics["distinct_4"] <= 1
