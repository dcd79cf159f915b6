from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter
from swiftbatch.worker.drafters.engine_options import GriffinOptions
from swiftbatch.worker.drafters.griffin.cuda_draft_rows import CudaRows
from swiftbatch.worker.drafters.griffin.draft_forwards import GriffinForwards, GriffinRows, TiledRows, rows_of
from swiftbatch.worker.drafters.griffin.griffin import GriffinDrafter, forwards_of
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig, GriffinModel, load_griffin, save_griffin
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import proposed
from tests.worker.drafters.griffin.griffin_parts import random_tokens
from tests.worker.forward.cuda.cuda_parts import cuda_target

pytestmark = pytest.mark.long

OPTIONS = GriffinOptions(max_depth=2, max_nodes=6, breadth=3, at_every_step=True)
NUM_TOKENS = 3
DRAWN = {"temperature": 0.9, "min_p": 0.02}
PENALISED = DRAWN | {"repetition_penalty": 1.2, "penalty_window": 20}


def new_sequence(target: TargetModel, name: str, length: int, **fields: float) -> Sequence:
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=length, ignore_eos=True, **fields)  # type: ignore[arg-type]
    return Sequence(name, random_tokens(target, length, length), params, target.vocab_size)


def drafter_of(target: TargetModel, rows: GriffinRows) -> GriffinDrafter:
    return GriffinDrafter(GriffinForwards(rows, target), None, OPTIONS)


def on_kernels(target: TargetModel) -> GriffinDrafter:
    rows = rows_of(load_griffin(None, target), target, OPTIONS.breadth)
    assert isinstance(rows, CudaRows)
    rows._arena.buffer.fill_(float("nan"))
    rows._features.fill_(float("nan"))
    return drafter_of(target, rows)


def test_tokens_are_those_of_plain_decoding_and_trees_those_of_torch(files: ModelFiles) -> None:
    target, reference = cuda_target(files, torch.float32, linear="cublas"), TargetModel.load(files, "float32", "cpu")
    drafter = on_kernels(target)
    torch_drafter = drafter_of(target, TiledRows(load_griffin(None, target), target, OPTIONS.breadth))
    engine = Engine(target, drafter)
    sequences = [new_sequence(target, "a", 12, **DRAWN), new_sequence(target, "b", 5, **PENALISED)]
    for sequence in sequences:
        slot = engine.start(sequence)
        torch_drafter.start(sequence, slot.cache)
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
        trees = [proposed(each, sequences[0], 6, 2) for each in (drafter, torch_drafter)]
        assert trees[0] == trees[1]
        assert len(trees[0]) >= 3
    for sequence in sequences:
        assert sequence.output_ids.tolist() == plainly_decoded(reference, sequence)


def test_layers_hand_out_their_outputs_and_an_eagle_3_head_drafts_from_them(tiny_model: Path, tmp_path: Path) -> None:
    files = locate_model(str(tiny_model))
    target, reference = cuda_target(files, torch.float32, linear="cublas"), TargetModel.load(files, "float32", "cpu")
    config = replace(
        GriffinConfig.for_target(reference.model.config),
        feature_layers=(1, 0),
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
    )
    torch.manual_seed(1)
    model = GriffinModel(config)
    model.head.is_drafted.fill_(1)  # type: ignore[union-attr]
    save_griffin(tmp_path, model, files.fingerprint)
    forwards = forwards_of(tmp_path, target, OPTIONS.breadth, sees_all=False)
    found, expected = (each.read(each.new_cache(64), [3, 4, 5], (1, 0)) for each in (target, reference))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    sequence, engine = new_sequence(target, "a", 12, **DRAWN), Engine(target, GriffinDrafter(forwards, None, OPTIONS))
    engine.start(sequence)
    while sequence.finish_reason is None:
        engine.step()
    assert engine.counters.num_draft_tokens > 0
    assert sequence.output_ids.tolist() == plainly_decoded(reference, sequence)


def plainly_decoded(target: TargetModel, drafted: Sequence) -> list[int]:
    prompt = drafted.token_ids[: drafted.num_prompt_tokens].tolist()
    sequence = Sequence("plain", prompt, drafted.sampling, target.vocab_size)
    engine = Engine(target, AutoregressiveDrafter())
    engine.start(sequence)
    while sequence.finish_reason is None:
        engine.step()
    return sequence.output_ids.tolist()  # type: ignore[no-any-return]


def test_slots_come_back_when_their_sequences_stop_and_one_too_many_is_refused(files: ModelFiles) -> None:
    target = cuda_target(files, torch.float32, num_slots=1, linear="cublas")
    drafter = on_kernels(target)
    drafter._forwards.level_seconds()
    cache = target.new_cache(100)
    for name in "ab":
        sequence = new_sequence(target, name, 20)
        drafter.start(sequence, cache)
        with pytest.raises(KVRoomError, match="all 1 of this worker's GPU are taken"):
            drafter.start(new_sequence(target, "other", 20), cache)
        drafter.stop(sequence)
