"""Torch, C and Triton draw in the filters' order and in no other.

A new filter belongs in worker/sampling/filters.py, or this file says what is missing.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.kernels.build import SOURCE
from swiftbatch.worker.sampling.cuda.cuda_sampler import Draw
from swiftbatch.worker.sampling.cuda.sampling_rows import ROW
from swiftbatch.worker.sampling.filters import FILTERS, NUMBERS, Filter
from swiftbatch.worker.sampling.noise import GumbelNoise
from swiftbatch.worker.sampling.sampler import draw, process
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.sampling.cuda.draw_parts import Branch, sequence_of, step_of
from tests.worker.sampling.native.sampling_parts import VALUES, in_every_variant, native_draw

ORDER = ("top_k", "top_p", "min_p", "eta")
COMMUTING = {("top_k", "min_p")}  # each ignores what the other changes
OTHER_FIELDS = {  # they decide a draw or an end, but are no filters
    *("max_tokens", "temperature", "repetition_penalty", "penalty_window", "seed", "stop", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "logit_bias", "min_tokens", "stop_token_ids", "bad_words"),
    *("include_stop_str_in_output", "repetition_detection", "logprobs", "structured_outputs", "thinking_end"),
    *("thinking_token_budget", "stop_in_reasoning", "return_token_ids", "truncate_prompt_tokens"),
    *("echo", "prompt_logprobs"),
}
CUTTING: dict[str, list[float]] = {  # values at which a filter cuts rows of `VOCAB` tokens
    "top_k": [3, 6, 12],
    "top_p": [0.5, 0.7, 0.9],
    "min_p": [0.05, 0.15, 0.3],
    "eta": [0.1, 0.3, 0.5],
}
VOCAB = 24
NUM_CASES = 12
SEED = 7
KEEP = {each.field: each.keep for each in FILTERS}
PAIRS = list(itertools.combinations(ORDER, 2))
pairs_that_do_not_commute = pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in COMMUTING])


class Case(NamedTuple):
    """A row where two filters' order decides the token."""

    row: torch.Tensor
    params: SamplingParams
    position: int
    expected: int


@functools.cache
def noise() -> GumbelNoise:
    return GumbelNoise(SEED, VOCAB)


def kept(row: torch.Tensor, settings: dict[str, float], order: Sequence[str]) -> torch.Tensor:
    """Return the scores by definition."""
    for field in order:
        row = KEEP[field](row, settings[field])
    return row


def tried(pair: tuple[str, str]) -> Iterator[tuple[torch.Tensor, dict[str, float], int]]:
    """Return fixed rows, filter values and positions."""
    chance, generator = random.Random(1), torch.Generator().manual_seed(1)
    for position in range(1, 4000):
        yield (
            torch.randn(VOCAB, generator=generator) * 2,
            {field: chance.choice(CUTTING[field]) for field in pair},
            position,
        )


@functools.cache
def cases(pair: tuple[str, str]) -> list[Case]:
    """Find the first cases in which the order decides."""
    found: list[Case] = []
    for row, settings, position in tried(pair):
        first, second = (kept(row, settings, order) for order in (pair, pair[::-1]))
        if torch.equal(first, second):
            continue
        shifts = noise().row(position)
        expected = int(torch.argmax(first + shifts))
        if expected != int(torch.argmax(second + shifts)):
            found.append(Case(row, SamplingParams(max_tokens=1, seed=SEED, **settings), position, expected))  # type: ignore[arg-type]
        if len(found) == NUM_CASES:
            break
    return found


def test_the_list_has_the_order() -> None:
    assert tuple(each.field for each in FILTERS) == ORDER


@pytest.mark.parametrize("pair", PAIRS)
def test_the_order_of_two_filters_decides_tokens_unless_they_commute(pair: tuple[str, str]) -> None:
    assert len(cases(pair)) == (0 if pair in COMMUTING else NUM_CASES)


@pairs_that_do_not_commute
def test_torch_has_the_order(pair: tuple[str, str]) -> None:
    for row, params, position, expected in cases(pair):
        settings = {field: getattr(params, field) for field in pair}
        assert torch.equal(process(row, params), kept(row, settings, pair))
        assert draw(row, position, params, noise()) == expected


@needs_kernels
@pairs_that_do_not_commute
def test_c_has_the_order_in_every_instruction_set(pair: tuple[str, str]) -> None:
    for name in in_every_variant():
        for row, params, position, expected in cases(pair):
            assert native_draw(row, position, params, SEED) == expected, name


@pairs_that_do_not_commute
def test_triton_has_the_order(pair: tuple[str, str]) -> None:
    made = cases(pair)
    branches = [Branch(sequence_of([1] * case.position, case.params, VOCAB), [], case.row) for case in made]
    for branch in branches:
        branch.sequence.noise_key = SEED
    buffers = step_of([*branches])
    with np.errstate(all="ignore"):  # the device's infinities are numpy's warnings
        Draw(buffers).launch(is_filtered=True)
    assert buffers.tokens.tolist() == [case.expected for case in made]


def test_every_sampling_field_is_in_the_list_or_no_filter() -> None:
    fields = {each.field for each in FILTERS}
    assert fields | OTHER_FIELDS == set(SamplingParams.model_fields)
    assert not fields & OTHER_FIELDS


@pytest.mark.parametrize("each", FILTERS, ids=ORDER)
def test_a_filter_is_off_by_default_and_cuts_in_the_tests_of_all_three(each: Filter) -> None:
    assert SamplingParams.model_fields[each.field].default == each.off
    assert not each.is_on(SamplingParams(max_tokens=1))
    assert set(VALUES[each.field]) > {each.off}
    for value in CUTTING[each.field]:
        assert each.is_on(SamplingParams(max_tokens=1, **{each.field: value}))


def test_c_and_triton_read_the_numbers_of_the_list() -> None:
    """A struct in another order would be misread."""
    source = (SOURCE / "filters.h").read_text(encoding="utf-8")
    struct = re.search(r"typedef struct \{([^}]*)\} filter_params;", source)
    assert struct is not None
    members = re.findall(r"^\s*(\w+) (\w+);", struct[1], flags=re.MULTILINE)
    assert members == [("int64_t" if number.is_whole else "float", number.name) for number in NUMBERS]
    assert ROW.names is not None
    start = ROW.names.index(NUMBERS[0].name)
    assert ROW.names[start : start + len(NUMBERS)] == tuple(number.name for number in NUMBERS)
