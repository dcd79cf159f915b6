"""Chains drawn in one native call equal rounds one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.self_speculation import Chain, RoundPlan
from swiftbatch.worker.forward import native_forwards
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.sparse_cache import SparseCache
from swiftbatch.worker.sampling.batch_sampler import BatchSampler
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.tiny_targets import target as target
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.kv.cache_parts import everything_of

pytestmark = needs_kernels
NUM_ROUNDS, LENGTHS = 12, (100, 37)
PLAN = RoundPlan(NUM_ROUNDS, 0, NUM_ROUNDS, NUM_ROUNDS)
SAMPLERS: dict[str, dict[str, object]] = {
    "T=0": {"temperature": 0.0},
    "filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "penalty_window": 5, "frequency_penalty": 0.5},
    "bias": {"temperature": 1.0, "logit_bias": {7: 3.0, 9: -100.0}, "presence_penalty": 1.0, "min_tokens": 6},
}


def opened(target: TargetModel, fields: dict[str, object], lengths: tuple[int, ...] = LENGTHS) -> list[Chain]:
    """Make empty chains after random texts that the partial caches hold."""
    made = []
    for number, length in enumerate(lengths):
        text = np.random.default_rng(number).integers(5, 60, length).tolist()
        params = SamplingParams(max_tokens=30, seed=number, **fields)  # type: ignore[arg-type]
        sequence = Sequence(str(number), text, params, target.vocab_size)
        full = target.new_cache(length)
        while full.length < length - 1:
            target.read(full, text[full.length : -1])
        cache = everything_of(target.cache_shape, full)
        made.append(Chain(sequence, drawing_of(target).sampler(sequence), cache, None, PLAN, 31, 20))
    return made


def drawing_of(target: TargetModel) -> BatchSampler:
    return target.forwards.new_batch_sampler()


def draw(target: TargetModel, together: list[Chain], num_rounds: int = NUM_ROUNDS) -> None:
    assert isinstance(target.forwards, NativeForwards)
    rows, samplers = [chain.row_ahead() for chain in together], [chain.sampler for chain in together]
    drawn = target.forwards.draw_chains(rows, samplers, num_rounds)  # type: ignore[arg-type]
    for chain, tokens in zip(together, drawn, strict=True):
        chain.extend(tokens, 0.5)


def round_by_round(target: TargetModel, together: list[Chain], num_rounds: int = NUM_ROUNDS) -> None:
    for _ in range(num_rounds):
        trees = [DraftTree() for _ in together]
        outputs = target.check([chain.rows(tree) for chain, tree in zip(together, trees, strict=True)])
        logits = [rows.logits for rows in outputs]
        walks = drawing_of(target).walks([chain.sampler for chain in together], trees, logits)
        for chain, walk, rows in zip(together, walks, outputs, strict=True):
            chain.advance(walk, rows)


def logits_behind(target: TargetModel, chain: Chain) -> torch.Tensor:
    [rows] = target.check([chain.rows(DraftTree())])
    return rows.logits[0].clone()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_it_draws_what_rounds_one_by_one_draw(target: TargetModel, sampler: str) -> None:
    found, expected = (opened(target, SAMPLERS[sampler]) for _ in range(2))
    draw(target, found, 5)
    assert [chain.num_bare_rounds for chain in found] == [NUM_ROUNDS - 5] * 2
    draw(target, found, NUM_ROUNDS - 5)  # after existing tokens
    round_by_round(target, expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.drawn == theirs.drawn
        assert len(ours.drawn) == len(ours.rounds) == NUM_ROUNDS
        assert not ours.wants_round
        torch.testing.assert_close(logits_behind(target, ours), logits_behind(target, theirs), atol=1e-3, rtol=1e-3)


def test_where_nothing_can_be_drawn_for_one_sequence_all_end_there(target: TargetModel) -> None:
    first, second = opened(target, SAMPLERS["T=0"])
    entries: SparseCache = second._cache  # type: ignore[assignment]
    for layer in range(target.cache_shape.num_layers):
        entries.layer(layer)[1].fill_(torch.nan)
    draw(target, [first, second])
    assert len(first.drawn) == 1
    assert first.wants_round
    assert second.drawn == []
    assert not second.wants_round
    [alone, _] = opened(target, SAMPLERS["T=0"])
    round_by_round(target, [alone], 1)
    assert first.drawn == alone.drawn


def test_what_would_reach_beyond_a_cache_or_a_sequence_is_refused(target: TargetModel) -> None:
    [chain] = opened(target, SAMPLERS["T=0"], (37,))
    row, forwards = chain.row_ahead(), target.forwards
    assert isinstance(forwards, NativeForwards)
    sampler = chain.sampler
    for rows, num_rounds, message in (
        (row, 0, "expected from 1"),
        (row, native_forwards.MOST_ROUNDS + 1, "expected from 1"),
        (row, 31, "30 tokens left"),
        (replace(row, tail_entries=np.full((1, native_forwards.BLOCK), row.first_entry)), 5, "no room for 5 rows"),
        (replace(row, first_entry=row.first_entry + 300), 5, "found"),
    ):
        with pytest.raises(ValueError, match=message):
            forwards.draw_chains([rows], [sampler], num_rounds)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="1 rows of 1 groups for 2 sequences"):
        forwards.draw_chains([row], [sampler, sampler], 5)  # type: ignore[list-item]
    draw(target, [chain], 5)  # nothing was changed
    assert len(chain.drawn) == 5
