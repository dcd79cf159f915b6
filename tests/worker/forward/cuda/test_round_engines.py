"""On a GPU two-level drafters draft in rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters import triforce as draft_model
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter
from swiftbatch.worker.drafters.engine_options import TokenSwiftOptions, TriForceOptions
from swiftbatch.worker.drafters.self_speculation import RoundPlan, SelfSpeculationDrafter
from swiftbatch.worker.drafters.tokenswift.tokenswift import tokenswift
from swiftbatch.worker.drafters.triforce import triforce
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv import sparse_cache
from swiftbatch.worker.model.model_files import DRAFT_FOLDER, PARTS_FOLDER, ModelFiles, locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import free_rows, run_together
from tests.worker.forward.cuda.cuda_parts import cuda_target

pytestmark = pytest.mark.long

NUM_TOKENS = 4
BUDGET = 32  # that the prompts overflow
PENALISED = {
    "temperature": 0.9,
    "repetition_penalty": 1.2,
    "penalty_window": 20,
    "frequency_penalty": 1.0,
    "logit_bias": {"9": 6.0},
    "min_tokens": NUM_TOKENS,
    "stop_token_ids": (11, 12, 13),
}


@pytest.fixture(autouse=True)
def small_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens periods, so that windows of short texts restart."""
    monkeypatch.setattr(sparse_cache, "CHUNK_SIZE", 8)
    monkeypatch.setattr(sparse_cache, "NUM_RECENT", 8)
    monkeypatch.setattr(sparse_cache, "PERIOD", 8)


@pytest.fixture(scope="module")
def files(tiny_model: Path) -> ModelFiles:
    return locate_model(str(tiny_model))


@pytest.fixture(scope="module")
def plain(files: ModelFiles) -> list[list[int]]:
    target = TargetModel.load(files, "float32", "cpu")
    return [run(target, None, sequence) for sequence in sequences(target)]


def sequences(target: TargetModel) -> list[Sequence]:
    made = []
    for number, fields in enumerate(({"temperature": 0.0}, PENALISED)):
        prompt = [(7 * number + 3 * i) % 50 + 5 for i in range(36 + number)]
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=number, ignore_eos=True, **fields)  # type: ignore[arg-type]
        made.append(Sequence(str(number), prompt, params, target.vocab_size))
    return made


def run(target: TargetModel, drafter: SelfSpeculationDrafter | None, *together: Sequence) -> list[int]:
    run_together(Engine(target, drafter or AutoregressiveDrafter(target, free_rows, None)), together)
    return together[0].output_ids.tolist()


def tokenswift_in_rounds(target: TargetModel) -> SelfSpeculationDrafter:
    drafter = tokenswift(target, free_rows, None, TokenSwiftOptions(budget=BUDGET, rounds=1))
    drafter.plan = RoundPlan(2, 5, 2, 6)
    return drafter


def triforce_in_rounds(target: TargetModel) -> SelfSpeculationDrafter:
    options = TriForceOptions(budget=BUDGET, gamma_1=1, gamma_2=2, at_every_step=True, window=16)
    return triforce(target, free_rows, None, options)


@pytest.mark.slow
def test_rounds_over_keys_in_8_bits_give_the_tokens_of_plain_decoding(files: ModelFiles) -> None:
    plain = cuda_target(files, torch.float32, 2, 64, "cublas", kv_dtype="fp8")
    expected = [run(plain, None, sequence) for sequence in sequences(plain)]
    for drafter_of in (tokenswift_in_rounds, triforce_in_rounds):
        target = cuda_target(files, torch.float32, 2, 64, "cublas", kv_dtype="fp8")
        drafter, together = drafter_of(target), sequences(target)
        run(target, drafter, *together)
        assert [sequence.output_ids.tolist() for sequence in together] == expected
        assert drafter.counters.num_rounds > 2


def test_a_draft_model_says_of_texts_of_any_lengths_what_it_says_on_a_cpu(files: ModelFiles) -> None:
    """The shorter one's logits come before the longer one's last forward."""
    folder = locate_model(str(files.path / PARTS_FOLDER / DRAFT_FOLDER))
    models = [
        cuda_target(files, torch.float32, 2, 64, "cublas").load_beside(folder, 592),
        TargetModel.load(folder, "float32", "cpu"),
    ]
    texts = {"a": np.arange(5) + 9, "b": np.arange(40) + 30}
    found = []
    for model in models:
        drafts = draft_model.DraftModel(model, TriForceOptions(window=16))
        for name in texts:
            drafts.start(name)
        found.append(torch.stack(drafts.logits(texts)))
    assert isinstance(models[0].forwards, CudaForwards)
    assert torch.allclose(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("drafter_of", [tokenswift_in_rounds, triforce_in_rounds])
def test_rounds_of_two_sequences_give_the_reference_s_tokens_and_leave_no_slot_taken(
    files: ModelFiles, plain: list[list[int]], drafter_of: Callable[[TargetModel], SelfSpeculationDrafter]
) -> None:
    target = cuda_target(files, torch.float32, 2, 64, "cublas")
    drafter, together = drafter_of(target), sequences(target)
    arenas = [target.forwards.arena, drafter._new_entries.__self__]  # type: ignore[attr-defined]
    if drafter_of == triforce_in_rounds:
        model = drafter._proposer._draft_model._model  # type: ignore[attr-defined]
        assert isinstance(model.forwards, CudaForwards)
        assert model.num_slots == target.num_slots + 1
        arenas.append(model.forwards.arena)
    num_free = [len(arena.leases.free) for arena in arenas]
    run(target, drafter, *together)
    assert [sequence.output_ids.tolist() for sequence in together] == plain
    assert drafter.counters.num_rounds > 2
    assert [len(arena.leases.free) for arena in arenas] == num_free == [2, 2, 3][: len(arenas)]
