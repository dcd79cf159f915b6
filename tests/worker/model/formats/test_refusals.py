"""Quantized weights are right, or refused before loading."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.model.formats.examples import EXAMPLES, integers
from tests.worker.model.formats.twins import LLAMA, load, make_packed, make_twins

pytestmark = pytest.mark.long

FP8, INT4, NVFP4 = "fp8 in blocks of 128", "compressed-tensors int4", "compressed-tensors NVFP4"
MODULE = "model.layers.0.mlp.up_proj"
Edit = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = (FP8, INT4, NVFP4, "compressed-tensors MXFP4", "GPTQ int4", "AWQ")
    return {name: make_packed(EXAMPLES[name], tmp_path_factory.mktemp("made") / "model")[0] for name in names}


@pytest.fixture
def packed(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(made[name], tmp_path / "packed"))


def change(folder: Path, edit: Edit) -> None:
    tensors = {n: each for file in folder.glob("*.safetensors") for n, each in load_file(file).items()}
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(folder: Path) -> str:
    """Return the line in which `inspect` and runs refuse a folder."""
    with pytest.raises(ModelError) as caught:
        locate_model(str(folder))
    line = str(caught.value)
    assert "\n" not in line
    assert line == f"model {folder}: {inspect_model(str(folder)).refusal}"
    return line


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        (FP8, lambda t: t.pop(f"{MODULE}.weight_scale_inv"), "up_proj.weight in fp8, and its part 'scale_inv' is miss"),
        (FP8, lambda t: t.update({f"{MODULE}.weight": t[f"{MODULE}.weight"][:1]}), ""),
        (
            FP8,
            lambda t: t.update({f"{MODULE}.weight_scale_inv": torch.ones(1, 2)}),
            "its part 'scale_inv' has the shape [1, 2]; expected [1, 1]",
        ),
        (FP8, lambda t: t.update({f"{MODULE}.weight_scale": torch.ones(1)}), "its part 'scale_inv' is none of this"),
        (
            FP8,
            lambda t: t.update({f"{MODULE}.weight": t[f"{MODULE}.weight"].view(torch.float8_e5m2)}),
            "up_proj.weight as F8_E5M2; expected weights in bfloat16",
        ),
        (INT4, lambda t: t.pop(f"{MODULE}.weight_shape"), "and its part 'shape' is missing; copy all files again"),
        (
            INT4,
            lambda t: t.update({f"{MODULE}.weight_zero_point": torch.ones(12, 2, dtype=torch.int32)}),
            "and it has zero_point, unlike its config says",
        ),
        (
            INT4,
            lambda t: t.update({f"{MODULE}.weight_packed": t[f"{MODULE}.weight_packed"].to(torch.int64)}),
            "its part 'packed' is I64; expected I32",
        ),
        (NVFP4, lambda t: t.pop(f"{MODULE}.weight_global_scale"), "its part 'global_scale' is missing"),
        (
            "GPTQ int4",
            lambda t: t.update({f"{MODULE}.qzeros": torch.ones(1, 1, dtype=torch.int32)}),
            "'qzeros' has the",
        ),
        ("AWQ", lambda t: t.update({f"{MODULE}.g_idx": torch.ones(64, dtype=torch.int32)}), "'g_idx' is none of this"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_anything_is_loaded(
    name: str, edit: Edit, words: str, packed: Callable[[str], Path]
) -> None:
    folder = packed(name)
    change(folder, edit)
    if not words:  # a matrix of another shape, which the model then can't place
        with pytest.raises(ModelError, match=r"up_proj.weight as \[1, 64\], expected \[96, 64\]"):
            load(folder, "float32")
        return
    assert words in refusal(folder)


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        (FP8, lambda t: t[f"{MODULE}.weight_scale_inv"].fill_(float("nan")), "its scales are not finite"),
        (FP8, lambda t: t[f"{MODULE}.weight_scale_inv"].fill_(float("inf")), "its scales are not finite"),
        (FP8, lambda t: t[f"{MODULE}.weight"].view(torch.uint8)[3].fill_(0xFF), "its codes are not all numbers"),
        (NVFP4, lambda t: t[f"{MODULE}.weight_global_scale"].fill_(0), "its scales are not finite"),
        (NVFP4, lambda t: t[f"{MODULE}.weight_scale"].view(torch.uint8).fill_(0x7F), "its scales are not finite"),
        ("compressed-tensors MXFP4", lambda t: t[f"{MODULE}.weight_scale"].fill_(255), "its scales are not all numb"),
        (INT4, lambda t: t[f"{MODULE}.weight_shape"].fill_(2**60), "its part 'shape' says [1152921504606846976, 11529"),
        (INT4, lambda t: t[f"{MODULE}.weight_shape"].fill_(-1), "its part 'shape' says [-1, -1]"),
        ("GPTQ int4", lambda t: t[f"{MODULE}.g_idx"].fill_(2), "its g_idx names groups beyond its 2"),
        ("GPTQ int4", lambda t: t[f"{MODULE}.g_idx"].fill_(-1), "its g_idx names groups beyond its 2"),
    ],
)
def test_damaged_parts_are_refused_with_file_and_tensor(
    name: str, edit: Edit, words: str, packed: Callable[[str], Path]
) -> None:
    folder = packed(name)
    change(folder, edit)
    with pytest.raises(ModelError) as caught:
        load(folder, "float32")
    assert str(caught.value).startswith(f"model {folder}: {folder / 'model.safetensors'} has {MODULE}.weight: {words}")


ONE_GROUP = integers(4, 32, False).config


def with_weights(**said: Any) -> dict[str, Any]:
    group = ONE_GROUP["config_groups"]["group_0"]
    return ONE_GROUP | {"config_groups": {"group_0": group | {"weights": group["weights"] | said}}}


def with_targets(*targets: str) -> dict[str, Any]:
    return ONE_GROUP | {"config_groups": {"group_0": ONE_GROUP["config_groups"]["group_0"] | {"targets": [*targets]}}}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        *(
            ({"quant_method": name}, f"quantization_config, '{name}'); expected weights in bfloat16, float16, float32")
            for name in ("bitsandbytes", "quark", "hqq", "eetq", "fbgemm_fp8", "torchao", "aqlm", "bitnet", "vptq")
        ),
        ({}, "its weights are quantized (config.json has quantization_config, None)"),
        ("fp8", "its weights are quantized (config.json has quantization_config, 'fp8')"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "has fmt = 'e5m2'; expected 'e4m3', 'float8_e4m3fn'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size = [128]; expected two positive"),
        ({"quant_method": "fp8", "expert_dtype": "fp3"}, "has expert_dtype = 'fp3'; expected 'fp8', 'fp4'"),
        ({"quant_method": "fp8", "rotation": "hadamard"}, "rotation = 'hadamard', which is not understood here"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 32}, "has bits = 5; expected 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "has group_size = 0; expected a positive integer"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:x": {}}}, "dynamic = {'-:x': {}}, which"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
            "has checkpoint_format = 'marlin'",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "has version = 'gemv'"),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "has bits = 8; expected 4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'; expected FP8, "),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "has group_size = 32; expected 16"),
        ({"quant_method": "modelopt", "quant_algo": ["x"]}, "quant_algo = ['x']; expected FP8, "),
        ({"quant_method": "modelopt", "quant_algo": {"x" * 90: 1}}, f"quant_algo = {{'{'x' * 78}; expected FP8"),
        ({"quant_method": ["x" * 90]}, f"quantization_config, ['{'x' * 78}); expected weights"),
        ({"quant_method": "fp8", "weight_block_size": [0] * 90}, f"size = [{'0, ' * 26}0; expected two positive"),
        ({"quant_method": "fp8", "a\nb": 1}, r"has a\nb = 1, which is not understood here"),
        (ONE_GROUP | {"format": ["marlin-24"]}, "has format = ['marlin-24']; expected pack-quantized"),
        (ONE_GROUP | {"config_groups": {"a\nb": 3}}, r"its quantization_config, a\nb, is 3; expected an object"),
        (with_targets("re:("), "group_0, has the target 're:('; expected a pattern behind re:"),
        (ONE_GROUP | {"format": "marlin-24"}, "has format = 'marlin-24'; expected pack-quantized"),
        (ONE_GROUP | {"config_groups": {}}, "has no config_groups"),
        (ONE_GROUP | {"config_groups": [1]}, "config_groups, is [1]; expected an object"),
        (ONE_GROUP | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'; sparse weights are"),
        (ONE_GROUP | {"transform_config": {"config_groups": {"R1": {}}}}, "has transform_config = {'config_groups'"),
        (with_weights(num_bits=5), "has num_bits = 5; expected 2, 3, 4, 8"),
        (with_weights(type="float"), "has type = 'float'; expected 'int'"),
        (with_weights(strategy="block"), "has strategy = 'block'; expected tensor or channel or group"),
        (with_weights(group_size=None), "has group_size = None; expected a positive integer"),
        (with_weights(dynamic=True), "has dynamic = True; expected False"),
        (with_weights(zigzag=3), "has zigzag = 3, which is not understood here"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_the_name_of_its_key(
    said: object, words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": said}))
    assert words in refusal(tmp_path)


def test_floats_with_zeros_are_refused(tmp_path: Path) -> None:
    config = json.loads(json.dumps(EXAMPLES["compressed-tensors FP8 per row"].config))
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": config}))
    assert "has symmetric = False; expected True" in refusal(tmp_path)


def test_two_formats_in_one_checkpoint_are_refused(tmp_path: Path) -> None:
    said = {"quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "fp8"}}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert "says 'fp8', None, its hf_quant_config.json says 'NVFP4'; two formats in one" in refusal(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": ["x"] * 90}))
    assert f"(hf_quant_config.json has {['x'] * 90!s:.80}); expected an object" in refusal(tmp_path)


def test_a_config_of_quantized_weights_beside_plain_ones_is_refused(tmp_path: Path) -> None:
    _, dense = make_twins(EXAMPLES[FP8], tmp_path)
    (dense / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": EXAMPLES[FP8].config}))
    assert "its weights are quantized in fp8, says its config, and none of them is" in refusal(dense)


def test_a_module_in_no_group_of_the_config_is_refused(packed: Callable[[str], Path]) -> None:
    folder = packed(INT4)
    group = ONE_GROUP["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]}
    said = {"quantization_config": ONE_GROUP | {"config_groups": {"group_0": group}}}
    (folder / "config.json").write_text(json.dumps(LLAMA | said))
    assert "mlp.down_proj.weight in compressed-tensors, and its module is in none of the config's" in refusal(folder)


def test_a_quantized_model_is_shown_with_its_format_its_numbers_and_its_bytes(
    packed: Callable[[str], Path],
) -> None:
    folder = packed(INT4)
    found = inspect_model(str(folder))
    stored = [each for file in folder.glob("*.safetensors") for each in load_file(file).values()]
    assert found.refusal is None
    assert found.quantization == "int4"
    assert found.num_bytes == sum(each.nbytes for each in stored)
    assert found.formats == {"int4": 43_008, "BF16": 2 * 97 * 64 + 3 * 64}
    assert found.num_parameters == sum(found.formats.values())
    assert found.cpu is not None
    assert found.cpu.name == "kernels"
