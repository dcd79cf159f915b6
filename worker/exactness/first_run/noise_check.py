"""The check of the noise: it is the same for all draws on this device, word by word."""

from __future__ import annotations

import random

import torch

from swiftbatch.worker.drawing.noise import BLOCK, gumbel_block, philox4x32
from swiftbatch.worker.exactness.first_run.findings import Finding, Row
from swiftbatch.worker.exactness.first_run.parts import Parts
from swiftbatch.worker.exactness.first_run.probes import noise_of

MASK = 0xFFFFFFFF
MOST_DIFFERING = 1e-5  # share of the numbers; a logarithm's last bit survives rounding about once in 10^8
MOST_DISTANCE = 1e-6  # of a number, relatively: one unit in its last place


def check_noise(parts: Parts) -> Finding:
    """Words of random seeds and positions against the generator in torch, numbers against the CPU's."""
    rng, vocab_size = random.Random(0), parts.sizes.vocab
    rows: list[Row] = []
    for number in range(max(1, parts.extent.num_positions // BLOCK)):
        seed, first = rng.getrandbits(64), rng.getrandbits(20 + 20 * (number % 2)) // BLOCK * BLOCK
        words, numbers, distance = _differing(parts, seed, first, vocab_size)
        row: Row = {"seed": str(seed), "position": first, "tried": BLOCK * vocab_size}
        rows.append(row | {"words differing": words, "numbers differing": numbers, "distance": distance})
    tried, words, numbers = (
        sum(int(row[name]) for row in rows) for name in ("tried", "words differing", "numbers differing")
    )
    distance = max(float(row["distance"]) for row in rows)
    passed = words == 0 and numbers <= MOST_DIFFERING * tried and distance <= MOST_DISTANCE
    said = f"{words:,} of {tried:,} words differ, {numbers:,} numbers do, by {distance:.2g} of themselves at most"
    return Finding(passed=passed, words=said, rows=rows)


def _differing(parts: Parts, seed: int, first: int, vocab_size: int) -> tuple[int, int, float]:
    """Words and numbers that differ at `BLOCK` positions, and the greatest relative distance of two numbers."""
    expected = gumbel_block(seed, first, vocab_size, torch.device("cpu"))
    words_differing = numbers_differing = 0
    distance = 0.0
    for offset in range(BLOCK):
        words, noise = (each.cpu() for each in noise_of(seed, first + offset, vocab_size, parts.device))
        words_differing += int((words != _words(seed, first + offset, vocab_size)).sum())
        differs = noise != expected[offset]
        if differs.any():
            numbers_differing += int(differs.sum())
            apart = (noise[differs] - expected[offset][differs]).abs() / expected[offset][differs].abs()
            distance = max(distance, float(apart.nan_to_num(torch.inf).max()))
    return words_differing, numbers_differing, distance


def _words(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """`[vocab] int64`, in the order of the tokens."""
    quads = torch.arange((vocab_size + 3) // 4)
    zeros = torch.zeros_like(quads)
    counter = (quads, zeros + (position & MASK), zeros + (position >> 32), zeros)
    return torch.stack(philox4x32(counter, (seed & MASK, seed >> 32)), dim=-1).flatten()[:vocab_size]
