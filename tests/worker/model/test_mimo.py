"""MiMo-V2-Flash gives transformers' texts, though its values are narrower than its keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.causal_lm import load_causal_lm
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.model.formats.twins import logits_of
from tests.worker.model.kind_promises import check_config_is_refused, check_texts_are_those_of_transformers, loaded
from tests.worker.model.mimo_configs import MIMO, write_mimo

pytestmark = [pytest.mark.long, needs_kernels]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    write_mimo(found)
    return found


def test_logits_and_greedy_texts_are_those_of_transformers(folder: Path) -> None:
    target = loaded(folder, "float32")
    kinds = load_causal_lm(target.files, torch.float32).config.layer_types
    assert [each == "sliding_attention" for each in kinds] == list(map(bool, MIMO["hybrid_layer_pattern"]))
    check_texts_are_those_of_transformers(target)


@pytest.mark.parametrize("part", ["1.self_attn.attention_sink_bias", "6.self_attn.v_proj.weight"])
def test_sinks_and_values_change_logits(part: str, folder: Path, tmp_path: Path) -> None:
    """So tests of logits would notice their absence."""
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.{part}"] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(MIMO))
    ours, theirs = (logits_of(loaded(each, "float32")) for each in (tmp_path, folder))
    assert not torch.allclose(ours, theirs, atol=1e-2)


def test_a_gpu_runs_it(folder: Path) -> None:
    found = inspect_model(str(folder))
    assert found.cuda is not None
    assert (found.cuda.name, bool(found.slots)) == ("kernels", True)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"add_swa_attention_sink_bias": False}, "its add_swa_attention_sink_bias is False"),
        ({"add_full_attention_sink_bias": True}, "its add_full_attention_sink_bias is True"),
        ({"swa_num_key_value_heads": 1}, "its swa_num_key_value_heads is 1, and 2 is expected"),
        ({"swa_head_dim": 64}, "its swa_head_dim is 64, and 96 is expected"),
        ({"swa_num_attention_heads": 8}, "its swa_num_attention_heads is 8"),
        ({"v_head_dim": 112, "swa_v_head_dim": 112}, "its v_head_dim is 112, beside heads of 96"),
        ({"scoring_func": "softmax"}, "its scoring_func is 'softmax'"),
        ({"n_shared_experts": 1}, "its n_shared_experts is 1"),
        ({"hybrid_layer_pattern": [0, 1]}, "layer_types = .*; expected a list of 7"),
        ({"hybrid_layer_pattern": [2] * 7}, "layer_types"),
        ({"hybrid_layer_pattern": 2}, "hybrid_layer_pattern"),
        ({"layer_types": ["full_attention"] * 7}, "hybrid_layer_pattern, which may change a layer"),
        ({"attention_value_scale": None}, "attention_value_scale = None; expected a finite number"),
        ({"sliding_window_size": "40"}, "sliding_window = '40'"),
        ({"value_shift": 2}, "value_shift, which may change a layer"),
    ],
)
def test_other_forms_are_refused_in_a_line(said: dict[str, Any], reason: str, tmp_path: Path) -> None:
    check_config_is_refused(tmp_path, MIMO | said, reason)


def test_a_config_is_read_as_its_class_writes_it(folder: Path, tmp_path: Path) -> None:
    written = AutoConfig.for_model(**MIMO)
    written.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert compare(loaded(tmp_path, "float32")).agrees
