"""Rows and parameters of all kinds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.kernels.native_library import OVERRIDE
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.logits_processors import penalise
from swiftbatch.worker.sampling.native_sampler import NativeSampler, kernels, walk
from swiftbatch.worker.sampling.noise import BLOCK, GumbelNoise
from swiftbatch.worker.sampling.sampler import draw
from swiftbatch.worker.sampling.token_masks import mask_of
from tests.worker.kernels.kernel_parts import VARIANTS

INF = float("inf")
VALUES: dict[str, list[float]] = {
    "temperature": [0.0, 1e-30, 1e-3, 0.6, 1.0, 1.0, 1.0, 1.7, 100.0],
    "top_k": [0, 0, 0, 1, 2, 5, 50, 2**31 - 1],
    "top_p": [1.0, 1.0, 0.95, 0.5, 0.1, 1e-20, 1 - 1e-16],
    "min_p": [0.0, 0.0, 0.1, 0.9, 1.0, 5e-324],
    "eta": [0.0, 0.0, 0.02, 0.3, 0.99, 5e-324],
    "repetition_penalty": [1.0, 1.0, 1.2, 0.5, 1e-6, 1e6],
}
KINDS = ("normal", "tied", "flat", "masked", "peaked", "huge", "tiny", "one", "far")
SEEDS = (0, 7, 2**62 + 11)


def any_adjustments(chance: random.Random, vocab_size: int) -> dict[str, Any]:
    """Often draw none."""
    token_ids = chance.sample(range(vocab_size), min(vocab_size - 1, 5))
    values: dict[str, list[Any]] = {
        "frequency_penalty": [0.0, 0.0, 0.3, 2.0, -0.7, 1e-3],
        "presence_penalty": [0.0, 0.0, 0.1, 2.0, -1.3],
        "logit_bias": [(), (), tuple((token_id, chance.uniform(-100, 100)) for token_id in sorted(token_ids))],
        "min_tokens": [0, 0, 1, 7, 2**30],
        "stop_token_ids": [(), tuple(sorted(token_ids))],
        "bad_words": [(), ("any",)],
    }
    return {name: chance.choice(options) for name, options in values.items()}


def any_words(chance: random.Random, params: SamplingParams, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    if not params.bad_words:
        return ()
    lengths = chance.choices([1, 2, 2, 3], k=chance.choice([1, 3 * vocab_size]))
    lengths = [length for i, length in enumerate(lengths) if length > 1 or i < 4]
    return tuple(tuple(chance.randrange(vocab_size) for _ in range(length)) for length in [2, *lengths])[:256]


def any_mask(chance: random.Random, vocab_size: int) -> np.ndarray:
    """Draw a mask that allows some token."""
    size = chance.choice([1, 2, max(1, vocab_size // 2), vocab_size])
    return mask_of(tuple(chance.sample(range(vocab_size), size)), vocab_size)


def any_params(chance: random.Random) -> SamplingParams:
    chosen = {name: chance.choice(values) for name, values in VALUES.items()}
    return SamplingParams(max_tokens=1, seed=chance.choice(SEEDS), **chosen)  # type: ignore[arg-type]


def any_row(chance: random.Random, vocab_size: int) -> torch.Tensor:
    """Return `[vocab] float32` with something to draw."""
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    row = torch.randn(vocab_size, generator=generator) * chance.choice([0.1, 1.0, 4.0, 20.0])
    best = chance.randrange(vocab_size)
    kind = chance.choice(KINDS)
    if kind == "tied":
        row = row.round()
    elif kind == "flat":
        row = torch.full_like(row, chance.choice([0.0, -0.0, 3.0]))
    elif kind == "masked":
        row[torch.rand(vocab_size, generator=generator) < 0.7] = -INF
        row[best] = 1.0
    elif kind == "peaked":
        row[best] += 30.0
    elif kind in ("huge", "tiny"):
        row = row * (1e30 if kind == "huge" else 1e-40)
    elif kind == "far":
        row += 2.0**24  # sums with noise round to whole numbers, so that many are equal
    elif kind == "one":
        row[:] = -INF
        row[best] = -5.0
    return row


def any_counts(chance: random.Random, vocab_size: int) -> np.ndarray:
    """Return `[vocab] int32`."""
    return np.array(chance.choices([0, 0, 1, 3], k=vocab_size), dtype=np.int32)


class Reference:
    """Draws as worker/sampling/sampler.py does."""

    def __init__(self, vocab_size: int) -> None:
        self._noise = {seed: GumbelNoise(seed, vocab_size) for seed in SEEDS}

    def draw(self, row: torch.Tensor, position: int, params: SamplingParams, counts: np.ndarray) -> int:
        seen = torch.from_numpy(counts > 0)
        penalised = penalise(row, seen, params.repetition_penalty)
        return draw(penalised, position, params, self._noise[params.seed or 0])


def cases(
    chance: random.Random, vocab_size: int, num_rows: int
) -> Iterator[tuple[torch.Tensor, int, SamplingParams, np.ndarray]]:
    for _ in range(num_rows):
        row, counts = any_row(chance, vocab_size), any_counts(chance, vocab_size)
        yield row, chance.randrange(BLOCK), any_params(chance), counts


def penalised_counts(params: SamplingParams, counts: np.ndarray) -> np.ndarray | None:
    return counts if params.repetition_penalty != 1.0 else None


class Place:
    """A sequence of `position` tokens, whose noise has any key."""

    sequence_id = "place"

    def __init__(self, position: int, params: SamplingParams, noise_key: int, vocab_size: int) -> None:
        self.token_ids = np.zeros(position, dtype=np.int64)
        self.sampling, self.noise_key, self.vocab_size = params, noise_key, vocab_size

    def __len__(self) -> int:
        return len(self.token_ids)


def native_draw(
    row: torch.Tensor, position: int, params: SamplingParams, noise_key: int, counts: np.ndarray | None = None
) -> int:
    """Draw by a walk of the root alone; `counts [vocab] int32` are those of the penalty window."""
    place: Any = Place(position, params, noise_key, len(row))
    sampler = NativeSampler(place)
    if counts is not None:
        assert sampler._counts is not None
        sampler._counts[:], sampler._window.num_counted = counts, position
    [[_, [token_id], *_]] = walk([sampler], [DraftTree()], [row[None]])
    return token_id


def in_every_variant() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIANTS:
            patch.setenv(OVERRIDE, name)
            kernels.cache_clear()
            yield name
    kernels.cache_clear()
