"""A step that runs out of memory anywhere before its commit can be taken again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.variants import BENCH_ENGINES, COMPARED, create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import MTP
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.engine.known_scores import KnownScores
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.tiny_targets import target as target
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.drafters.mtp.mtp_parts import publish_with_layer
from tests.worker.engine.memory_parts import Faults
from tests.worker.kernels.kernel_parts import needs_kernels

pytestmark = [needs_kernels, pytest.mark.long]

NUM_TOKENS = 70
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.0, "repetition_detection": {"max_pattern_size": 8, "min_count": 9}},
    {"temperature": 0.7, "top_p": 0.9, "prompt_logprobs": 1},
]

Outcome = tuple[list[int], str | None, list[float], list[float]]


def outcomes(target: TargetModel, engine_name: str, faults: Faults | None = None) -> list[Outcome]:
    """Return tokens, finish reasons and log-probabilities of three sequences; every second step fails once."""
    engine = Engine(target, create_bench_drafter(engine_name, target, free_rows))
    scored = list[KnownScores | None]()
    for number, fields in enumerate(SAMPLED):
        prompt = np.random.default_rng(number).integers(5, 60, 150).tolist()
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=number, ignore_eos=True, **fields)
        scored.append(KnownScores(prompt, 1, 1, target) if "prompt_logprobs" in fields else None)
        engine.start(Sequence(str(number), prompt, params, target.vocab_size), scores=scored[-1])
    num_steps = 0
    while any(sequence.finish_reason is None for sequence in engine.sequences):
        num_steps += 1
        if faults is not None and num_steps % 2:
            faults.arm()
        try:
            engine.step()
        except torch.OutOfMemoryError:
            assert not engine.is_torn
        if faults is not None:
            faults.disarm()
    return [
        (
            sequence.output_ids.tolist(),
            sequence.finish_reason,
            [] if sequence.kept_logprobs is None else sequence.kept_logprobs.logprobs.tolist(),
            [] if scores is None else scores.logprobs.logprobs.tolist(),
        )
        for sequence, scores in zip(engine.sequences, scored, strict=True)
    ]


@pytest.fixture(scope="module")
def plain(target: TargetModel) -> list[Outcome]:
    return outcomes(target, "autoregressive")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in COMPARED else ()) for name in BENCH_ENGINES]
)
def test_steps_taken_again_have_the_tokens_of_plain_decoding(
    target: TargetModel, plain: list[Outcome], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch)
    assert outcomes(target, name, faults) == plain
    assert faults.hit


def test_steps_of_a_recurrent_model_with_an_mtp_layer_are_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_with_layer("Qwen3.5", tmp_path)
    target = TargetModel.load(locate_model(str(tmp_path)), "float32", "cpu")
    undisturbed = outcomes(target, "autoregressive")
    faults = Faults(monkeypatch)
    assert outcomes(target, MTP.engine, faults) == undisturbed
    assert {"NativePredictorRows.run", "NativeForwards.run"} <= faults.hit
