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


def test_where_nothing_can_be_drawn_a_walk_says_so() -> None:
    """As drawings elsewhere do: a draft model's NaN is theirs to pass over."""
    drawing = CudaDrawing(20, torch.device("cpu"), CheckedGraph)
    sampler = drawing.sampler(Sequence("a", [1, 2, 3], PENALISED, 20))
    [walk] = drawing.walks([sampler], [DraftTree()], [torch.full((1, 20), float("nan"))])
    assert (walk.drawn, walk.failed_row) == ([], 0)


def test_whoever_draws_a_sequence_shares_its_counts_until_nobody_does() -> None:
    """Engine and drafter both do, from one drawing: a place for each of them would halve the jobs that there may be."""
    drawing = CudaDrawing(20, torch.device("cpu"), CheckedGraph)
    num_free = len(drawing._free)
    sequence, other = (Sequence(name, [1, 2, 3], PENALISED, 20) for name in "ab")
    samplers = [drawing.sampler(sequence), drawing.sampler(sequence), drawing.sampler(other)]
    assert len({sampler.counts.slot for sampler in samplers}) == 2
    logits = torch.zeros(1, 20)
    logits[0, 7], logits[0, 8] = 2.0, 1.5
    drawn = []
    for number in (0, 1, 0):
        [walk] = drawing.walks([samplers[number]], [DraftTree()], [logits])
        drawn += walk.drawn
        sequence.extend(walk.drawn)
    assert drawn == [7, 8, 7]  # what was drawn is penalised, whoever draws next: 2 and 1.5 become 1 and 0.75
    samplers.pop(0)
    assert len(drawing._free) == num_free - 2
    samplers.clear()
    assert len(drawing._free) == num_free
