"""Three levels draw by one law."""

from __future__ import annotations

import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.draft_tree import DraftTree, walk
from swiftbatch.worker.sampling.sampler import TokenSampler, process
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.law_parts import PLAIN, PROMPT, TABLE, VOCAB, gate, ours, plain_steps

pytestmark = pytest.mark.long

PENALISED = SamplingParams(max_tokens=100, temperature=0.8, top_p=0.95, repetition_penalty=1.2)
SETTINGS = pytest.mark.parametrize("params", [PLAIN, PENALISED], ids=["plain", "penalised"])
SETTINGS_OF_LAW = pytest.mark.parametrize(
    "params", [pytest.param(PLAIN, id="plain"), pytest.param(PENALISED, id="penalised", marks=pytest.mark.slow)]
)
EMPTY = DraftTree()
# The wrong logits of the draft model and of the partial cache.
DRAFT_TABLE = TABLE + torch.cos(torch.arange(TABLE.numel(), dtype=torch.float32) * 2.3).view_as(TABLE)
MIDDLE_TABLE = TABLE + 0.6 * torch.cos(torch.arange(TABLE.numel(), dtype=torch.float32) * 1.1).view_as(TABLE)


def rows_of(table: torch.Tensor, sequence: Sequence, tree: DraftTree) -> torch.Tensor:
    return table[[int(sequence.token_ids[-1]), *tree.token_ids]]


def chain_by(table: torch.Tensor, sequence: Sequence, length: int) -> DraftTree:
    sampler, chain = TokenSampler(sequence, VOCAB), [int(sequence.token_ids[-1])]
    for _ in range(length):
        chain.append(sampler.draw(table[chain[-1]]))
    return DraftTree.chain(chain[1:])


def three_levels(sequence: Sequence, _tree: DraftTree) -> list[int]:
    """Return our hierarchy's path: every level compares with the same noise."""
    first = chain_by(DRAFT_TABLE, sequence, 2)
    middle = walk(first, rows_of(MIDDLE_TABLE, sequence, first), TokenSampler(sequence, VOCAB).draw).drawn
    second = DraftTree.chain(middle)
    return walk(second, rows_of(TABLE, sequence, second), TokenSampler(sequence, VOCAB).draw).drawn


@SETTINGS_OF_LAW
def test_three_levels_follow_the_law(params: SamplingParams) -> None:
    assert gate(three_levels, params) > 1e-3


@pytest.mark.sample(2)
@SETTINGS
def test_three_levels_say_what_plain_decoding_says(params: SamplingParams) -> None:
    for seed in range(500):
        assert plain_steps(three_levels, EMPTY, params, seed) == plain_steps(ours, EMPTY, params, seed)


def law_of(table: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return torch.softmax(process(table[PROMPT[-1]], params).double(), dim=-1)


def published_levels(sequence: Sequence, *, corrects_middle: bool) -> list[int]:
    """Draw a token through both levels of speculative sampling with p / q ratios.

    The published middle level redraws from the checking law itself, the right one from its excess over the draft's.
    """
    generator = torch.Generator().manual_seed(int(sequence.sampling.seed or 0))
    draft, middle, full = (law_of(table, sequence.sampling) for table in (DRAFT_TABLE, MIDDLE_TABLE, TABLE))

    def verify(token_id: int, proposed: torch.Tensor, law: torch.Tensor, corrected: torch.Tensor) -> int:
        if torch.rand((), generator=generator) < law[token_id] / proposed[token_id]:
            return token_id
        return int(torch.multinomial(corrected, 1, generator=generator))

    drafted = int(torch.multinomial(draft, 1, generator=generator))
    checked = verify(drafted, draft, middle, (middle - draft).clamp(min=0) if corrects_middle else middle)
    return [verify(checked, middle, full, (full - middle).clamp(min=0))]


def test_the_gate_catches_a_middle_level_that_draws_from_its_own_law_after_a_rejection() -> None:
    assert gate(lambda sequence, _: published_levels(sequence, corrects_middle=False), PLAIN) < 1e-6


@pytest.mark.slow  # like the test above with a right one, which our own levels also show
def test_the_gate_lets_the_corrected_middle_level_pass() -> None:
    assert gate(lambda sequence, _: published_levels(sequence, corrects_middle=True), PLAIN) > 1e-3
