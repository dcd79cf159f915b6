"""Log-probabilities on the device are those of worker/sampling/batch_sampler.py in float64."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from swiftbatch.jobs.logprobs import NO_TOKEN, TokenLogprobs
from swiftbatch.jobs.run.run_records import LogprobsMode
from swiftbatch.jobs.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.sampling.batch_sampler import TorchBatchSampler, row_logprobs
from swiftbatch.worker.sampling.cuda import cuda_sampler
from swiftbatch.worker.sampling.cuda.cuda_sampler import CudaBatchSampler, Draw
from swiftbatch.worker.sampling.cuda.logprob_kernels import RowLogprobs
from swiftbatch.worker.sampling.cuda.sampling_rows import BLOCK, FILTERED, NO_LOGPROBS, PROCESSED, RAW, column_of
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.logits_processors import only_allowed
from swiftbatch.worker.sampling.sampler import TokenSampler, process
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.sampling.cuda.draw_parts import NAN, Branch, any_branch, plain, step_of
from tests.worker.sampling.native.sampling_parts import INF


def reported(branches: list[Branch | None], kinds: list[int], tokens: list[int] | None = None) -> TokenLogprobs:
    """Draw, and return log-probabilities of drawn tokens or of `tokens`; rows that ask for none keep 12345."""
    buffers, num_rows = step_of(branches), len(branches)
    buffers.rows[:, column_of("logprobs")] = torch.tensor(kinds, dtype=torch.int32)
    buffers.rows[:, column_of("token")] = torch.tensor(tokens or [-1] * num_rows, dtype=torch.int32)
    draw = Draw(buffers)
    draw.launch(is_filtered=FILTERED in kinds)
    found = torch.full((num_rows, 1 + 2 * MAX_TOP_LOGPROBS), 12345, dtype=torch.int32)
    RowLogprobs(buffers.logits, buffers.rows, draw.scores, draw.peaks, draw.cuts.ranks).launch(buffers.tokens, found)
    return TokenLogprobs(found.numpy())


def assert_equal(found: TokenLogprobs, place: int, scores: torch.Tensor, token_id: int) -> None:
    logprob, ids, top = row_logprobs(scores, token_id, MAX_TOP_LOGPROBS)
    assert found.top_ids[place].tolist() == ids.tolist()
    assert float(found.logprobs[place]) == pytest.approx(logprob, rel=2e-7, abs=1e-12)
    np.testing.assert_allclose(found.top_logprobs[place], top, rtol=2e-7, atol=1e-12)


@pytest.mark.parametrize("vocab_size", [3, 2 * BLOCK + 37])
def test_raw_ones_are_those_of_float64_and_of_equals_the_first_comes_first(vocab_size: int) -> None:
    rows = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    rows[1] = rows[1].round()
    rows[2], rows[3, :-1], rows[4, 1], rows[5, 0], rows[6] = 0.0, -INF, NAN, INF, -INF
    rows[7] += 100.0
    rows[8] *= 1e4
    tokens = [vocab_size - 1] * 9
    branches: list[Branch | None] = [Branch(any_branch(random.Random(1), plain()).sequence, [], row) for row in rows]
    found = reported([*branches, None], [RAW] * 9 + [NO_LOGPROBS], [*tokens, -1])
    for place, row in enumerate(rows):
        assert_equal(found, place, row, tokens[place])
    assert found.top_ids[2].tolist() == (list(range(20)) if vocab_size > 20 else [0, 1, 2] + [NO_TOKEN] * 17)
    assert (found.numbers[-1] == 12345).all()


@pytest.mark.parametrize("seed", range(2))
def test_processed_ones_are_of_what_the_token_was_drawn_from(seed: int) -> None:
    """Rows without filters share the step, whose cuts are not theirs."""
    chance, branches, kinds = random.Random(seed), list[Branch | None](), list[int]()
    for number in range(12):
        settings = {"temperature": chance.choice([0.0, 0.6, 1.3]), "repetition_penalty": chance.choice([1.0, 1.3])}
        is_filtered = number % 3 == 0
        given = {"top_k": 40, "top_p": 0.95, "min_p": 0.01} if is_filtered else {"min_p": chance.choice([0.0, 0.05])}
        branches.append(any_branch(chance, plain(**settings, **given)))
        kinds.append(FILTERED if is_filtered else PROCESSED)
    found = reported(branches, kinds)
    for place, branch in enumerate(branches):
        assert branch is not None
        sampler = TokenSampler(branch.sequence, len(branch.logits))
        for token_id in branch.path_ids:
            sampler.push(token_id)
        allowed = branch.logits if branch.allowed is None else only_allowed(branch.logits, branch.allowed)
        scores = sampler.penalised(allowed)
        if branch.sequence.sampling.temperature > 0.0:
            scores = process(scores, branch.sequence.sampling)
        assert_equal(found, place, scores, branch.expected())


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_walks_have_them_from_the_step_s_one_copy_whatever_the_number_of_jobs(
    mode: LogprobsMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = list[int]()
    wait = cuda_sampler.Download.wait
    monkeypatch.setattr(cuda_sampler.Download, "wait", lambda self: copies.append(1) or wait(self))
    vocab_size = 60
    drawing = CudaBatchSampler(torch.zeros(NUM_ROWS, vocab_size), CheckedGraph)
    torch_drawing = TorchBatchSampler(vocab_size, torch.device("cpu"))
    params = SamplingParams(max_tokens=30, seed=3, logprobs=5, frequency_penalty=0.5, ignore_eos=True)
    quiet = params.model_copy(update={"logprobs": None})
    sequences = [Sequence(str(i), [1, 2, i], quiet if i == 3 else params, vocab_size) for i in range(8)]
    samplers, twins = ([each.sampler(one) for one in sequences] for each in (drawing, torch_drawing))
    trees = [DraftTree([7, 8, 9], [-1, 0, 0]), *(DraftTree() for _ in sequences[1:])]
    logits = [torch.randn(1 + len(tree), vocab_size, generator=torch.Generator().manual_seed(5)) for tree in trees]
    logits[0][0, 7] = 50.0  # drawn, so that the walk goes on
    walks = drawing.walks(samplers, trees, logits, logprobs_mode=mode)
    assert copies == [1]
    expected = torch_drawing.walks(twins, trees, logits, logprobs_mode=mode)
    assert walks[3].logprobs is None is expected[3].logprobs
    assert len(walks[0].drawn) > 1
    for number, (walk, other) in enumerate(zip(walks, expected, strict=True)):
        assert (walk.path, walk.drawn) == (other.path, other.drawn)
        if number != 3:
            assert walk.logprobs is not None
            assert other.logprobs is not None
            assert walk.logprobs.top_ids.tolist() == other.logprobs.top_ids.tolist()
            np.testing.assert_allclose(walk.logprobs.logprobs, other.logprobs.logprobs, rtol=2e-7, atol=1e-12)
            known = drawing.logprobs(samplers[number], trees[number], logits[number], walk, mode)
            assert known.top_logprobs.tobytes() == walk.logprobs.top_logprobs.tobytes()
            assert known.logprobs.tobytes() == walk.logprobs.logprobs.tobytes()
