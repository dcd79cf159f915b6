from __future__ import annotations

import numpy as np
import pytest
import torch

from swiftbatch.worker.sampling.batch_sampler import UNLIKELY, TorchBatchSampler
from swiftbatch.worker.sampling.cuda.sampling_rows import BLOCK, NUM_WORDS
from swiftbatch.worker.sampling.cuda.top_candidates import TopCandidates
from swiftbatch.worker.sampling.draft_tree import TOP_K
from tests.worker.sampling.cuda.draw_parts import padding_rows
from tests.worker.sampling.native.sampling_parts import INF

NAN = float("nan")


def buffers_of(logits: torch.Tensor, padding: tuple[int, ...] = ()) -> tuple[torch.Tensor, ...]:
    rows = padding_rows(len(logits))
    rows["slot"] = 0
    rows["slot"][list(padding)] = -1
    return (
        logits,
        torch.from_numpy(rows.view(np.int32).reshape(len(rows), NUM_WORDS)),
        torch.full((len(rows), TOP_K), 12345, dtype=torch.int32),
        torch.full((len(rows), TOP_K), 12345.0),
    )


def candidates_of(logits: torch.Tensor, padding: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    buffers = buffers_of(logits, padding)
    TopCandidates(*buffers).launch()
    return buffers[2].numpy(), buffers[3].numpy()


def any_logits(vocab_size: int) -> torch.Tensor:
    logits = torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    logits[1:5] = logits[1:5].round()  # ties
    logits[2, 5:] = -INF
    logits[5] *= 1e30
    return logits


@pytest.mark.parametrize("vocab_size", [8, 100, BLOCK, 2 * BLOCK + 37])
def test_candidates_are_the_best_eight_of_every_row(vocab_size: int) -> None:
    logits = any_logits(vocab_size)
    ids, logprobs = candidates_of(logits)
    expected_ids, expected_logprobs = TorchBatchSampler(vocab_size, logits.device).top_candidates(logits)
    untied = [0, *range(5, 12)]
    assert np.array_equal(ids[untied], expected_ids[untied])
    assert np.array_equal(ids, np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :TOP_K])
    assert np.allclose(logprobs, expected_logprobs, rtol=0, atol=4e-6)


def test_candidates_of_rows_that_are_not_finite_are_unlikely() -> None:
    logits = torch.zeros(5, BLOCK + 100)
    logits[0, 17], logits[1, 3], logits[1, 30] = NAN, INF, -INF
    logits[2] = -INF
    logits[3, BLOCK + 9] = -NAN
    logits[4, :BLOCK] = -INF  # nothing in a whole block
    ids, logprobs = candidates_of(logits)
    assert np.array_equal(logprobs[:4], TorchBatchSampler(logits.shape[1], logits.device).top_candidates(logits)[1][:4])
    assert (logprobs[0] == UNLIKELY).all()
    assert [ids[0, 0], ids[1, 0], ids[3, 0]] == [17, 3, BLOCK + 9]
    assert ids[4].tolist() == list(range(BLOCK, BLOCK + TOP_K))
    assert logprobs[4] == pytest.approx(-np.log(100), abs=4e-6)


def test_candidates_of_a_row_are_the_same_alone_and_in_company() -> None:
    logits = any_logits(BLOCK + 50)
    ids, logprobs = candidates_of(logits)
    logits[:] = logits.flip(0)
    logits[7], logits[8, 3] = NAN, INF
    others = candidates_of(logits, padding=(7,))
    kept = [11 - i for i in range(12) if i not in (7, 8)]
    for place in kept:
        assert np.array_equal(others[0][11 - place], ids[place])
        assert np.array_equal(others[1][11 - place], logprobs[place])
    assert (others[1][7] == UNLIKELY).all()
    assert (others[0][7] == 0).all()


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="found 7 tokens, expected 8 to"):
        TopCandidates(*buffers_of(torch.zeros(2, 7)))
