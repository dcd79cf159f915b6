from __future__ import annotations

import pytest
from transformers import Qwen3_5TextConfig, Qwen3Config

from swiftbatch.worker.training import recipes, target_evaluation, target_recipe
from swiftbatch.worker.training import train_target as target_training

SHORT_CONTEXT = {"WINDOWS": (20, 200), "SCORED_FROM": 200, "NUM_SCORED": 10, "DISTANCES": (100,), "NUM_NEEDLES": 2}


def small_config(beginning_of_text_id: int, end_of_text_id: int) -> Qwen3Config:
    config = target_recipe.embedded_config(beginning_of_text_id, end_of_text_id).to_dict()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "layer_types": None}
    return Qwen3Config(**{**config, **sizes, "num_attention_heads": 2, "num_key_value_heads": 1})


def small_hybrid_config(beginning_of_text_id: int, end_of_text_id: int) -> Qwen3_5TextConfig:
    config = target_recipe.hybrid_config(beginning_of_text_id, end_of_text_id).to_dict()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    layers = {"num_key_value_heads": 1, "layer_types": ["linear_attention", "full_attention"]}
    return Qwen3_5TextConfig(**{**config, **sizes, **layers})


def train_small_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train small models in place of the embedded one."""
    monkeypatch.setattr(target_training, "VOCAB_SIZE", 300)
    monkeypatch.setitem(target_training.CONFIGS, recipes.TARGET_KIND, small_config)
    monkeypatch.setitem(target_training.CONFIGS, "qwen3_5_text", small_hybrid_config)


def score_short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_evaluation, "STRETCH", 500)
    monkeypatch.setattr(target_evaluation, "POSITION_RANGES", ((0, 100), (100, 500)))
    for name, value in SHORT_CONTEXT.items():
        monkeypatch.setattr(target_evaluation, name, value)
