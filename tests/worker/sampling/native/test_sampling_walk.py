"""Trees are walked as in `draft_tree.py`, with `engine/engine.py`'s candidates."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling import native_sampler as sampling
from swiftbatch.worker.sampling.batch_sampler import UNLIKELY, TorchBatchSampler
from swiftbatch.worker.sampling.draft_tree import ROOT, TOP_K, DraftTree, Walk, walk
from swiftbatch.worker.sampling.native_sampler import NativeSampler
from swiftbatch.worker.sampling.sampler import TokenSampler
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.kernels.kernel_parts import needs_kernels, tree_of_few_tokens
from tests.worker.sampling.native.sampling_parts import (
    INF,
    any_adjustments,
    any_mask,
    any_params,
    any_row,
    any_words,
    in_every_variant,
)

pytestmark = needs_kernels

NAN = float("nan")
VOCAB = 12


def any_rows(chance: random.Random, num_rows: int) -> torch.Tensor:
    return torch.stack([any_row(chance, VOCAB) for _ in range(num_rows)])


def drawn_chain(sequence: Sequence, logits: torch.Tensor) -> DraftTree:
    """Return all drawn tokens except the last."""
    sampler = TokenSampler(sequence, VOCAB)
    return DraftTree.chain([sampler.draw(row) for row in logits[:-1]])


def reference_walk(sequence: Sequence, tree: DraftTree, logits: torch.Tensor, masks: np.ndarray | None = None) -> Walk:
    """Use a sampler of the committed text."""
    if masks is not None:
        allowed = [[bool(words[token // 32] >> token % 32 & 1) for token in range(VOCAB)] for words in masks.tolist()]
        logits = torch.where(torch.tensor(allowed), logits, -INF)
    return walk(tree, logits, TokenSampler(sequence, VOCAB).draw)


def any_masks(chance: random.Random, tree: DraftTree) -> np.ndarray | None:
    return np.stack([any_mask(chance, VOCAB) for _ in range(len(tree) + 1)]) if chance.random() < 0.7 else None


def sequences(chance: random.Random) -> list[Sequence]:
    made = []
    for i in range(5):
        params = any_params(chance).model_copy(
            update={"max_tokens": chance.choice([2, 30]), "penalty_window": chance.choice([1, 3, 8, 1024])}
            | any_adjustments(chance, VOCAB)
        )
        prompt_ids = [chance.randrange(VOCAB) for _ in range(chance.choice([1, 4, 20]))]
        made.append(Sequence(str(i), prompt_ids, params, VOCAB, bad_word_ids=any_words(chance, params, VOCAB)))
        made[-1].eos_token_ids = frozenset({VOCAB - 1, VOCAB + 5})
    return made


@pytest.mark.parametrize("seed", range(3))
def test_walks_of_many_sequences_are_those_of_each_alone(seed: int) -> None:
    for _ in in_every_variant():
        chance = random.Random(seed)
        running = sequences(chance)
        samplers = [NativeSampler(sequence) for sequence in running]
        for _ in range(8):
            trees = [tree_of_few_tokens(chance, 40, VOCAB) for _ in running]
            logits = [any_rows(chance, len(tree) + 1) for tree in trees]
            trees[0] = drawn_chain(running[0], logits[0])
            masks = [any_masks(chance, tree) for tree in trees]
            expected = [reference_walk(*one) for one in zip(running, trees, logits, masks, strict=True)]
            walks = sampling.walk(samplers, trees, logits, masks)
            assert walks == expected
            for sequence, one in zip(running, walks, strict=True):
                num_kept = chance.randrange(len(one.drawn)) + 1  # nothing after a stop string is committed
                sequence.extend(one.drawn[: min(num_kept, sequence.num_remaining_tokens)])


def chain_rows(*best: int) -> torch.Tensor:
    """Return rows that each draw one token, `[len(best), VOCAB]`."""
    return torch.full((len(best), VOCAB), -INF).scatter(1, torch.tensor(best)[:, None], 0.0)


def sampler_for(length: int = 3, **params: float) -> NativeSampler:
    settings = SamplingParams(max_tokens=20, seed=1, **params)  # type: ignore[arg-type]
    return NativeSampler(Sequence("s", list(range(length)), settings, VOCAB))


def walked(logits: torch.Tensor, tree: DraftTree) -> Walk:
    return sampling.walk([sampler_for()], [tree], [logits])[0]


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_row_that_nothing_can_be_drawn_from_ends_the_walk_in_front_of_it(value: float) -> None:
    logits, tree = chain_rows(5, 6, 7, 8), DraftTree([5, 6, 1], [ROOT, 0, ROOT])
    logits[2, 3] = value
    logits[3] = NAN  # is not walked
    for _ in in_every_variant():
        assert walked(logits, tree) == Walk([0, 1], [5, 6], 2)


def test_a_row_of_masked_tokens_alone_fails() -> None:
    for _ in in_every_variant():
        assert walked(torch.full((1, VOCAB), -INF), DraftTree()) == Walk([], [], 0)


def test_a_fork_sees_its_own_tokens_and_leaves_the_sampler_as_it_was() -> None:
    for _ in in_every_variant():
        sampler = sampler_for(repetition_penalty=2.0)
        draft = sampler.sequence.fork()
        fork = sampler.fork(draft)
        draft.extend([7, 8, 7])
        assert np.array_equal(fork.counts(), np.bincount([0, 1, 2, 7, 8, 7], minlength=VOCAB))  # type: ignore[arg-type]
        assert np.array_equal(sampler.counts(), np.bincount([0, 1, 2], minlength=VOCAB))  # type: ignore[arg-type]
        assert sampling.walk([fork], [DraftTree()], [chain_rows(5)])[0].drawn == [5]


def test_shapes_that_do_not_fit_are_refused() -> None:
    sampler, other = sampler_for(), NativeSampler(Sequence("t", [1], SamplingParams(max_tokens=1), VOCAB + 1))
    tree = DraftTree.chain([1, 2])
    for logits in (torch.zeros(2, VOCAB), torch.zeros(3, VOCAB + 1), torch.zeros(3, VOCAB, dtype=torch.float64)):
        with pytest.raises(ValueError, match="expected"):
            sampling.walk([sampler], [tree], [logits])
    with pytest.raises(ValueError, match="different vocabularies"):
        sampling.walk([sampler, other], [DraftTree()] * 2, [torch.zeros(1, VOCAB), torch.zeros(1, VOCAB + 1)])
    with pytest.raises(ValueError, match="inhomogeneous"):
        sampling.walk([sampler], [DraftTree([1, 2], [ROOT])], [torch.zeros(3, VOCAB)])
    assert sampling.walk([], [], []) == []


def test_a_sequence_that_has_become_shorter_is_refused() -> None:
    sampler = sampler_for(5, repetition_penalty=2.0)
    sampler.counts()
    sampler.sequence = Sequence("s", [1], sampler.sequence.sampling, VOCAB)
    with pytest.raises(ValueError, match="has 1 tokens; expected at least the 5"):
        sampler.counts()


@pytest.mark.parametrize("vocab_size", [8, 15, 16, 100, 1024, 4096, 5003])
def test_candidates_are_the_best_eight_of_every_row(vocab_size: int) -> None:
    logits = torch.randn(20, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    logits[1:9] = logits[1:9].round()  # ties
    logits[2, 5:] = -INF
    expected_ids, expected_logprobs = TorchBatchSampler(logits.shape[1], logits.device).top_candidates(logits)
    bits = set()
    for _ in in_every_variant():
        ids, logprobs = sampling.top_candidates(logits)
        untied = [0, *range(9, 20)]
        assert np.array_equal(ids[untied], expected_ids[untied])
        assert np.array_equal(ids, np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :TOP_K])
        assert np.allclose(logprobs, expected_logprobs, rtol=0, atol=4e-6)
        bits.add(logprobs.tobytes())
    assert len(bits) == 1  # in every instruction set


def test_candidates_of_rows_that_are_not_finite_are_unlikely() -> None:
    logits = torch.zeros(4, 40)
    logits[0, 17], logits[1, 3], logits[1, 30] = NAN, INF, -INF
    logits[2] = -INF
    logits[3, 39] = NAN
    expected = TorchBatchSampler(logits.shape[1], logits.device).top_candidates(logits)[1]
    for _ in in_every_variant():
        ids, logprobs = sampling.top_candidates(logits)
        assert np.array_equal(logprobs, expected)
        assert (logprobs[0] == UNLIKELY).all()
        assert [ids[0, 0], ids[1, 0], ids[3, 0]] == [17, 3, 39]


def test_candidates_of_rows_side_by_side_with_something_else() -> None:
    wide = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    for _ in in_every_variant():
        alone = sampling.top_candidates(wide[:, :40].contiguous())
        assert all(map(np.array_equal, sampling.top_candidates(wide[:, :40]), alone))
    for misshapen in (torch.zeros(3, 7), torch.zeros(8), torch.zeros(40, 3).T):
        with pytest.raises(ValueError, match="expected"):
            sampling.top_candidates(misshapen)
