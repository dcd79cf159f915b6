"""Processors agree with those of transformers; greedy and windows behave as documented."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.generation import logits_process as reference

from jobs.sampling import SamplingParams
from worker.noise import GumbelNoise
from worker.sampling import (
    PenaltyWindow,
    draw,
    keep_eta,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise,
)
from worker.sequence import Sequence

VOCAB = 500


def logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("processed", "expected"),
    [
        (lambda x: keep_top_k(x, 7), reference.TopKLogitsWarper(7)),
        (lambda x: keep_top_p(x, 0.9), reference.TopPLogitsWarper(0.9)),
        (lambda x: keep_top_p(x, 0.05), reference.TopPLogitsWarper(0.05)),
        (lambda x: keep_min_p(x, 0.1), reference.MinPLogitsWarper(0.1)),
        (lambda x: keep_eta(x, 0.02), reference.EtaLogitsWarper(0.02)),
    ],
    ids=["top-k", "top-p", "small top-p", "min-p", "eta"],
)
def test_processors_keep_what_transformers_keeps(
    seed: int,
    processed: Callable[[torch.Tensor], torch.Tensor],
    expected: reference.LogitsProcessor,
) -> None:
    row = logits(seed)
    assert torch.equal(processed(row), expected(torch.zeros(1, 1, dtype=torch.long), row[None])[0])


def test_the_penalty_is_sign_aware_as_in_transformers() -> None:
    history = torch.tensor([[3, 3, 17, 400]])
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[history[0]] = True
    expected = reference.RepetitionPenaltyLogitsProcessor(1.2)(history, logits(0)[None])[0]
    assert torch.equal(penalise(logits(0), seen, 1.2), expected)


def test_temperature_zero_is_argmax() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    assert draw(logits(1), 5, params, GumbelNoise(0, VOCAB)) == int(logits(1).argmax())


def test_the_window_forgets_the_token_that_leaves_it_unless_it_came_again() -> None:
    params = SamplingParams(max_tokens=10, repetition_penalty=1.2, penalty_window=3, seed=0)
    window = PenaltyWindow(Sequence("s", [1, 2, 1], params, VOCAB), VOCAB, "cpu")
    seen = []
    for token_id in (9, 9, 9):
        window.push(token_id)
        seen.append(window.seen.nonzero().flatten().tolist())
    assert seen == [[1, 2, 9], [1, 9], [9]]
