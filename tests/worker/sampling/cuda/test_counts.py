"""Counts on the device follow each slot's penalty window."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from swiftbatch.worker.sampling.cuda.logits_kernels import update_counts
from swiftbatch.worker.sampling.cuda.sampling_rows import committed_tokens, leaving_tokens

VOCAB = 12
WIDTH = 100  # more than one program's


def in_window(token_ids: np.ndarray, window: int) -> torch.Tensor:
    return torch.from_numpy(np.bincount(token_ids[-window:], minlength=VOCAB).astype(np.int32))


@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_the_last_tokens_of_each_slot(seed: int) -> None:
    chance = random.Random(seed)
    windows = [1, 3, 70, 1024]
    texts = [np.array([], dtype=np.int64) for _ in windows]
    counts, output = torch.zeros(2, len(windows), VOCAB, dtype=torch.int32)
    for _ in range(6):
        arriving = torch.full((len(windows), WIDTH), -1, dtype=torch.int32)
        leaving = torch.full_like(arriving, -1)
        for slot, window in enumerate(windows):
            num_new = chance.choice([0, 1, 5, 64, WIDTH])
            texts[slot] = np.append(texts[slot], [chance.randrange(VOCAB) for _ in range(num_new)]).astype(np.int64)
            come, left = committed_tokens(texts[slot], num_new, window)
            arriving[slot, : len(come)], leaving[slot, : len(left)] = torch.from_numpy(come), torch.from_numpy(left)
        update_counts(counts, output, arriving, leaving)
        assert torch.equal(output, torch.stack([in_window(text, len(text) + 1) for text in texts]))
        assert torch.equal(counts, torch.stack([in_window(*one) for one in zip(texts, windows, strict=True)]))


@pytest.mark.parametrize("window", [1, 3, 64, 70, 200])
def test_leaving_tokens_are_those_that_the_window_will_drop(window: int) -> None:
    for length in (0, 1, 50, 64, 150):
        text = np.arange(100, 100 + length)
        expected = [text[i] if 0 <= (i := length - window + step) < length else -1 for step in range(64)]
        assert leaving_tokens(text, window).tolist() == expected
