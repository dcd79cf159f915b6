"""A new engine with a trained part is one folder and one catalogue line."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters import catalogue
from swiftbatch.worker.drafters.catalogue import ENGINES, FINGERPRINT, EngineEntry, check_parts, create_drafter
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.sequence import Sequence
from tests.tiny_targets import target as target
from tests.worker.drafters.drafter_parts import free_rows, run_to_ends
from tests.worker.drafters.toy.toy import PART

PARAMS = SamplingParams(max_tokens=60, temperature=1.0, min_p=0.1, seed=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def a_line_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalogue.ENGINES, "toy", EngineEntry("tests.worker.drafters.toy.toy:toy", "a table", PART))


def generated(target: TargetModel, drafter: Drafter) -> tuple[list[int], int]:
    sequence = Sequence("a", [5, 9, 2, 7], PARAMS, target.vocab_size)
    engine = run_to_ends(Engine(target, drafter), sequence)
    return sequence.output_ids.tolist(), engine.counters.num_accepted_tokens


def save_table(folder: Path, target: TargetModel, token_ids: list[int], fingerprint: str) -> None:
    followers = torch.zeros(target.vocab_size)
    for token, follower in itertools.pairwise(token_ids):
        followers[token] = follower
    save_file({"followers": followers}, folder / PART.name, {FINGERPRINT: fingerprint})


def test_its_part_drafts_and_the_tokens_stay_the_same(target: TargetModel, tmp_path: Path) -> None:
    plain, _ = generated(target, create_drafter("autoregressive", target, free_rows))
    save_table(tmp_path, target, plain, target.files.fingerprint)
    drafted, num_accepted = generated(target, create_drafter("toy", target, free_rows, tmp_path))
    assert drafted == plain
    assert num_accepted > 0
    assert "toy" in ENGINES


def test_a_part_that_is_missing_or_another_model_s_is_refused_with_what_to_do(
    target: TargetModel, tmp_path: Path
) -> None:
    name, fingerprint = str(target.files.path), target.files.fingerprint
    with pytest.raises(ModelError, match=r"engine toy: no file .*toy\.safetensors; train it with `swiftbatch train"):
        check_parts("toy", name, fingerprint, tmp_path)
    save_table(tmp_path, target, [1, 2], "another")
    with pytest.raises(ModelError, match="belongs to a model with fingerprint another"):
        check_parts("toy", name, fingerprint, tmp_path)
