from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.sampling.batch_sampler import SplitRows, TorchBatchSampler
from swiftbatch.worker.sampling.cuda.cuda_sampler import CudaBatchSampler, SampledRows
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.token_masks import allows, mask_of
from tests.worker.forward.cuda.checked_graph import CheckedGraph

PENALISED = SamplingParams(
    max_tokens=9, seed=0, temperature=0.0, repetition_penalty=2.0, penalty_window=5, ignore_eos=True
)


def test_forks_of_one_sequence_that_draw_together_all_know_its_newest_tokens() -> None:
    drawing = CudaBatchSampler(torch.zeros(NUM_ROWS, 20), CheckedGraph)
    sequence = Sequence("a", [1, 2, 3], PENALISED, 20)
    logits = torch.zeros(1, 20)
    logits[0, 7], logits[0, 8] = 1.0, 0.9
    sampler = drawing.sampler(sequence)
    assert drawing.walks([sampler], [DraftTree()], [logits])[0].drawn == [7]
    sequence.extend([7])
    forks = [sampler.fork(sequence.fork()) for _ in range(2)]
    assert [walk.drawn for walk in drawing.walks(forks, [DraftTree()] * 2, [logits] * 2)] == [[8], [8]]


def test_where_nothing_can_be_drawn_a_walk_says_so() -> None:
    """Other drawings report it too, and a draft model may skip its NaN."""
    drawing = CudaBatchSampler(torch.zeros(NUM_ROWS, 20), CheckedGraph)
    sampler = drawing.sampler(Sequence("a", [1, 2, 3], PENALISED, 20))
    [walk] = drawing.walks([sampler], [DraftTree()], [torch.full((1, 20), float("nan"))])
    assert (walk.drawn, walk.failed_row) == ([], 0)


def test_whoever_draws_a_sequence_shares_its_counts_until_nobody_does() -> None:
    """Two places for engine and drafter would halve the number of jobs."""
    drawing = CudaBatchSampler(torch.zeros(NUM_ROWS, 20), CheckedGraph)
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
    assert drawn == [7, 8, 7]  # drawn tokens are penalised, whoever draws next: 2 and 1.5 become 1 and 0.75
    samplers.pop(0)
    assert len(drawing._free) == num_free - 2
    samplers.clear()
    assert len(drawing._free) == num_free


def test_each_row_of_a_tree_is_drawn_from_what_may_come_there() -> None:
    """An unconstrained sequence shares the step, and steps follow it."""
    drawing, chance = CudaBatchSampler(torch.zeros(NUM_ROWS, 40), CheckedGraph), random.Random(3)
    params = SamplingParams(max_tokens=60, seed=5, frequency_penalty=0.5, ignore_eos=True)
    sequences = [Sequence(name, [1, 2, 3], params, 40) for name in "ab"]
    samplers = [drawing.sampler(sequence) for sequence in sequences]
    tree = DraftTree([4, 5, 6, 7], [-1, 0, 0, 2])
    for _ in range(4):
        logits = [torch.randn(rows, 40, generator=torch.Generator().manual_seed(rows)) for rows in (5, 1)]
        words = np.stack([mask_of(tuple({4, 6, 7, *chance.sample(range(40), 3)}), 40) for _ in range(5)])
        walks = drawing.walks(samplers, [tree, DraftTree()], logits, False, [words, None])
        plain = TorchBatchSampler(40, torch.device("cpu"))
        twins = [plain.sampler(sequence) for sequence in sequences]
        assert walks == plain.walks(twins, [tree, DraftTree()], logits, False, [words, None])
        rows = [0, *(node + 1 for node in walks[0].path)]
        assert all(allows(words[row], token_id) for row, token_id in zip(rows, walks[0].drawn, strict=True))
        for sequence, walk in zip(sequences, walks, strict=True):
            sequence.extend(walk.drawn)


def test_rows_with_filters_draw_as_elsewhere_and_their_counts_stay() -> None:
    drawing, plain = (
        CudaBatchSampler(torch.zeros(NUM_ROWS, 300), CheckedGraph),
        TorchBatchSampler(300, torch.device("cpu")),
    )
    filters = ({"top_k": 5}, {"top_k": 90}, {"top_p": 0.999})
    params = [SamplingParams(max_tokens=9, seed=3, frequency_penalty=0.5, **one) for one in filters]
    sequences = [Sequence(str(number), [1, 2], each, 300) for number, each in enumerate(params)]
    samplers, twins = ([one.sampler(each) for each in sequences] for one in (drawing, plain))
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        logits = [torch.randn(1, 300, generator=generator) for _ in sequences]
        walks = drawing.walks(samplers, [DraftTree()] * 3, logits)
        assert walks == plain.walks(twins, [DraftTree()] * 3, logits)
        for sequence, walk in zip(sequences, walks, strict=True):
            sequence.extend(walk.drawn)
    graphs = (drawing._graphs._plain, drawing._graphs._filtered)
    assert [graph.num_replays for graph in graphs if isinstance(graph, CheckedGraph)] == [0, 4]


def test_a_draw_that_finds_no_memory_counts_all_tokens_when_it_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = CudaBatchSampler(torch.zeros(NUM_ROWS, 20), CheckedGraph)
    sequence = Sequence("a", [1, 2, 3], PENALISED, 20)
    logits = torch.zeros(1, 20)
    logits[0, 7], logits[0, 8] = 1.0, 0.9
    sampler = drawing.sampler(sequence)
    sequence.extend(drawing.walks([sampler], [DraftTree()], [logits])[0].drawn)

    def full(*_asked: bool) -> SampledRows:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(drawing._graphs, "replay", full)
        with pytest.raises(torch.OutOfMemoryError):
            drawing.walks([sampler], [DraftTree()], [logits])
    assert sequence.output_ids.tolist() == [7]
    assert drawing.walks([sampler], [DraftTree()], [logits])[0].drawn == [8]


def test_rows_of_a_forward_are_drawn_where_they_are_and_others_are_copied() -> None:
    forward_logits = torch.randn(10, 40, generator=torch.Generator().manual_seed(2))
    forward_logits[:3] = forward_logits[8:] = float("nan")  # other sequences' rows
    kept, elsewhere = forward_logits.clone(), forward_logits[3:8].clone()
    params = SamplingParams(max_tokens=9, seed=4, repetition_penalty=1.5, top_k=20, logprobs=2, ignore_eos=True)
    sequences = [Sequence(name, [1, 2], params, 40) for name in "ab"]
    trees = [DraftTree([5, 6], [-1, 0]), DraftTree.chain([7])]
    found = []
    for logits in (forward_logits[3:8], elsewhere):
        drawing = CudaBatchSampler(forward_logits, CheckedGraph)
        samplers, rows = [drawing.sampler(each) for each in sequences], SplitRows(logits, [3, 2])
        [first, second] = drawing.walks(samplers, trees, rows, True, logprobs_mode="processed_logprobs")
        again = drawing.logprobs(samplers[1], trees[1], rows[1], second, "processed_logprobs")
        ids, logprobs = drawing.top_candidates(logits)
        assert len(ids) == 5
        found.append(repr((first, second, again, ids, logprobs)))
        assert torch.equal(kept.view(torch.int32), forward_logits.view(torch.int32)) == (logits is not elsewhere)
    assert found[0] == found[1]
    assert "nan" not in found[0]
