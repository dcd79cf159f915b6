"""Kernels draw worker/sampling/sampler.py's tokens, in every instruction set."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.noise import BLOCK, GumbelNoise, gumbel_block, noise_row
from swiftbatch.worker.sampling.sampler import draw
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.sampling.native.sampling_parts import (
    Reference,
    cases,
    in_every_variant,
    native_draw,
    penalised_counts,
)

pytestmark = needs_kernels

NUM_ROWS = {1: 80, 2: 200, 3: 300, 7: 400, 8: 400, 17: 400, 64: 400, 65: 400, 257: 300, 1000: 150, 4096: 20}
LARGE_VOCAB = 128_256


@pytest.mark.parametrize("vocab_size", NUM_ROWS)
def test_every_variant_draws_what_the_reference_draws(vocab_size: int) -> None:
    reference = Reference(vocab_size)
    made = list(cases(random.Random(vocab_size), vocab_size, NUM_ROWS[vocab_size]))
    expected = [reference.draw(*case) for case in made]
    for name in in_every_variant():
        found = [
            native_draw(row, position, params, params.seed or 0, penalised_counts(params, counts))
            for row, position, params, counts in made
        ]
        assert found == expected, name


LARGE = {
    "plain": SamplingParams(max_tokens=1),
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "all filters": SamplingParams(max_tokens=1, temperature=1.3, top_k=5000, top_p=0.95, min_p=0.001, eta=1e-4),
}


@pytest.fixture(scope="module")
def large_noise() -> GumbelNoise:
    return GumbelNoise(5, LARGE_VOCAB)


@pytest.mark.parametrize("params", LARGE.values(), ids=LARGE.keys())
def test_a_large_vocabulary_is_drawn_from_as_well(params: SamplingParams, large_noise: GumbelNoise) -> None:
    rows = torch.randn(3, LARGE_VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    expected = [draw(row, position, params, large_noise) for position, row in enumerate(rows)]
    for _ in in_every_variant():
        assert [native_draw(row, position, params, 5) for position, row in enumerate(rows)] == expected


def test_of_equal_sums_the_first_token_wins() -> None:
    """Sums of large logits with noise round to even numbers."""
    params, noise = SamplingParams(max_tokens=1), GumbelNoise(3, 300)
    rows = torch.randn(2 * BLOCK, 300, generator=torch.Generator().manual_seed(4)) * 4 + 2.0**24
    expected = [draw(row, position, params, noise) for position, row in enumerate(rows)]
    assert sum(best < int(row.argmax()) for best, row in zip(expected, rows, strict=True)) > 5
    for _ in in_every_variant():
        assert [native_draw(row, position, params, 3) for position, row in enumerate(rows)] == expected


def test_the_mass_of_the_unlikeliest_counts_in_top_p() -> None:
    """Together they hold nearly half of the rest."""
    mass = torch.full((1000,), 4.5e-5)
    mass[[300, 700]] = torch.tensor([0.07, 1 - 0.07 - 998 * 4.5e-5])
    params, noise = SamplingParams(max_tokens=1, top_p=0.9), GumbelNoise(3, 1000)
    expected = [draw(mass.log(), position, params, noise) for position in range(4 * BLOCK)]
    assert set(expected) == {300, 700}
    for _ in in_every_variant():
        assert [native_draw(mass.log(), position, params, 3) for position in range(4 * BLOCK)] == expected


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**63 - 1, 2**33 + 5), (11, 100_000)])
def test_noise_is_that_of_the_reference(seed: int, position: int) -> None:
    vocab_size = 20_003
    expected = gumbel_block(seed, position, vocab_size, torch.device("cpu")).numpy()
    for _ in in_every_variant():
        rows = np.stack([noise_row(seed, position + i, vocab_size) for i in range(BLOCK)])
        assert np.array_equal(rows, expected)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 130, 4097])
def test_no_skipped_token_could_have_won(vocab_size: int, scale: float) -> None:
    """Noise is computed for few tokens only."""
    rows = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(2)) * scale
    params = SamplingParams(max_tokens=1)
    for position, row in enumerate(rows):
        expected = int(torch.argmax(row + torch.from_numpy(noise_row(9, position, vocab_size))))
        assert native_draw(row, position, params, 9) == expected


def misshapen() -> Iterator[tuple[str, torch.Tensor]]:
    yield "two rows", torch.zeros(2, 8)
    yield "no tokens", torch.zeros(0)
    yield "bfloat16", torch.zeros(8, dtype=torch.bfloat16)
    yield "not side by side", torch.zeros(8, 2)[:, 0]


@pytest.mark.parametrize("logits", [row for _, row in misshapen()], ids=[name for name, _ in misshapen()])
def test_rows_that_do_not_fit_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected"):
        native_draw(logits, 0, SamplingParams(max_tokens=1), 0)
