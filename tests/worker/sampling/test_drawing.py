"""Samplers in C, torch and Triton share one contract."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from swiftbatch.jobs.run.run_records import LogprobsMode
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.sampling.batch_sampler import (
    BatchSampler,
    NativeBatchSampler,
    Sampler,
    TorchBatchSampler,
    penalised,
)
from swiftbatch.worker.sampling.cuda.cuda_sampler import CudaBatchSampler
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree, Walk
from swiftbatch.worker.sampling.sampler import TokenSampler, process
from swiftbatch.worker.sampling.sequence import Sequence
from tests.tiny_targets import numbers_as_a_gpu_has_them as numbers_as_a_gpu_has_them
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.kernels.kernel_parts import needs_kernels

pytestmark = pytest.mark.long

VOCAB = 40
PENALISED = {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.5, "penalty_window": 6}
PLAIN = {"temperature": 0.7, "top_p": 0.9}
BY_COUNTS = {"temperature": 0.9, "frequency_penalty": 0.8, "presence_penalty": -0.5}
ADJUSTED = PENALISED | {
    "frequency_penalty": 1.5,
    "presence_penalty": 0.3,
    "logit_bias": {"7": 3.0, "8": -100, "11": 1.5},
    "min_tokens": 15,
    "stop_token_ids": [7, 12],
    "bad_words": ["any"],
}
WORDS = ((8, 5), (2,), (9, 7), (7, 7, 3))
WAYS = pytest.mark.parametrize(
    "params", [ADJUSTED, PENALISED, PLAIN, BY_COUNTS], ids=["adjusted", "penalised", "plain", "by counts"]
)


@pytest.fixture(scope="module", params=[pytest.param("native", marks=needs_kernels), "torch", "triton"])
def drawing(request: pytest.FixtureRequest) -> BatchSampler:
    if request.param == "triton":
        with np.errstate(all="ignore"):
            return CudaBatchSampler(torch.zeros(NUM_ROWS, VOCAB), CheckedGraph)
    return NativeBatchSampler() if request.param == "native" else TorchBatchSampler(VOCAB, torch.device("cpu"))


def num_steps(drawing: BatchSampler, most: int) -> int:
    """Take fewer steps in the interpreter, but more than windows and `min_tokens`."""
    return 9 if isinstance(drawing, CudaBatchSampler) else most


def drawn_by(drawing: BatchSampler, sampler: Sampler, logits: torch.Tensor) -> int:
    [token_id] = drawing.walks([sampler], [DraftTree()], [logits[None]])[0].drawn
    return token_id


def sequence_with(params: dict[str, Any]) -> Sequence:
    words = WORDS if params.get("bad_words") else ()
    sequence = Sequence("a", [3, 1, 4, 1], SamplingParams(max_tokens=200, seed=5, **params), VOCAB, bad_word_ids=words)
    sequence.eos_token_ids = frozenset({0})
    return sequence


@pytest.mark.sample(4)  # once for each kind of sampler
@WAYS
def test_a_sampler_draws_behind_whatever_has_come_to_its_sequence(
    drawing: BatchSampler, params: dict[str, Any]
) -> None:
    sequence = sequence_with(params)
    sampler = drawing.sampler(sequence)
    for logits in torch.randn(num_steps(drawing, 20), 3, VOCAB, generator=torch.Generator().manual_seed(1)) * 2:
        fresh = TokenSampler(sequence, VOCAB)
        assert torch.equal(penalised(sampler, logits), fresh.penalised(logits))
        drawn = [drawn_by(drawing, sampler, logits[0]) for _ in range(2)]
        assert drawn == [fresh.draw(logits[0])] * 2
        sequence.extend([drawn[0], 7])


@pytest.mark.sample(4)  # once for each kind of sampler
@WAYS
def test_forks_of_forks_leave_a_sampler_as_it_was(drawing: BatchSampler, params: dict[str, Any]) -> None:
    sequence = sequence_with(params)
    sampler = drawing.sampler(sequence)
    num_forked = 4 if isinstance(drawing, CudaBatchSampler) else 12  # windows are full in any case
    rows = torch.randn(num_forked, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    for logits in rows:
        draft = sequence.fork()
        fork = sampler.fork(draft)
        draft.extend([9, 2])
        further = draft.fork()
        fork_of_fork = fork.fork(further)
        further.extend([8, 8, 5])
        for each, its in ((fork_of_fork, further), (fork, draft), (sampler, sequence)):
            assert drawn_by(drawing, each, logits) == TokenSampler(its, VOCAB).draw(logits)
        sequence.extend([int(logits.argmax())])


def test_walks_leave_samplers_as_they_are(drawing: BatchSampler) -> None:
    sequence = sequence_with(ADJUSTED)
    sampler = drawing.sampler(sequence)
    rows = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    tree = DraftTree([drawn_by(drawing, sampler, rows[0]), 5, 6], [ROOT, 0, 0])
    walks = [drawing.walks([sampler], [tree], [rows]) for _ in range(2)]
    assert walks[0] == walks[1]
    assert walks[0][0].path[0] == 0


def test_a_bad_word_that_begins_in_the_prompt_may_end_and_one_that_begins_behind_it_may_not(
    drawing: BatchSampler,
) -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.0, bad_words=("any",))
    sequence = Sequence("a", [3, 1], sampling, VOCAB, bad_word_ids=((1, 6), (3, 1, 6)))
    sampler, logits = drawing.sampler(sequence), torch.zeros(VOCAB)
    logits[6], logits[9] = 2.0, 1.0
    assert drawn_by(drawing, sampler, logits) == 6
    sequence.extend([1])
    assert drawn_by(drawing, sampler, logits) == 9


@pytest.mark.parametrize("params", [PLAIN, ADJUSTED, ADJUSTED | {"temperature": 0.0}])
@pytest.mark.parametrize("mode", get_args(LogprobsMode))
def test_log_probabilities_follow_from_rows_and_tokens_alone(
    drawing: BatchSampler, mode: LogprobsMode, params: dict[str, Any]
) -> None:
    sequence = sequence_with(params | {"logprobs": 4})
    sampler, plain = drawing.sampler(sequence), TokenSampler(sequence, VOCAB)
    rows = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    tree, path = DraftTree([9, 5, 6], [ROOT, 0, 1]), [0, 1, 2]
    walk = Walk(path, [9, 5, 6, 7])
    found = drawing.logprobs(sampler, tree, rows, walk, mode)
    for place, token_id in enumerate(walk.drawn):
        scores = plain.penalised(rows[place]) if mode == "processed_logprobs" else rows[place]
        if mode == "processed_logprobs" and sequence.sampling.temperature:
            scores = process(scores, sequence.sampling)
        law = torch.log_softmax(scores.double(), dim=-1)
        assert float(found.logprobs[place]) == pytest.approx(float(law[token_id]), rel=1e-5)
        np.testing.assert_allclose(found.top_logprobs[place], torch.topk(law, 4).values, rtol=1e-5)
        if place == 2 or not isinstance(drawing, CudaBatchSampler):  # the interpreter takes seconds
            alone = drawing.logprobs(sampler, DraftTree(), rows[place : place + 1].clone(), Walk([], [token_id]), mode)
            assert alone.logprobs.tobytes() == found.logprobs[place].tobytes()
            assert alone.top_logprobs.tobytes() == found.top_logprobs[place].tobytes()
            assert alone.top_ids[0].tolist() == found.top_ids[place].tolist()
        plain.push(token_id)
        sequence.extend([token_id])


@pytest.mark.parametrize("is_lower", [True, False])
def test_what_counts_take_off_is_rounded_once_everywhere(drawing: BatchSampler, is_lower: bool) -> None:
    """The product is not rounded by itself."""
    frequency, presence = np.float32(0.1), np.float32(0.7)
    counts = np.arange(1, 60)
    taken = (float(frequency) * counts + float(presence)).astype(np.float32)
    count = int(counts[taken != frequency * counts.astype(np.float32) + presence][0])
    sampling = SamplingParams(max_tokens=99, temperature=0.0, frequency_penalty=0.1, presence_penalty=0.7)
    sequence = Sequence("a", [3], sampling, VOCAB)
    sequence.extend([20] * count)
    logits, other = torch.full((VOCAB,), -1.0), 10 if is_lower else 30
    logits[20], logits[other] = float(taken[count - 1]), 0.0
    assert drawn_by(drawing, drawing.sampler(sequence), logits) == min(20, other)
