"""Filters on the device keep worker/sampling/sampler.py's tokens."""

from __future__ import annotations

import random

import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.cuda.cuda_sampler import Draw
from swiftbatch.worker.sampling.cuda.filter_kernels import SEARCH_BLOCK
from swiftbatch.worker.sampling.cuda.sampling_rows import MAX_VOCAB
from swiftbatch.worker.sampling.sampler import process
from tests.worker.sampling.cuda.draw_parts import FILTERS, NO_FILTERS, Branch, plain, sequence_of, step_of
from tests.worker.sampling.native.sampling_parts import any_params, any_row


def branch_of(params: SamplingParams, logits: torch.Tensor) -> Branch:
    return Branch(sequence_of([1], params, len(logits)), [], logits)


def ranks_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sort the scores' bits."""
    bits = torch.where(scores == 0.0, 0.0, scores).view(torch.int32).long()
    orders = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ((orders + 2**31) << 24) | tokens


def assert_kept(branches: list[Branch]) -> None:
    """Min-p applies again, as in the draw."""
    buffers = step_of([*branches, None])
    drawing = Draw(buffers)
    drawing.launch(is_filtered=True)
    for i, branch in enumerate(branches):
        params, tokens = branch.sequence.sampling, torch.arange(len(branch.logits))
        scores = branch.logits / params.temperature
        kept = ranks_of(scores, tokens) >= drawing.cuts.ranks[i]
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
    """The cut is in the first block or after it."""
    generator = torch.Generator().manual_seed(8)
    rows = [
        (1.0, {"top_k": SEARCH_BLOCK + 400}),
        (0.3, {"top_p": 0.1}),
        (0.3, {"top_p": 0.9}),
        (4.0, {"top_p": 0.5}),
        (1.0, {"eta": 1e-3, "top_k": SEARCH_BLOCK + 899}),
        (2.0, {"eta": 0.3}),
        (2.0, {"eta": 0.3, "min_p": 0.02}),
        (4.0, FILTERS),
    ]
    assert_kept([branch_of(plain(**one), torch.randn(SEARCH_BLOCK + 900, generator=generator) * x) for x, one in rows])


def test_of_the_largest_vocabulary_whose_tokens_are_all_alike() -> None:
    """Its weights of 1 sum below 2^63, with more tokens than Gemma 3's 262,208."""
    assert_kept([branch_of(plain(top_p=0.5), torch.zeros(MAX_VOCAB))])
