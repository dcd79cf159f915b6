"""Configs that no forward can take are refused before the start."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2CLS

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.kv.kv_capacity import bytes_per_position
from swiftbatch.worker.model.architectures.catalogue import ARCHITECTURES
from swiftbatch.worker.model.compute_path import path_on
from swiftbatch.worker.model.config_faults import ANGLES, OF_ATTENTION, PER_LAYER, RULES
from swiftbatch.worker.model.config_values import KNOWN_ACTIVATIONS
from swiftbatch.worker.model.model_files import locate_model, what_refuses
from swiftbatch.worker.model.text_config import text_view
from tests.worker.model.dense_configs import PUBLISHED as DENSE
from tests.worker.model.expert_configs import WITH_EXPERTS
from tests.worker.model.kind_parts import tiny_config, tiny_model
from tests.worker.model.test_hybrid_configs import PUBLISHED as HYBRID
from tests.worker.model.test_other_forms import OTHER_FORMS

PUBLISHED: dict[str, dict[str, Any]] = DENSE | OTHER_FORMS | WITH_EXPERTS | HYBRID
ODD: tuple[Any, ...] = (-1, 0, 0.5, 1e30, math.nan, "x", None, [], True)
DEVICES: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
NOWHERE = Path("/nowhere")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
NOT_OF_NUMBERS = (  # counts that mean something in other models
    *("its weights lack", "its weights hold", "its weights have"),
    *("expected float, got int", "its logits are"),  # of a class that wants a point, and numbers that drown all others
    "Initializing zero-element tensors",  # a warning, of parts that these weights have and no layer is made of
)


def places(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Return all places with numbers, null or lists, also nested."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from ((key, *place) for place in places(value))
        elif not isinstance(value, bool | str) or key.endswith("dtype"):
            yield (key,)


def changed(config: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    part = config
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    return config


def told(config: dict[str, Any]) -> str | None:
    refusal = what_refuses(config, NOWHERE)
    if refusal is None:
        view = text_view(config)
        assert {path_on(device, view).name for device in DEVICES} <= {
            "kernels",
            "kernels attend",
            "transformers",
            "none",
        }
        assert isinstance(bytes_per_position(view, "bfloat16"), int)
    assert refusal is None or "\n" not in refusal
    return refusal


@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        ("Gemma 2 27B", "attn_logit_softcapping", -3.0, "a finite number above 0, or null"),
        ("Gemma 2 27B", "query_pre_attn_scalar", -1, "a positive integer"),
        ("Gemma 2 27B", "sliding_window", 0, "a positive integer"),
        ("Gemma 2 27B", "layer_types", ["full_attention"], "a list of 2, each a word"),
        ("Qwen3 8B", "num_attention_heads", -4, "a positive integer"),
        ("Qwen3 8B", "num_key_value_heads", 0, "a positive integer"),
        ("Qwen3 8B", "rms_norm_eps", math.nan, "a finite number above 0"),
        ("Qwen3 8B", "rope_theta", 0, "a finite number above 0"),
        ("Qwen3 8B", "rope_theta", 1, "a finite number above 0, other than 1"),
        ("Qwen3 8B", "rope_theta", "1000000", "a finite number above 0"),
        ("Qwen3 8B", "rope_scaling", [4.0], "an object or null"),
        ("Qwen3 8B", "head_dim", 127, "an even number"),
        ("Qwen3 8B", "torch_dtype", "bf16", "one of auto, bfloat16, float16, float32, float64, or null"),
        ("Qwen3 8B", "dtype", 16, "one of auto, bfloat16, float16, float32, float64, or null"),
        ("dots.llm1", "n_group", 3, "groups of one size, and enough of them"),
        ("dots.llm1", "topk_group", 5, "groups of one size, and enough of them"),
        ("Qwen3 30B A3B", "num_experts_per_tok", 9, "expected at most all of them"),
        ("Qwen3 30B A3B", "num_experts", 0, "a positive integer"),
        ("Mixtral 8x7B", "num_local_experts", 0, "0 experts; expected at least one"),
        ("Hunyuan A13B", "moe_topk", [3], "a list of 2, each a positive integer"),
        ("K-EXAONE 236B A23B", "mlp_layer_types", ["dense"], "a list of 2, each a word"),
        ("Llama 3.2 1B", "num_key_value_heads", 2.0, "a positive integer"),
    ],
)
def test_a_number_that_no_forward_takes_is_told_with_what_was_expected(
    name: str, place: str, value: Any, words: str
) -> None:
    refusal = told(changed(PUBLISHED[name], (place,), value))
    assert refusal is not None
    assert words in refusal
    assert place in refusal or words.endswith("number") or "expert" in refusal


@pytest.mark.parametrize(
    ("key", "value"), [("factor", 0), ("beta_fast", -1), ("original_max_position_embeddings", 0.5)]
)
def test_numbers_of_angles_are_told_by_their_place(key: str, value: Any) -> None:
    refusal = told(PUBLISHED["Qwen3 8B"] | {"rope_scaling": YARN | {key: value}})
    assert refusal is not None
    assert f"rope_scaling.{key} = {value!r}; expected" in refusal


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *((kind, key) for kind in ("llama", "bamba") for key in (*OF_ATTENTION, "num_hidden_layers")),
        ("nemotron_h", "layers_block_type"),
        *((kind, key) for kind, form in ARCHITECTURES.items() if form.latent for key in form.latent.needed),
    ],
)
def test_a_size_that_is_left_to_a_class_is_asked_for_by_its_key(kind: str, key: str) -> None:
    config = tiny_config(kind).to_dict()
    assert told(config) is None
    del config[key]
    assert f"config.json has no {key}; expected the one" in str(told(config))


@pytest.mark.parametrize(
    ("key", "value"), [("mla_use_nope", False), ("moe_layer_freq", 2), ("moe_router_activation_func", "softmax")]
)
def test_what_kimi_linear_s_class_takes_for_granted_is_asked_for(key: str, value: Any) -> None:
    config = tiny_config("kimi_linear").to_dict()
    assert f"{key} = {value!r}; expected" in str(told(config | {key: value}))


@pytest.mark.parametrize("numbers", [None, 5, [], [1], [1, 3, 5], [1, 2], ["1", 3]])
def test_kimi_linear_s_layers_are_each_numbered_once(numbers: Any) -> None:
    config = tiny_config("kimi_linear").to_dict() | {"layer_types": None}
    assert told(config) is None
    linear = config["linear_attn_config"] | {"kda_layers": numbers}
    assert "expected each number from 1 to 4 in one of" in str(told(config | {"linear_attn_config": linear}))


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_no_key_has_to_be_there_for_a_config_to_be_told_in_a_line(kind: str) -> None:
    config = tiny_config(kind).to_dict()
    for key in config:
        told({name: value for name, value in config.items() if name != key})


def test_the_activations_are_those_of_transformers() -> None:
    assert set(ACT2CLS) == KNOWN_ACTIVATIONS


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_published_config_is_refused_for_its_numbers(name: str) -> None:
    assert told(PUBLISHED[name]) is None


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PUBLISHED)
def test_whatever_a_number_is_replaced_by_it_is_taken_or_refused_in_a_line(name: str) -> None:
    for place in places(PUBLISHED[name]):
        for value in ODD:
            told(changed(PUBLISHED[name], place, value))


def dies(folder: Path, config: dict[str, Any]) -> str | None:
    """Return how a worker fails with a config that `inspect` accepts, if it does."""
    (folder / "config.json").write_text(json.dumps(config))
    found = inspect_model(str(folder))
    assert found.model_dump_json()
    if found.refusal is not None:
        return None
    try:
        target = TargetModel.load(locate_model(str(folder)), "float32", "cpu")
        target.logits(target.read(target.new_cache(8), [3, 4, 5]))
    except Exception as error:  # any error is a finding
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_inspect_calls_runnable_is_loaded_whatever_its_numbers_are(kind: str, tmp_path: Path) -> None:
    tiny_model(tiny_config(kind, has_wide_heads=True)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert dies(tmp_path, config) is None
    rules = {**RULES, **ANGLES, **PER_LAYER, **ARCHITECTURES[kind].own_rules(), **ARCHITECTURES[kind].rules}
    for place in places(config):
        for value in ODD:
            error = dies(tmp_path, changed(config, place, value))
            if rules.get(place[-1]):
                assert error is None or any(words in error for words in NOT_OF_NUMBERS), (place, value, error)
            else:  # which no token depends on, though the class may look at its type
                assert error is None or (error.startswith("model ") and "\n" not in error), (place, value, error)


@pytest.mark.parametrize("name", ["Qwen3 8B", "Phi 3.5 MoE"])
def test_a_worker_loads_what_inspect_calls_runnable(name: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**copy.deepcopy(PUBLISHED[name]))
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    for place in places(PUBLISHED[name]):
        assert dies(tmp_path, changed(PUBLISHED[name], place, None)) is None, place


def test_a_model_may_say_null_for_the_layers_that_it_has_no_more_of() -> None:
    """`transformers` writes null there for Mellum."""
    config = WITH_EXPERTS["Mellum 2 12B A2.5B"] | {"num_nextn_predict_layers": None}
    assert what_refuses(config, NOWHERE) is None
