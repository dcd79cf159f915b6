from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.auto import auto
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.training import train_mtp as training
from swiftbatch.worker.training import training_loop
from swiftbatch.worker.training.recipes import MTPRecipe
from swiftbatch.worker.training.train_mtp import train_mtp
from tests.worker.drafters.drafter_parts import free_rows, run_to_ends
from tests.worker.drafters.griffin.griffin_training_parts import TEXTS

pytestmark = pytest.mark.usefixtures("one_thread")

FAST = MTPRecipe(num_steps=8, num_step_windows=2, window_length=48, num_passes=2, texts=replace(TEXTS, num_own_texts=0))


def test_a_killed_training_goes_on_to_the_weights_that_the_engine_drafts_with(
    tiny_model: Path, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_loop, "NUM_STATE_STEPS", 2)
    whole, killed, said = tmp_path / "whole", tmp_path / "killed", list[str]()
    train_mtp(str(tiny_model), books, whole, FAST, said.append)
    assert "the target's best token by pass" in said[-1]
    losses = [json.loads(line)["loss"] for line in (whole / "mtp_log.jsonl").read_text().splitlines()[1:9]]
    assert losses[-1] < losses[0]
    assert (whole / training.FILES.plot).is_file()

    def die(step: int, *_: object) -> None:
        if step == 5:
            raise KeyboardInterrupt

    real = training.draw_windows
    monkeypatch.setattr(training, "draw_windows", lambda *given: (die(given[2]), real(*given))[1])
    with pytest.raises(KeyboardInterrupt):
        train_mtp(str(tiny_model), books, killed, FAST, said.append, whole / "features")
    monkeypatch.setattr(training, "draw_windows", real)
    train_mtp(str(tiny_model), books, killed, FAST, said.append, whole / "features")
    assert (killed / "mtp.safetensors").read_bytes() == (whole / "mtp.safetensors").read_bytes()

    target = TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu")
    assert "mtp" in auto(target, free_rows, whole).ways
    texts = []
    for name, parts in (("mtp", whole), ("autoregressive", None)):
        sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=2, ignore_eos=True)
        sequence = Sequence("a", [5, 6, 7, 8], sampling, target.vocab_size)
        run_to_ends(Engine(target, create_drafter(name, target, free_rows, parts)), sequence)
        texts.append(sequence.token_ids.tolist())
    assert texts[0] == texts[1]
