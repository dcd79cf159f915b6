"""The device draws what worker/sampling/sampler.py draws, row by row."""

from __future__ import annotations

import random

import pytest
import torch

from swiftbatch.worker.sampling.cuda.cuda_sampler import Draw, SamplingBuffers
from swiftbatch.worker.sampling.cuda.sampling_rows import BLOCK
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.filters import needs_filters
from swiftbatch.worker.sampling.noise import noise_row
from tests.worker.sampling.cuda.draw_parts import (
    FILTERS,
    NAN,
    NO_FILTERS,
    VOCAB,
    Branch,
    any_branch,
    any_tree,
    branches_of,
    plain,
    sequence_of,
    step_of,
)
from tests.worker.sampling.native.sampling_parts import INF, any_adjustments, any_params

pytestmark = pytest.mark.long


def drawn(buffers: SamplingBuffers, is_filtered: bool = True) -> list[int]:
    Draw(buffers).launch(is_filtered)
    return buffers.tokens.tolist()


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_row_draws_the_samplers_token(seed: int) -> None:
    chance = random.Random(seed)
    branches = [
        any_branch(chance, any_params(chance).model_copy(update=any_adjustments(chance, VOCAB))) for _ in range(64)
    ]
    buffers = step_of(list(branches))
    assert drawn(buffers) == [branch.expected() for branch in branches]
    assert torch.equal(buffers.highest, torch.stack([branch.logits.max() for branch in branches]))


def test_rows_without_filters_draw_the_same_in_three_launches() -> None:
    chance = random.Random(10)
    branches = [any_branch(chance, any_params(chance).model_copy(update=NO_FILTERS)) for _ in range(40)]
    branches += [any_branch(chance, any_params(chance)) for _ in range(24)]
    buffers, expected = step_of(list(branches)), [branch.expected() for branch in branches]
    unfiltered = [i for i, branch in enumerate(branches) if not needs_filters(branch.sequence.sampling)]
    for is_filtered in (False, True):
        tokens = drawn(buffers, is_filtered)
        assert [tokens[i] for i in unfiltered] == [expected[i] for i in unfiltered]


@pytest.mark.sample(3)
@pytest.mark.parametrize("window", [1, 2, 5, 64, 1024])
def test_each_row_of_a_tree_is_penalised_for_its_own_path(window: int) -> None:
    """Few tokens come and leave, with strong penalties."""
    chance = random.Random(window)
    branches: list[Branch | None] = []
    for length in (1, 4, 70):
        params = plain(repetition_penalty=5.0, penalty_window=window, temperature=chance.choice([0.0, 1.0]))
        sequence = sequence_of([chance.randrange(12) for _ in range(length)], params, 12)
        tree = any_tree(chance, 20, 12)
        branches += branches_of(sequence, tree, torch.randn(21, 12, generator=torch.Generator().manual_seed(length)))
    deepest = DraftTree.chain([chance.randrange(12) for _ in range(63)])
    branches[-1] = branches_of(sequence, deepest, torch.zeros(64, 12))[-1]
    expected = [branch.expected() for branch in branches if branch]
    assert drawn(step_of(branches, num_slots=2), is_filtered=False) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_row_of_a_tree_counts_its_own_path_and_ends_no_bad_word_of_it(temperature: float) -> None:
    """Rows lie on both sides of the minimum."""
    chance, branches = random.Random(7), []
    words = ((5,), *((first, chance.randrange(12)) for first in range(12)))
    for num_output in (0, 3, 40):
        params = plain(temperature=temperature, frequency_penalty=1.1, presence_penalty=-0.6)
        changes = {"logit_bias": ((3, 2.5), (8, -100.0)), "min_tokens": num_output + 3, "stop_token_ids": (1, 2)}
        params = params.model_copy(update=changes | {"bad_words": ("any",)})
        sequence = sequence_of([chance.randrange(12) for _ in range(50)], params, 12, num_output, words)
        sequence.sampling = params
        tree = any_tree(chance, 20, 12)
        rows = torch.randn(21, 12, generator=torch.Generator().manual_seed(num_output))
        branches += branches_of(sequence, tree, rows)
    assert drawn(step_of(list(branches)), is_filtered=False) == [branch.expected() for branch in branches]


def test_a_row_draws_the_same_alone_in_company_and_in_another_place() -> None:
    chance = random.Random(3)
    kept = [any_branch(chance, any_params(chance)) for _ in range(6)]
    wild: list[Branch | None] = [any_branch(chance, any_params(chance)) for _ in range(6)]
    for branch, value in zip(wild, (NAN, INF, 3e38, -INF), strict=False):
        assert branch is not None
        branch.logits = torch.full((VOCAB,), value)
    results = []
    for company in (None, 0, 3):
        for i, branch in enumerate(kept):
            neighbours = [None] * 5 if company is None else [*wild[company : company + 3], None, *kept[:i]]
            place = 0 if company is None else company + 1
            drawing = Draw(buffers := step_of([*neighbours[:place], branch, *neighbours[place:]]))
            drawing.launch(is_filtered=True)
            found = (buffers.tokens, buffers.highest, drawing.cuts.ranks)
            results.append((i, *(column[place].item() for column in found)))
    assert len(set(results)) == len(kept)
    assert [result[1] for result in results[: len(kept)]] == [branch.expected() for branch in kept]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_equal_sums_the_lower_token_wins_across_blocks(temperature: float) -> None:
    """Sums of large logits with noise round to even numbers."""
    params, vocab_size = plain(temperature=temperature), 2 * BLOCK + 37
    rows = torch.full((6, vocab_size), 2.0**25)
    rows[3:, :1500] = -INF
    branches = [Branch(sequence_of([1] * (i + 1), params, vocab_size), [], row) for i, row in enumerate(rows)]
    expected = [branch.expected() for branch in branches]
    assert drawn(step_of(list(branches)), is_filtered=False) == expected
    assert len(set(expected[:3])) <= 3


@pytest.mark.parametrize("spread", [1e-6, 1e-4, 1e-3])
def test_of_sums_closer_than_the_estimates_of_noise_the_best_wins_across_blocks(spread: float) -> None:
    """Logits undo the noise, so that the best estimate is seldom the best sum."""
    vocab_size, branches = 3 * BLOCK + 37, []
    for i in range(8):
        sequence = sequence_of([1] * (i + 1), plain(temperature=1.0), vocab_size)
        noise = torch.from_numpy(noise_row(sequence.noise_key, len(sequence), vocab_size))
        close = spread * torch.rand(vocab_size, generator=torch.Generator().manual_seed(i))
        branches.append(Branch(sequence, [], close - noise))
    expected = [branch.expected() for branch in branches]
    assert drawn(step_of(list(branches)), is_filtered=False) == expected
    assert len({token // BLOCK for token in expected}) > 1


@pytest.mark.parametrize(("temperature", "scale"), [(1e-30, 1.0), (1e-30, 1e30), (1e-3, 3e37), (0.5, 1e38)])
def test_quotients_beyond_float32_draw_as_the_sampler_does(temperature: float, scale: float) -> None:
    chance, branches = random.Random(1), []
    for i in range(6):
        settings = FILTERS if i % 2 else {}
        branch = any_branch(chance, plain(temperature=temperature, **settings))
        branch.logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(i)).clamp(-2.5, 2.5) * scale
        branches.append(branch)
    branches[-1].logits.neg_().sub_(branches[-1].logits.abs())  # negative ones alone
    assert drawn(step_of(list(branches))) == [branch.expected() for branch in branches]


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_penalties_beyond_float32_draw_the_first_of_the_best_tokens(penalty: float) -> None:
    row = torch.tensor([-1e30, 3e38, 2e38, -3e38] + [-3e38] * 8)
    for logits in (row, row[:1].expand(12) - 1e38):
        params = [plain(repetition_penalty=penalty, temperature=0.5, **settings) for settings in ({}, FILTERS)]
        branches = [Branch(sequence_of(list(range(12)), each, 12), [], logits) for each in params]
        assert drawn(step_of(list(branches))) == [branches[0].expected()] * 2


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("settings", [{}, FILTERS], ids=["plain", "filtered"])
def test_rows_that_nothing_can_be_drawn_from_are_told(temperature: float, settings: dict[str, float]) -> None:
    rows = torch.zeros(6, 12)
    rows[0, 5], rows[1, 3], rows[2] = NAN, INF, -INF
    rows[3, 2:4] = torch.tensor([NAN, INF])
    rows[4, 6] = -INF  # masks only its token
    params = plain(temperature=temperature, repetition_penalty=2.0, **settings)
    branches = [Branch(sequence_of([1], params, 12), [], row) for row in rows]
    buffers = step_of([*branches, None])
    expected = [-1, -1, -1, -1, branches[4].expected(), branches[5].expected(), -1]
    for is_filtered in (False, True) if not settings else (True,):
        assert drawn(buffers, is_filtered) == expected
        assert buffers.highest.isfinite().tolist() == [token >= 0 for token in expected]
        assert torch.equal(buffers.highest[:-1].nan_to_num(nan=-1e9), rows.amax(1).nan_to_num(nan=-1e9))
