"""The noise is Philox4x32-10, standard Gumbel, by (seed, prompt, position, token)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swiftbatch.worker.sampling.noise import BLOCK, GumbelNoise, gumbel_block, noise_key, philox4x32


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers published with the generator (Random123, kat_vectors)
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox4x32(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def test_noise_is_standard_gumbel() -> None:
    block = gumbel_block(key=7, first_position=0, vocab_size=20_000, device=torch.device("cpu")).double()
    assert block.mean().item() == pytest.approx(np.euler_gamma, abs=0.01)
    assert block.var().item() == pytest.approx(np.pi**2 / 6, abs=0.02)
    assert torch.isfinite(block).all()


def test_noise_is_the_same_whenever_and_in_whatever_order_it_is_drawn() -> None:
    forward, backward = GumbelNoise(11, 1000), GumbelNoise(11, 1000)
    positions = list(range(0, 5 * BLOCK, 3))
    first = {position: forward.row(position).clone() for position in positions}
    for position in reversed(positions):
        assert torch.equal(backward.row(position), first[position])


def test_the_number_of_threads_changes_no_bit() -> None:
    rows = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        rows.append(gumbel_block(3, 64, 50_021, torch.device("cpu")))
    assert torch.equal(rows[0], rows[1])


def test_keys_and_positions_give_unrelated_noise() -> None:
    one, other = GumbelNoise(1, 5000), GumbelNoise(2**62 + 1, 5000)
    pairs = [(one.row(5), one.row(6)), (one.row(5), other.row(5)), (one.row(5), one.row(2**33 + 5))]
    for a, b in pairs:
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.06


def test_keys_are_those_of_earlier_versions() -> None:
    """So resumed jobs continue with the same noise."""
    prompt = np.array([5, 700_000, 2])
    found = [noise_key(seed, prompt, num_rewinds) for seed, num_rewinds in ((42, 0), (-1, 0), (2**64 - 1, 0), (42, 1))]
    assert found == [
        12_478_849_271_591_215_710,
        9_468_156_399_204_940_552,
        5_867_677_255_293_241_059,
        9_914_440_022_604_486_570,
    ]


def test_a_key_follows_from_seed_prompt_and_rewinds_and_from_nothing_else() -> None:
    prompts = [[1], [1, 2], [2, 1], [2], [0, 1], [1, 0], [256], [12], *([number, 7] for number in range(3, 303))]
    seeds = [0, -1, 2**64 - 1, 2**63, -(2**63), 12]
    keys = {noise_key(seed, np.array(prompt), num) for seed in seeds for prompt in prompts for num in (0, 1, 12)}
    assert len(keys) == len(seeds) * len(prompts) * 3
    assert noise_key(42, np.array([1, 2], dtype=np.int64)) == noise_key(42, np.array([1, 2], dtype=np.uint32))


def test_prompts_that_share_a_seed_draw_independently() -> None:
    """First tokens of a flat law: agreements and pairs are as frequent as by chance."""
    vocab, num_prompts = 8, 3000
    noises = [GumbelNoise(noise_key(42, np.array([9, n, n // 7])), vocab) for n in range(num_prompts)]
    draws = np.array([[noise.row(position).argmax() for position in (3, 4)] for noise in noises])
    joint = [a * vocab + b for a, b in ((draws[::2, 0], draws[1::2, 0]), (draws[:, 0], draws[:, 1]))]
    for cells in joint:  # two prompts at one place, one prompt at two
        counts, expected = np.bincount(cells, minlength=vocab**2), len(cells) / vocab**2
        assert ((counts - expected) ** 2 / expected).sum() < 110  # of 63 degrees of freedom: 1 in 5,000
    counts = np.bincount(draws[:, 0], minlength=vocab)
    share = (counts * (counts - 1)).sum() / (num_prompts * (num_prompts - 1))
    assert share == pytest.approx(1 / vocab, abs=0.005)
