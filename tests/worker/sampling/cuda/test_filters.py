"""Filters on the device keep the tokens that worker/sampling/sampler.py keeps."""

from __future__ import annotations

import random

import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.cuda.sampling_graphs import SORTED_BLOCK, UNDECIDED, FilteredSampling, TopTokensSampling
from swiftbatch.worker.sampling.cuda.sampling_rows import MAX_VOCAB
from swiftbatch.worker.sampling.sampler import process
from tests.worker.sampling.cuda.draw_parts import FILTERS, NO_FILTERS, Branch, plain, sequence_of, step_of
from tests.worker.sampling.native.sampling_parts import any_params, any_row


def branch_of(params: SamplingParams, logits: torch.Tensor) -> Branch:
    return Branch(sequence_of([1], params, len(logits)), [], logits)


def assert_kept(branches: list[Branch]) -> None:
    """Check that a row keeps behind its cut what the sampler keeps; min-p is applied there again, as the draw does."""
    buffers = step_of([*branches, None])
    drawing = FilteredSampling(buffers)
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


def drawn_both_ways(branches: list[Branch], num_listed: int) -> list[bool]:
    """Expect the cuts and tokens of sorted rows without a sort of the vocabulary; returns which rows were decided."""
    buffers = step_of([*branches, None])
    drawing = FilteredSampling(buffers)
    drawing.launch()
    tokens, cuts = buffers.tokens.clone(), [drawing.cut_scores.clone(), drawing.cut_tokens.clone()]
    TopTokensSampling(drawing, num_listed).launch()
    is_decided = buffers.tokens != UNDECIDED
    assert torch.equal(buffers.tokens[is_decided], tokens[is_decided])
    for found, expected in zip([drawing.cut_scores, drawing.cut_tokens], cuts, strict=True):
        assert torch.equal(found[is_decided], expected[is_decided])
    return is_decided[: len(branches)].tolist()


def test_of_rows_of_which_only_the_best_tokens_are_sorted() -> None:
    """All rows are decided if all tokens are listed; if few are, most rows still are."""
    chance, branches = random.Random(6), list[Branch]()
    for _ in range(40):
        settings = {"temperature": chance.choice([0.7, 1.0, 1.7]), "repetition_penalty": 1.0}
        branches.append(branch_of(any_params(chance).model_copy(update=settings), any_row(chance, 300)))
    assert all(drawn_both_ways(branches, 512))
    assert 10 < sum(drawn_both_ways(branches, 32)) < 40


def test_of_usual_filters_few_listed_tokens_tell_and_what_lies_below_them_is_left_undecided() -> None:
    generator = torch.Generator().manual_seed(9)
    usual = [{"top_k": 20, "top_p": 0.95}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.05}, {"eta": 0.02}, {"top_k": 63}]
    below = [{"top_k": 64}, {"top_p": 1 - 1e-6}, {"eta": 1e-9}]
    rows = torch.randn(len(usual) + len(below), SORTED_BLOCK + 900, generator=generator) * 5
    rows[4, :] = rows[4].round()  # many are as likely as the last one of the best
    made = [branch_of(plain(**one), row) for one, row in zip([*usual, *below], rows, strict=True)]
    assert drawn_both_ways(made, 64) == [True] * 4 + [False] * 4
    assert all(drawn_both_ways(made[:4], 128))


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


def test_of_the_largest_vocabulary_whose_tokens_are_all_alike() -> None:
    """The row's weights, all of them 1, add up below 2^63; it has more tokens than Gemma 3's 262,208."""
    assert_kept([branch_of(plain(top_p=0.5), torch.zeros(MAX_VOCAB))])
