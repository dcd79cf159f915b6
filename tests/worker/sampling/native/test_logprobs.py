"""Log-probabilities in C have float64's values and equal bits everywhere."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from swiftbatch.jobs.logprobs import NO_TOKEN, TokenLogprobs
from swiftbatch.jobs.run.run_records import LogprobsMode
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.batch_sampler import NativeBatchSampler, TorchBatchSampler
from swiftbatch.worker.sampling.draft_tree import DraftTree, Walk
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.kernels.kernel_parts import needs_kernels, tree_of_few_tokens
from tests.worker.sampling.native.sampling_parts import INF, any_row, in_every_variant
from tests.worker.sampling.native.test_sampling_walk import VOCAB, any_rows, sequences

pytestmark = needs_kernels

NUM_TOP = 5
MODES: list[LogprobsMode] = ["raw_logprobs", "processed_logprobs"]
RAW, PROCESSED = MODES


def asking(vocab_size: int, num_top: int = NUM_TOP, **params: object) -> Sequence:
    sampling = SamplingParams.model_validate({"max_tokens": 40, "seed": 3, "logprobs": num_top} | params)
    return Sequence("a", [1], sampling, vocab_size)


def of_row(row: torch.Tensor, token_id: int, mode: LogprobsMode = RAW, **params: object) -> TokenLogprobs:
    sequence, drawing = asking(len(row), **params), NativeBatchSampler()
    return drawing.logprobs(drawing.sampler(sequence), DraftTree(), row[None], Walk([], [token_id]), mode)


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 64, 65, 1000, 4096])
def test_raw_ones_are_those_of_float64_with_the_same_bits_everywhere(vocab_size: int) -> None:
    chance = random.Random(vocab_size)
    cases = [(any_row(chance, vocab_size), chance.randrange(vocab_size)) for _ in range(40)]
    found = [[of_row(*case) for case in cases] for _ in in_every_variant()]
    for number, (row, token_id) in enumerate(cases):
        exact = torch.log_softmax(row.double(), dim=-1).numpy()
        first = found[0][number]
        assert first.logprobs[0] == pytest.approx(exact[token_id], rel=2e-7, abs=1e-12)
        order = np.argsort(-row.numpy(), kind="stable")[:NUM_TOP]
        order = order[np.isfinite(exact[order])]
        assert first.top_ids[0].tolist() == order.tolist() + [NO_TOKEN] * (NUM_TOP - len(order))
        np.testing.assert_allclose(first.top_logprobs[0, : len(order)], exact[order], rtol=2e-7, atol=1e-12)
        assert all(same(first, other[number]) for other in found[1:])


def same(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    return all(
        getattr(one, name).tobytes() == getattr(other, name).tobytes()
        for name in ("logprobs", "top_ids", "top_logprobs")
    )


@pytest.mark.parametrize("seed", range(3))
def test_processed_ones_are_those_of_what_is_drawn_from_along_the_walk(seed: int) -> None:
    """Torch's differ only in rounding if they keep the same tokens."""
    chance = random.Random(seed)
    num_compared = 0
    for _ in range(12):
        for made in sequences(chance):
            sampling = made.sampling.model_copy(update={"logprobs": NUM_TOP, "eta": 0.0, "min_p": 0.0})
            words = made.bad_word_ids
            sequence = Sequence("a", made.token_ids.tolist(), sampling, VOCAB, bad_word_ids=words)
            sequence.eos_token_ids = made.eos_token_ids
            tree = tree_of_few_tokens(chance, 40, VOCAB)
            rows = any_rows(chance, len(tree) + 1).clamp(-1e4, 1e4)
            native, plain = NativeBatchSampler(), TorchBatchSampler(VOCAB, torch.device("cpu"))
            [walk] = native.walks([native.sampler(sequence)], [tree], [rows])
            if walk.failed_row is not None or sampling.temperature < 1e-6:
                continue
            for mode in MODES:
                ours = native.logprobs(native.sampler(sequence), tree, rows, walk, mode)
                theirs = plain.logprobs(plain.sampler(sequence), tree, rows, walk, mode)
                for place in range(len(walk.drawn)):
                    if (ours.top_ids[place] == NO_TOKEN).sum() != (theirs.top_ids[place] == NO_TOKEN).sum():
                        continue  # the filters' own cuts round differently
                    num_compared += 1
                    for name in ("logprobs", "top_logprobs"):
                        one, other = getattr(ours, name)[place], getattr(theirs, name)[place]
                        np.testing.assert_allclose(one, other, rtol=3e-4, atol=3e-4)
    assert num_compared > 100


def test_a_row_s_are_the_same_whatever_else_is_in_its_tree() -> None:
    rows = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * 3
    drawing, tree = NativeBatchSampler(), DraftTree([7, 8, 9, 10, 11], [-1, 0, -1, 2, 3])
    for mode in MODES:
        sequence = asking(300, temperature=0.7, top_p=0.9, frequency_penalty=0.5)
        found = drawing.logprobs(drawing.sampler(sequence), tree, rows, Walk([2, 3, 4], [9, 10, 11, 2]), mode)
        for number, (row, token_id) in enumerate(zip((0, 3, 4, 5), (9, 10, 11, 2), strict=True)):
            walk = Walk([], [token_id])
            alone = drawing.logprobs(drawing.sampler(sequence), DraftTree(), rows[row : row + 1].clone(), walk, mode)
            assert same(alone, found.part(number, number + 1))
            sequence.extend([token_id])


def test_what_cannot_come_is_no_token_and_the_drawn_one_among_others_always_has_its_own() -> None:
    row = torch.tensor([1.0, -INF, 3.0, 2.0, -INF, -INF])
    found = of_row(row, 0)
    assert found.top_ids.tolist() == [[2, 3, 0, NO_TOKEN, NO_TOKEN]]
    assert found.top_logprobs[0, 3:].tolist() == [-INF, -INF]
    assert of_row(row, 1).logprobs.tolist() == [-INF]
    cut = of_row(row, 2, PROCESSED, top_k=1)
    assert (cut.top_ids[0, :2].tolist(), cut.logprobs.tolist()) == ([2, NO_TOKEN], [0.0])
    greedy = of_row(row, 2, PROCESSED, temperature=0.0, logit_bias={"3": 100})
    assert (greedy.top_ids[0, 0], greedy.logprobs[0] < -90) == (3, True)
    nothing = of_row(row, 0, PROCESSED, logit_bias={str(i): -100 for i in range(6)}, num_top=0)
    assert nothing.top_ids.shape == (1, 0)


def test_where_no_token_is_left_nothing_is_likely() -> None:
    sampling = SamplingParams(max_tokens=4, seed=1, logprobs=2, bad_words=("any",))
    sequence = Sequence("a", [1], sampling, 3, bad_word_ids=((0,), (1,), (2,)))
    drawing = NativeBatchSampler()
    found = drawing.logprobs(drawing.sampler(sequence), DraftTree(), torch.zeros(1, 3), Walk([], [0]), PROCESSED)
    assert (found.logprobs.tolist(), found.top_ids.tolist()) == ([-INF], [[NO_TOKEN, NO_TOKEN]])


def test_of_equals_the_first_comes_first() -> None:
    assert of_row(torch.zeros(40), 39).top_ids.tolist() == [[0, 1, 2, 3, 4]]
