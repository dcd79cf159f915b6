"""Filters on the device keep the tokens that worker/drawing/sampling.py keeps."""

from __future__ import annotations

import random

import torch

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.drawing.cuda.draw import SORTED_BLOCK, FilteredDraw
from swiftbatch.worker.drawing.sampling import process
from tests.worker.drawing.cuda.draw_parts import FILTERS, NO_FILTERS, Branch, plain, sequence_of, step_of
from tests.worker.drawing.native.sampling_parts import any_params, any_row


def branch_of(params: SamplingParams, logits: torch.Tensor) -> Branch:
    return Branch(sequence_of([1], params, len(logits)), [], logits)


def assert_kept(branches: list[Branch]) -> None:
    """Behind its cut a row has what the sampler keeps; min-p is applied once more there, as the draw does."""
    buffers = step_of([*branches, None])
    drawing = FilteredDraw(buffers)
    drawing.launch()
    for i, branch in enumerate(branches):
        params, tokens = branch.sequence.sampling, torch.arange(len(branch.logits))
        scores = branch.logits / params.temperature
        floor, first = drawing.cut_scores[i], int(drawing.cut_tokens[i])
        kept = (scores > floor) | ((scores == floor) & (tokens >= first))
        unfiltered = process(branch.logits, params.model_copy(update=NO_FILTERS)).isfinite()
        assert torch.equal(kept & unfiltered, process(branch.logits, params).isfinite()), params
        assert int(buffers.tokens[i]) == branch.expected()


def test_of_rows_of_every_kind() -> None:
    chance = random.Random(5)
    branches = []
    for _ in range(63):
        settings = {"temperature": chance.choice([0.7, 1.0, 1.7]), "repetition_penalty": 1.0}
        branches.append(branch_of(any_params(chance).model_copy(update=settings), any_row(chance, 300)))
    assert_kept(branches)


def test_of_rows_longer_than_a_block() -> None:
    """The cut lies in the first block or behind it; nearly flat rows have much mass on both sides of its border."""
    generator = torch.Generator().manual_seed(8)
    rows = [
        (1.0, {"top_k": SORTED_BLOCK + 400}),
        (0.3, {"top_p": 0.1}),
        (0.3, {"top_p": 0.9}),
        (4.0, {"top_p": 0.5}),
        (1.0, {"eta": 1e-3, "top_k": SORTED_BLOCK + 899}),
        (2.0, {"eta": 0.3}),
        (2.0, {"eta": 0.3, "min_p": 0.02}),
        (4.0, FILTERS),
    ]
    assert_kept([branch_of(plain(**one), torch.randn(SORTED_BLOCK + 900, generator=generator) * x) for x, one in rows])
