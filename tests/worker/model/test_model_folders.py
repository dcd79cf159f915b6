"""A model's folder is complete and consistent, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.transformers_forwards import TransformersForwards
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.attention_needs import observe_layers
from swiftbatch.worker.model.file_checks import INDEX_FILE
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.model.kind_parts import tiny_config, tiny_model, tiny_target

WEIGHTS = "model.safetensors"
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def parts() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    model = tiny_model(tiny_config("llama"))
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    return config, {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


@pytest.fixture
def folder(parts: tuple[dict[str, Any], dict[str, torch.Tensor]], tmp_path: Path) -> Path:
    config, weights = parts
    write(tmp_path / "config.json", config)
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    return tmp_path


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def change(path: Path, **values: object) -> None:
    write(path, {**json.loads(path.read_text(encoding="utf-8")), **values})


def change_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def refusal(folder: Path, load: bool = True) -> str:
    """Return the refusal before or while loading."""
    files = None if not load else locate_model(str(folder))
    with pytest.raises(ModelError) as caught:
        locate_model(str(folder)) if files is None else TargetModel.load(files, "float32", "cpu")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"model {folder}: ")
    return str(caught.value)


def test_a_folder_that_is_whole_loads(folder: Path) -> None:
    change(folder / "config.json", return_dict=False, output_hidden_states=True, attn_implementation="none-of-ours")
    target = TargetModel.load(locate_model(str(folder)), "float32", "cpu")
    assert compare(target, num_rows=40).agrees
    assert not target.model.config.output_hidden_states  # every layer's would be kept in every forward


@pytest.mark.parametrize("name", ["self_attn.rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"])
def test_constants_that_older_files_hold_are_no_strangers(folder: Path, name: str) -> None:
    change_weights(folder, lambda weights: weights.update({f"model.layers.0.{name}": torch.ones(4)}))
    assert compare(TargetModel.load(locate_model(str(folder)), "float32", "cpu"), num_rows=40).agrees


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda w: w.pop(NAME), f"its weights lack 1 of the model's tensors, {NAME} among them"),
        (lambda w: w.pop("lm_head.weight"), "lack 1 of the model's tensors, lm_head.weight among them"),
        (lambda w: w.update({NAME: w[NAME][:10]}), f"its weights have {NAME} as [10, 64], expected [96, 64]"),
        (lambda w: w.update({"model.layers.9.x": w[NAME] + 1}), "hold 1 tensors that the model has no place for"),
    ],
)
def test_weights_with_gaps_other_shapes_or_strangers_are_refused_by_name(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], object], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    change_weights(folder, edit)
    assert words in refusal(folder)
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": 1}, "its weights hold 9 tensors that the model has no place for"),
        ({"num_hidden_layers": 3}, "its weights lack 9 of the model's tensors"),
        ({"text_config": {}}, "cannot be loaded: AttributeError"),
    ],
)
def test_a_config_that_is_not_that_of_the_weights_is_refused(
    folder: Path, values: dict[str, object], words: str
) -> None:
    change(folder / "config.json", **values)
    assert words in refusal(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_attention_heads": 3}, "3 attention heads for 2 of keys and values; expected a multiple"),
        ({"vocab_size": True}, "vocab_size = True; expected a positive integer"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers = '2'; expected a positive integer"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers = 2.0; expected a positive integer"),
        ({"head_dim": 0}, "head_dim = 0; expected a positive integer"),
        ({"hidden_size": [64]}, "hidden_size = [64]; expected a positive integer"),
        ({"num_key_value_heads": -1}, "num_key_value_heads = -1; expected a positive integer"),
        ({"max_position_embeddings": 10**30}, "expected a positive integer, at most 9,007,199,254,740,992"),
        ({"layer_types": "full_attention"}, "layer_types = 'full_attention'; expected a list of 2, each a word"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers = 2147483648; expected a positive integer, at most 10,000"),
        ({"model_type": "dots1", "first_k_dense_replace": 2**53}, "expected an integer from 0 to 10,000"),
        ({"model_type": "ernie4_5_moe", "moe_layer_end_index": 2**53}, "expected an integer from -1 to 10,000"),
        ({"hidden_act": "nope"}, "hidden_act = 'nope'; expected an activation that transformers has"),
        ({"hidden_act": ["silu"]}, "hidden_act = ['silu']; expected an activation that transformers has"),
        ({"layer_types": 5}, "layer_types = 5; expected a list of 2, each a word"),
        ({"eos_token_id": [2, [3]]}, "config.json has eos_token_id = [2, [3]]; expected a token id"),
        ({"eos_token_id": [1] * 3000 + [0.5]}, f"eos_token_id = [{'1, ' * 26}1; expected a token id or a list of them"),
        ({"model_type": {"a": 1}, "text_config": {"model_type": "llama"}}, "its kind {'a': 1} was not compared"),
        ({"model_type": "x" * 3000}, f"its kind '{'x' * 79} was not compared"),
        ({"model_type": "of\nmine", "layer_types": ["a\nb"] * 2}, r"'of\nmine' has layers of the kinds a\nb"),
        ({"num_hidden_layers": 4, "layer_types": list("wxyz")}, "has layers of the kinds w, x, y, z"),
        ({"num_hidden_layers": 5, "layer_types": list("vwxyz")}, "of the kinds v, w, x, y, and 1 more"),
        ({"rope_scaling": {"a\nb": {"factor": 0}}}, r"rope_scaling.a\nb.factor = 0"),
        ({"quantization_config": {"quant_method": "of-mine"}}, "quantized (config.json has quantization_config, 'of-m"),
        ({"compression_config": {}}, "its weights are quantized (config.json has compression_config, None)"),
    ],
)
def test_a_config_that_nothing_runs_is_refused_before_anything_is_loaded(
    folder: Path, values: dict[str, object], words: str
) -> None:
    change(folder / "config.json", **values)
    assert words in refusal(folder, load=False)


def test_a_config_nested_too_deep_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 100_000, encoding="utf-8")
    assert "config.json cannot be read" in refusal(folder, load=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eos_token_id": "x"}, "has eos_token_id = 'x'; expected a token id or a list of them"),
        ([1], "is no JSON object"),
    ],
)
def test_a_generation_config_that_would_be_passed_over_is_refused(folder: Path, settings: object, words: str) -> None:
    write(folder / "generation_config.json", settings)
    assert words in refusal(folder, load=False)
    (folder / "generation_config.json").write_text("{", encoding="utf-8")
    assert "generation_config.json cannot be read" in refusal(folder, load=False)


def test_an_adapter_is_refused_and_neither_dropped_nor_followed(folder: Path) -> None:
    write(folder / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "elsewhere"})
    assert "adapter_config.json says that it is an adapter; give its base model, and this as --lora" in refusal(
        folder, load=False
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_weights_of_numbers_that_are_no_floats_are_refused(folder: Path, dtype: torch.dtype) -> None:
    change_weights(folder, lambda weights: weights.update({NAME: weights[NAME].to(dtype)}))
    assert f"its weights have {NAME} as " in refusal(folder, load=False)


@pytest.mark.parametrize("name", ["absent.safetensors", "inner/model.safetensors", "x" * 60])
def test_an_index_of_shards_that_are_not_in_the_folder_is_refused(folder: Path, name: str) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / WEIGHTS).write_bytes(b"")
    (folder / WEIGHTS).rename(folder / "model-1.safetensors")
    write(folder / INDEX_FILE, {"weight_map": {NAME: name, "other": "model-1.safetensors"}})
    assert f"names {name}, which is no file of this folder" in refusal(folder, load=False)
    write(folder / INDEX_FILE, {"weight_map": []})
    assert "has no `weight_map`" in refusal(folder, load=False)
    assert "has no `weight_map`" in str(inspect_model(str(folder)).refusal)
    (folder / "model-1.safetensors").unlink()
    write(folder / INDEX_FILE, {"weight_map": {NAME: "model-1.safetensors"}})
    assert inspect_model(str(folder)).refusal is None  # a config without weights is inspected as it is


def test_weights_of_other_programs_alone_are_refused_by_inspect_as_by_a_run(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "consolidated.00.pth")
    said = refusal(folder, load=False)
    assert "no model.safetensors or pytorch_model.bin in" in said
    assert said == f"model {folder}: {inspect_model(str(folder)).refusal}"


def test_a_damaged_head_is_told_in_a_line_whatever_it_holds(folder: Path) -> None:
    head = json.dumps({NAME: {"dtype": "of\nmine" * 90, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / WEIGHTS).write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    said = refusal(folder, load=False)
    assert "is damaged or cut off (" in said
    assert len(said) < 600


def test_a_shard_s_index_is_part_of_the_fingerprint(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-1.safetensors")
    fingerprints = set()
    for name in ("a", "b"):
        write(folder / INDEX_FILE, {"weight_map": {name: "model-1.safetensors"}})
        fingerprints.add(locate_model(str(folder)).fingerprint)
    assert len(fingerprints) == 2


def test_layers_of_a_kind_that_the_class_has_no_mask_for_are_refused_in_a_line() -> None:
    config = tiny_config("qwen3")
    config.layer_types = ["full_attention", "chunked_attention", "sliding_attention", "sliding_attention"]
    with pytest.raises(ModelError, match="it cannot run 3 tokens: KeyError: 'chunked_attention'"):
        observe_layers(tiny_model(config), "mixed", 1024)


def test_a_model_of_one_token_agrees_with_itself() -> None:
    target = tiny_target("cohere")
    config = target.model.config
    config.vocab_size = 1
    found = compare(TargetModel(TransformersForwards(tiny_model(config), target.files), target.files), num_rows=8)
    assert found.agrees, found
