from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.catalogue import FINGERPRINT, check_parts
from swiftbatch.worker.drafters.griffin.griffin_model import (
    CONFIG,
    SECOND_FUSIONS,
    GriffinConfig,
    GriffinModel,
    load_griffin,
    save_griffin,
)
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import GRIFFIN_FILE, PARTS_FOLDER, locate_model
from tests.worker.drafters.griffin.griffin_parts import load


@pytest.fixture(scope="module")
def small_target(tiny_model: Path) -> TargetModel:
    return load(tiny_model)


@pytest.fixture
def config(small_target: TargetModel) -> GriffinConfig:
    return GriffinConfig.for_target(small_target.model.config)


def write(folder: Path, target: TargetModel, config: GriffinConfig) -> GriffinModel:
    torch.manual_seed(3)
    model = GriffinModel(config)
    save_griffin(folder, model, target.files.fingerprint)
    return model


@pytest.mark.parametrize("fusion", SECOND_FUSIONS)
@pytest.mark.parametrize("expansion_size", [0, 96])
@pytest.mark.parametrize("has_head", [True, False])
def test_every_variant_is_read_as_it_was_written(
    small_target: TargetModel, config: GriffinConfig, tmp_path: Path, fusion: str, expansion_size: int, has_head: bool
) -> None:
    config = replace(config, fusion=fusion, expansion_size=expansion_size, has_token_enhanced_head=has_head)
    written = write(tmp_path, small_target, config)
    read = load_griffin(tmp_path, small_target)
    assert read.config == config
    tensors = written.to(torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read.state_dict().items())


def test_the_fusion_is_the_papers_three_equations(config: GriffinConfig) -> None:
    torch.manual_seed(5)
    fusion = GriffinModel(config).fusion
    features, tokens = torch.randn(3, 64), torch.randn(3, 64)
    assert fusion.up is not None
    assert fusion.down is not None
    fused = torch.cat([features, tokens], -1) @ fusion.fuse.weight.T + fusion.fuse.bias
    normed = [torch.nn.functional.layer_norm(part, (64,)) for part in (fused, tokens)]
    expanded = torch.cat(normed, -1) @ fusion.up.weight.T + fusion.up.bias
    expected = expanded * torch.sigmoid(expanded) @ fusion.down.weight.T + fusion.down.bias + fused
    torch.testing.assert_close(fusion(features, tokens), expected)


def test_weights_beside_the_target_are_no_part_of_it(tiny_model: Path) -> None:
    with_file = locate_model(str(tiny_model)).fingerprint
    path = tiny_model / PARTS_FOLDER / GRIFFIN_FILE
    content = path.read_bytes()
    path.unlink()
    try:
        assert locate_model(str(tiny_model)).fingerprint == with_file
    finally:
        path.write_bytes(content)


def test_no_file_says_how_to_train_one(small_target: TargetModel, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"engine griffin: no file .*train griffin --model .*--draft-model") as worker:
        load_griffin(tmp_path, small_target)
    with pytest.raises(ModelError) as driver:
        check_parts("griffin", str(tiny_model), "", str(tmp_path))
    assert str(driver.value) == str(worker.value)


def test_another_model_s_weights_are_refused(
    small_target: TargetModel, tiny_model: Path, config: GriffinConfig, tmp_path: Path
) -> None:
    save_griffin(tmp_path, GriffinModel(config), "f" * 64)
    with pytest.raises(ModelError, match="belongs to a model with fingerprint ffffffffffff") as worker:
        load_griffin(tmp_path, small_target)
    with pytest.raises(ModelError) as driver:
        check_parts("griffin", str(tiny_model), small_target.files.fingerprint, str(tmp_path))
    assert str(driver.value) == str(worker.value)


def test_another_width_is_refused(small_target: TargetModel, config: GriffinConfig, tmp_path: Path) -> None:
    write(tmp_path, small_target, replace(config, hidden_size=32))
    with pytest.raises(ModelError, match=r"features of 32 numbers, but .* has 64"):
        load_griffin(tmp_path, small_target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shape", r"`head.predict.weight` is torch.bfloat16 \[3, 3\]; expected floats \[64, 64\]"),
        ("missing", "`head.predict.weight` is missing"),
        ("nan", "`head.predict.weight` has values that are not finite"),
        ("more", "unknown tensors surplus"),
        ("config", "header `griffin_config`"),
    ],
)
def test_a_damaged_file_names_what_is_wrong(
    small_target: TargetModel, config: GriffinConfig, tmp_path: Path, change: str, message: str
) -> None:
    write(tmp_path, small_target, config)
    tensors, name = load_file(tmp_path / GRIFFIN_FILE), "head.predict.weight"
    header = {FINGERPRINT: small_target.files.fingerprint, CONFIG: json.dumps(vars(config))}
    if change == "shape":
        tensors[name] = torch.zeros(3, 3, dtype=torch.bfloat16)
    elif change == "missing":
        del tensors[name]
    elif change == "nan":
        tensors[name][0, 0] = torch.nan
    elif change == "more":
        tensors["surplus"] = torch.zeros(1)
    else:
        header[CONFIG] = '{"hidden_size": 64}'
    save_file(tensors, tmp_path / GRIFFIN_FILE, metadata=header)
    with pytest.raises(ModelError, match=message):
        load_griffin(tmp_path, small_target)


def test_no_safetensors_file_is_named(small_target: TargetModel, tmp_path: Path) -> None:
    (tmp_path / GRIFFIN_FILE).write_bytes(b"no weights")
    with pytest.raises(ModelError, match=r"griffin\.safetensors: no safetensors file"):
        load_griffin(tmp_path, small_target)
