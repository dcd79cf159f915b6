"""An MTP layer of a checkpoint is what its kind's layer is in torch, and drafts change no token of any model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.papers.mtp.mtp_forwards import MTPForwards
from swiftbatch.worker.papers.mtp.predictor_weights import load_predictor
from swiftbatch.worker.target.target import TargetModel
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.papers.mtp.mtp_parts import CHECKPOINTS, loaded, publish_with_layer

TEXT = [(7 * number * number + 3 * number) % 60 for number in range(80)]
OFTEN = ("DeepSeek R1", "Qwen3.5")
CASES = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS]


@pytest.mark.parametrize("name", CASES)
def test_the_layer_of_a_checkpoint_gives_what_it_gives_in_torch(name: str, tmp_path: Path) -> None:
    module = publish_with_layer(name, tmp_path)
    target = loaded(tmp_path)
    forwards = MTPForwards(load_predictor(None, target), target, 4)
    sequence = Sequence("a", TEXT, SamplingParams(max_tokens=9, temperature=0.0), target.vocab_size, target.device)
    forwards.start(sequence, target.new_cache(100))
    hidden = torch.randn(len(TEXT) - 1, target.hidden_size)
    forwards.take("a", 0, hidden)
    [candidates] = forwards.follow([sequence])
    embeddings = target.forwards.embed(torch.tensor(TEXT[1:]))
    expected = module(hidden[None], embeddings[None])[0, -1]
    found = forwards._tracks["a"].feature
    assert found is not None
    if CHECKPOINTS[name][1].feeds_normed:
        assert torch.allclose(found, expected, atol=1e-3 * float(expected.abs().max()))
    assert candidates[0][1] == int(target.logits(expected[None]).argmax())


def generated(target: TargetModel, engine_name: str, sampling: SamplingParams, num_jobs: int = 3) -> list[list[int]]:
    engine = Engine(target, create_drafter(engine_name, target, free_rows))
    sequences = [
        Sequence(f"{number}", TEXT[: 20 + 25 * number], sampling, target.vocab_size, target.device)
        for number in range(num_jobs)
    ]
    for sequence in sequences:
        engine.start(sequence)
        engine.step()  # they join one by one
    while engine.sequences:
        engine.step()
        for sequence in [each for each in engine.sequences if each.finish_reason is not None]:
            engine.stop(sequence)
    if engine_name == "mtp":
        assert engine.counters.num_draft_tokens > 0
    return [sequence.token_ids.tolist() for sequence in sequences]


@pytest.mark.parametrize("name", CASES)
def test_drafts_of_the_layer_change_no_token(name: str, tmp_path: Path) -> None:
    publish_with_layer(name, tmp_path)
    target = loaded(tmp_path, "bfloat16")
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=4, ignore_eos=True)
        assert generated(target, "mtp", sampling) == generated(target, "autoregressive", sampling)
