"""Noise on the device equals worker/sampling/noise.py's words and floats."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from swiftbatch.worker.sampling.cuda.logits_kernels import gumbel, gumbel_bound, noise_words
from swiftbatch.worker.sampling.noise import BLOCK, gumbel_block, philox4x32

NUM_TOKENS = 2048
PLACES = [(0, 0), (5, 1024), (2**63 - 7, 99_984), (2**64 - 1, 2**33), ((123 << 32) + 9, 2**40 + 16), (2**31, 2**31)]


@triton.jit
def store_noise(words_ptr, noise_ptr, seed_low, seed_high, position_low, position_high, first, SIZE: tl.constexpr):  # noqa: N803
    seed = (seed_high.to(tl.uint64) << 32) | seed_low.to(tl.uint64)
    words = noise_words(seed, position_low, position_high, first, SIZE)
    tl.store(words_ptr + tl.arange(0, SIZE), words.to(tl.int64))
    tl.store(noise_ptr + tl.arange(0, SIZE), gumbel(words))


def noise_of(seed: int, position: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    words, noise = torch.zeros(NUM_TOKENS, dtype=torch.int64), torch.zeros(NUM_TOKENS)
    low, high = 2**32 - 1, 32
    store_noise[(1,)](words, noise, seed & low, seed >> high, position & low, position >> high, first, SIZE=NUM_TOKENS)
    return words, noise


@pytest.mark.parametrize(("seed", "position"), PLACES)
def test_words_are_those_of_the_generator(seed: int, position: int) -> None:
    for first in (0, 126_976):
        quads = first // 4 + torch.arange(NUM_TOKENS // 4)
        zeros, low = torch.zeros_like(quads), 2**32 - 1
        counter = (quads, zeros + (position & low), zeros + (position >> 32), zeros)
        expected = torch.stack(philox4x32(counter, (seed & low, seed >> 32)), dim=-1).flatten()
        assert torch.equal(noise_of(seed, position, first)[0], expected)


@pytest.mark.parametrize(("seed", "position"), PLACES)
def test_noise_is_that_of_the_cpu(seed: int, position: int) -> None:
    expected = gumbel_block(seed, position, NUM_TOKENS, torch.device("cpu"))
    for offset in (0, BLOCK - 1):
        assert torch.equal(noise_of(seed, position + offset, 0)[1], expected[offset])


@triton.jit
def store_bounds(words_ptr, bounds_ptr, noise_ptr, SIZE: tl.constexpr):  # noqa: N803
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    words = tl.load(words_ptr + places).to(tl.uint32)
    tl.store(bounds_ptr + places, gumbel_bound(words))
    tl.store(noise_ptr + places, gumbel(words))


def test_bounds_are_above_the_noise_of_all_kinds_of_words_and_close_to_it() -> None:
    """Words lie at both ends, around each power of two from each end, where the form changes, and in between."""
    near = torch.arange(-4096, 4096)
    ends = [side for power in range(33) for side in (2**power + near, 2**32 - 2**power + near)]
    words = torch.cat([*ends, torch.arange(0, 2**32, 16_381)]).clamp(0, 2**32 - 1)
    words = torch.cat([words, words.new_zeros(-len(words) % NUM_TOKENS)])
    bounds, noise = torch.zeros(2, len(words))
    store_bounds[(len(words) // NUM_TOKENS,)](words, bounds, noise, SIZE=NUM_TOKENS)
    above = bounds.double() - noise.double()
    assert above.min() >= 7 / 8 * 2**-10
    assert above.max() <= 2**-9
