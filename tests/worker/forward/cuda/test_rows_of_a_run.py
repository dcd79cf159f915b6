"""Forwards of 128 or 256 rows have plain decoding's tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.variants import create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.step_costs import StepCosts
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import known_rows
from swiftbatch.worker.kernels.gpu_kernel_choice import DEFAULT_KERNELS
from swiftbatch.worker.kernels.kernel_sizes import MOST_SLOTS, NUM_ROWS, ROW_CHOICES
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.cuda.cuda_sampler import CudaBatchSampler
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.forward.cuda.cuda_parts import cuda_target

pytestmark = pytest.mark.long

NUM_JOBS, NUM_TOKENS = MOST_SLOTS + 1, 2
PROMPT = 2


def job(number: int, vocab_size: int, penalty: float = 0.7) -> Sequence:
    prompt = [(7 * number + 3 * each) % 50 + 5 for each in range(PROMPT + number % 3)]
    drawn = {"temperature": 0.9, "frequency_penalty": penalty, "seed": number}
    params = SamplingParams.model_validate({"max_tokens": NUM_TOKENS, "ignore_eos": True, **drawn})
    return Sequence(str(number), prompt, params, vocab_size)


def tokens(target: TargetModel, engine_name: str, numbers: range) -> dict[int, list[int]]:
    engine = Engine(target, create_bench_drafter(engine_name, target, lambda: wide_rows(target)))
    jobs = {number: job(number, target.vocab_size) for number in numbers}
    for each in jobs.values():
        engine.start(each)
    while any(each.finish_reason is None for each in jobs.values()):
        engine.step()
    for each in jobs.values():
        engine.stop(each)
    return {number: each.output_ids.tolist() for number, each in jobs.items()}


def wide_rows(target: TargetModel) -> StepCosts:
    return replace(free_rows(), rows_per_forward=target.forwards.rows_per_forward)


@pytest.mark.parametrize("num_rows", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_more_jobs_than_a_narrow_run_takes_have_plain_decoding_s_tokens(files: ModelFiles, num_rows: int) -> None:
    """A step is one forward and one draw."""
    target = cuda_target(files, torch.bfloat16, NUM_JOBS, 40, num_rows=num_rows)
    replayed = noted_replays(target)
    together = tokens(target, "token-recycling", range(NUM_JOBS))
    assert replayed[-2:] == ["forward of 64 rows", "draw"]
    alone = cuda_target(files, torch.bfloat16, 1, 40, num_rows=num_rows)
    last = NUM_JOBS - 1
    assert tokens(alone, "autoregressive", range(last, NUM_JOBS)) == {last: together[last]}
    narrow = cuda_target(files, torch.bfloat16, 1, 40)
    assert tokens(narrow, "autoregressive", range(last, NUM_JOBS)) == {last: together[last]}
    assert target.forwards.numerics == narrow.forwards.numerics


def test_products_of_cublas_name_their_rows(files: ModelFiles) -> None:
    wide, narrow = (
        cuda_target(files, torch.float32, 1, 40, linear="cublas", num_rows=number).forwards for number in (128, 64)
    )
    assert (wide.narrow_rows, wide.numerics) == ((), f"{narrow.numerics}, 128 rows")


def test_a_forward_is_as_wide_as_its_rows_need_and_has_the_bits_of_any_other(files: ModelFiles) -> None:
    wide, narrow = (cuda_target(files, torch.bfloat16, 3, 300, num_rows=number) for number in (256, 64))
    replayed, text = noted_replays(wide), [7 * each % 50 + 5 for each in range(200)]
    for number, rows in ((3, 64), (70, 128), (200, 256)):
        replayed.clear()
        found, expected = (
            target.forwards.run(known_rows(target.new_cache(300), text[:number]))[1].clone()
            for target in (wide, narrow)
        )
        assert torch.equal(found, expected)
        assert replayed == [f"forward of {rows} rows"]


def noted_replays(target: TargetModel) -> list[str]:
    replayed: list[str] = []
    forwards: Any = target.forwards
    graphs = [(f"forward of {each.num_rows} rows", each.graph) for each in forwards._captured]
    draws = forwards._batch_sampler._graphs
    graphs += [("draw", graph) for graph in (draws._plain, draws._plain_with_candidates)]
    for name, graph in graphs:
        graph.replay = functools.partial(noted, replayed, name, graph.replay)
    return replayed


def noted(replayed: list[str], name: str, replay: Callable[[], None]) -> None:
    replayed.append(name)
    replay()


def test_verdicts_are_kept_by_rows_but_for_the_number_of_all_older_runs() -> None:
    words = [replace(DEFAULT_KERNELS, num_rows=num_rows).words for num_rows in ROW_CHOICES]
    assert "rows" not in words[0]
    assert [each.removeprefix(words[0]) for each in words[1:]] == [", 128 rows", ", 256 rows"]


@pytest.mark.parametrize("num_rows", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_a_table_of_draws_has_as_many_rows_as_a_forward_and_the_tokens_of_smaller_tables(num_rows: int) -> None:
    vocab = 64
    wide, narrow = (CudaBatchSampler(torch.zeros(each, vocab), CheckedGraph) for each in (num_rows, NUM_ROWS))
    logits = list(torch.randn(num_rows, 1, vocab, generator=torch.Generator().manual_seed(4)))
    jobs = [job(number, vocab, 0.7 if number < MOST_SLOTS else 0.0) for number in range(num_rows)]
    waits: list[str] = []
    wait = wide._graphs._download.wait
    wide._graphs._download.wait = lambda: (waits.append("table"), wait())[1]  # type: ignore[method-assign]
    found, expected = (
        drawing.walks([drawing.sampler(each) for each in jobs], [DraftTree()] * num_rows, logits)
        for drawing in (wide, narrow)
    )
    assert found == expected
    assert waits == ["table"]


def test_with_more_rows_more_jobs_may_have_penalties_at_a_time() -> None:
    drawing = CudaBatchSampler(torch.zeros(128, 64), CheckedGraph)
    samplers = [drawing.sampler(job(number, 64)) for number in range(128)]
    assert len({sampler.counts.slot for sampler in samplers}) == 128
    with pytest.raises(RuntimeError, match="more than 128 sequences"):
        drawing.sampler(job(128, 64))
