"""What a GPU's drawing keeps of sequences between steps."""

from __future__ import annotations

import torch

from jobs.sampling import SamplingParams
from tests.worker.target.cuda.checked_graph import CheckedGraph
from worker.sequence import Sequence
from worker.target.cuda.drawing import CudaDrawing
from worker.tree import DraftTree

PENALISED = SamplingParams(
    max_tokens=9, seed=0, temperature=0.0, repetition_penalty=2.0, penalty_window=5, ignore_eos=True
)


def test_forks_of_one_sequence_that_draw_together_all_know_its_newest_tokens() -> None:
    drawing = CudaDrawing(20, torch.device("cpu"), CheckedGraph)
    sequence = Sequence("a", [1, 2, 3], PENALISED, 20)
    logits = torch.zeros(1, 20)
    logits[0, 7], logits[0, 8] = 1.0, 0.9
    sampler = drawing.sampler(sequence)
    assert drawing.walks([sampler], [DraftTree()], [logits])[0].drawn == [7]
    sequence.extend([7])
    forks = [sampler.fork(sequence.fork()) for _ in range(2)]
    assert [walk.drawn for walk in drawing.walks(forks, [DraftTree()] * 2, [logits] * 2)] == [[8], [8]]


def test_a_draft_model_s_nan_draws_some_token() -> None:
    sampler = CudaDrawing(20, torch.device("cpu"), CheckedGraph).sampler(Sequence("a", [1, 2, 3], PENALISED, 20))
    assert 0 <= sampler.draw(torch.full((20,), float("nan"))) < 20
