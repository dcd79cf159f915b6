"""Plain steps that a GPU takes without the host have the tokens of steps that wait for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.variants import create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.engine.engine import Engine, PlainRuns
from swiftbatch.worker.engine.prefill import Slot
from swiftbatch.worker.forward.cuda.cuda_forwards import CapturedForward
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import SequenceRows
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.forward.cuda.cuda_parts import cuda_target

pytestmark = pytest.mark.long
NUM_STEPS = 4
LENGTHS = (3, BLOCK - 1, 2 * BLOCK - 2)  # of prompts; the steps of two of them end one block and begin another
NUM_TOKENS = (9, 6, 11)


@pytest.fixture(scope="module")
def files(one_layer_model: Path) -> ModelFiles:
    return locate_model(str(one_layer_model))


@pytest.fixture
def target(files: ModelFiles) -> TargetModel:
    return cuda_target(files, torch.bfloat16, len(LENGTHS), 200)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine ask for several steps, which the interpreter is too slow for."""

    def most_steps(self: PlainRuns, slots: list[Slot]) -> int:
        return min(NUM_STEPS, *(slot.sequence.num_remaining_tokens for slot in slots))

    monkeypatch.setattr(PlainRuns, "most_steps", most_steps)


def job(number: int, vocab_size: int, **params: Any) -> Sequence:
    prompt = [(7 * number + 3 * each) % 50 + 5 for each in range(LENGTHS[number])]
    drawn = {"max_tokens": NUM_TOKENS[number], "temperature": 0.9, "seed": number, "ignore_eos": True, **params}
    return Sequence(str(number), prompt, SamplingParams.model_validate(drawn), vocab_size)


def run(target: TargetModel, jobs: list[Sequence]) -> tuple[dict[str, list[int]], int]:
    """Return tokens by job, and how often the host waited for drawn tokens."""
    engine, sampler = Engine(target, create_bench_drafter("autoregressive", target, free_rows)), target.forwards
    drawing: Any = sampler.new_batch_sampler()
    waits = list[str]()
    for download in (drawing._graphs._download, drawing._download_ahead):
        wait = type(download).wait
        download.wait = lambda own=download, wait=wait: (waits.append(""), wait(own))[1]
    for each in jobs:
        engine.start(each)
    while running := [each for each in jobs if each.finish_reason is None]:
        engine.step()
        for each in running:
            if each.finish_reason is not None:
                engine.stop(each)
    for each in jobs:
        assert each.error is None
    return {each.sequence_id: each.output_ids.tolist() for each in jobs}, len(waits)


def test_they_have_the_tokens_of_single_steps_and_the_host_waits_once_for_several(
    target: TargetModel, files: ModelFiles, ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job(number, target.vocab_size) for number in range(3)]
    found, num_waits = run(target, jobs)
    with monkeypatch.context() as patch:
        patch.setattr(PlainRuns, "most_steps", lambda self, slots: 1)
        single = cuda_target(files, torch.bfloat16, len(LENGTHS), 200)
        expected, num_single = run(single, [job(number, target.vocab_size) for number in range(3)])
    assert found == expected
    assert num_waits <= num_single // 2


def test_a_job_that_ends_among_them_keeps_nothing_from_behind_its_end(target: TargetModel, ahead: None) -> None:
    whole, _ = run(target, [job(number, target.vocab_size) for number in range(2)])
    end = whole["0"][5]
    stop = whole["0"].index(end)
    found, _ = run(target, [job(0, target.vocab_size, stop_token_ids=[end]), job(1, target.vocab_size)])
    assert found == {"0": whole["0"][: stop + 1], "1": whole["1"]}
    assert target.forwards.arena is not None
    assert target.forwards.arena.num_free_pages == target.forwards.arena.pool_size.num_pages  # type: ignore[union-attr]


@pytest.mark.parametrize("params", [{"frequency_penalty": 0.7}, {"min_tokens": 4}, {"logit_bias": {"7": 3.0}}], ids=str)
def test_draws_that_need_earlier_tokens_wait_for_them(
    target: TargetModel, ahead: None, params: dict[str, object]
) -> None:
    chains = target.forwards.draw_chains
    assert chains is not None
    sampler: Any = target.forwards.new_batch_sampler()
    assert sampler.sampler(job(0, target.vocab_size)).draws_by_position
    assert not sampler.sampler(job(0, target.vocab_size, **params)).draws_by_position
    jobs = [job(0, target.vocab_size, **params), job(1, target.vocab_size)]
    _, num_waits = run(target, jobs)
    assert num_waits >= max(NUM_TOKENS[:2])


def test_rows_without_a_token_end_all_chains_and_are_reported_by_the_next_single_step(
    target: TargetModel, ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later draw of one job finds no number; the other job goes on."""
    whole, _ = run(target, [job(number, target.vocab_size) for number in range(2)])
    forwards: Any = target.forwards
    engine = Engine(target, create_bench_drafter("autoregressive", target, free_rows))
    jobs = [job(number, target.vocab_size) for number in range(2)]
    for each in jobs:
        engine.start(each)
    cache, length, send = engine._slots["0"].cache, LENGTHS[0] + 3, forwards._send

    def spoilt(groups: list[SequenceRows], captured: CapturedForward) -> None:
        send(groups, captured)
        bad = [each.cache is cache and each.positions[-1] >= length for each in groups for _ in each.token_ids]

        def replay_and_spoil() -> None:
            type(captured.graph).replay(captured.graph)
            forwards._decoder.logits[: len(bad)].masked_fill_(torch.tensor(bad)[:, None], torch.nan)

        captured.graph.replay = replay_and_spoil  # type: ignore[method-assign]

    monkeypatch.setattr(forwards, "_send", spoilt)
    while any(each.finish_reason is None for each in jobs):
        engine.step()
    assert jobs[0].error is not None
    assert jobs[0].output_ids.tolist() == whole["0"][:4]
    assert jobs[1].output_ids.tolist() == whole["1"]
