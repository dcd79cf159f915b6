from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.generation import logits_process as reference

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.filters import (
    keep_eta,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    running_sum,
    running_sum_in_any_order,
)
from swiftbatch.worker.sampling.logits_processors import PenaltyWindow, penalise
from swiftbatch.worker.sampling.noise import GumbelNoise
from swiftbatch.worker.sampling.sampler import draw, process
from swiftbatch.worker.sampling.sequence import Sequence

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


@pytest.mark.parametrize(("temperature", "scale"), [(1e-30, 1.0), (1e-30, 1e9), (1e-30, 1e30), (1e-3, 3e37)])
def test_quotients_beyond_float32_draw_the_best_token(temperature: float, scale: float) -> None:
    row = logits(2) * scale - 3 * scale  # the best one is positive, most are negative
    params = SamplingParams(max_tokens=1, temperature=temperature, top_p=0.9, min_p=0.1, eta=0.1, seed=1)
    assert draw(row, 5, params, GumbelNoise(1, VOCAB)) == int(row.argmax())


@pytest.mark.parametrize(
    "edge", [{"top_p": 5e-324}, {"top_p": 1e-20}, {"min_p": 1.0}, {"min_p": 5e-324, "top_k": 1}, {"eta": 0.999999}]
)
def test_filters_at_their_edges_keep_the_best_token(edge: dict[str, float]) -> None:
    flat = torch.zeros(VOCAB)
    flat[7] = 1e-3
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=1, **edge)  # type: ignore[arg-type]
    kept = process(flat, params).isfinite().nonzero().flatten().tolist()
    assert kept == [7]


def test_the_smallest_eta_removes_nothing_and_no_filter_gives_nan() -> None:
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=1, eta=5e-324, min_p=5e-324, top_p=1 - 1e-16)
    assert process(logits(3), params).isfinite().all()


@pytest.mark.parametrize("theta", [1e-6, 1e6])
def test_the_strongest_penalties_keep_the_order_of_the_penalised(theta: float) -> None:
    row = torch.tensor([0.0, 30.0, 20.0, -20.0, -30.0])
    penalised = penalise(row, torch.ones(5, dtype=torch.bool), theta)
    assert penalised.isfinite().all()
    assert penalised.argsort(descending=True).tolist() == row.argsort(descending=True).tolist()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
def test_running_sums_in_any_order_keep_the_same_tokens(top_p: float) -> None:
    for seed in range(20):
        probabilities = torch.softmax(logits(seed).sort().values, dim=-1)
        sums = running_sum_in_any_order(probabilities)
        assert torch.equal(sums <= 1.0 - top_p, running_sum(probabilities) <= 1.0 - top_p)
        halves = probabilities.double().mul(2.0**60).long().unflatten(0, (2, -1))  # summed in two parts, merged
        again = torch.cat([halves[0].cumsum(0), halves[0].sum() + halves[1].cumsum(0)])
        assert torch.equal(sums, (again.double() / 2.0**60).float())
