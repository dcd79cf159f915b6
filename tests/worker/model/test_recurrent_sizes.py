from __future__ import annotations

from typing import Any

import pytest

from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import MEMORY, NUM_STEPS, KVRoom, KVRoomError, bytes_per_position, state_bytes
from swiftbatch.worker.model.architectures.catalogue import attending_layers, layer_types, recurrent_shape
from tests.worker.model.kind_parts import WITH_STATES, tiny_target

QWEN35 = {  # Qwen3.5-27B as published
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 64,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 5120,
}


@pytest.mark.parametrize("kind", WITH_STATES)
def test_a_config_tells_the_sizes_that_a_model_has(kind: str) -> None:
    target = tiny_target(kind)
    config = target.model.config.to_dict()
    assert recurrent_shape(config) == target.cache_shape.recurrent
    assert bytes_per_position(config, "float32") == target.cache_shape.bytes_per_position()
    assert state_bytes(config, "float32") == target.cache_shape.state_bytes() > 0
    cache = target.new_cache(100)
    assert taken_by(cache) < target.cache_shape.state_bytes()
    cache.layer_states.reserve(NUM_STEPS)
    most = pytest.approx(target.cache_shape.state_bytes(), rel=0.02)  # plus the last inputs
    assert taken_by(cache) == most, "the largest tree takes no more than a job is counted with"


def taken_by(cache: FullKVCache) -> int:
    taken = cache.layer_states.layers
    tensors = [[layer.state, layer.base, layer.keys, layer.updates, layer.decays, layer.inputs] for layer in taken]
    return sum(each.nbytes for parts in tensors for each in parts)


def test_the_states_of_a_published_model_are_counted() -> None:
    shape = recurrent_shape(QWEN35)
    assert shape is not None
    assert shape.state_bytes == 150_994_944
    assert shape.checkpoint_bytes(2) == 153_944_064
    assert state_bytes(QWEN35, "bfloat16") == 958_660_608
    assert bytes_per_position(QWEN35, "bfloat16") == 65_536


@pytest.mark.parametrize(
    ("config", "num_attending", "num_layers"),
    [
        ({"model_type": "qwen3_next", "num_hidden_layers": 8}, 2, 8),
        ({"model_type": "qwen3_next", "num_hidden_layers": 8, "full_attention_interval": 2}, 4, 8),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*ME", "num_hidden_layers": 6}, 1, 6),
        ({"model_type": "falcon_h1", "num_hidden_layers": 3}, 3, 3),
        ({"model_type": "bamba", "num_hidden_layers": 5, "attn_layer_indices": [2, 4]}, 2, 5),
        ({"model_type": "bamba", "num_hidden_layers": 5}, 0, 5),
        ({"model_type": "granitemoehybrid", "num_hidden_layers": 5}, 0, 5),
        ({"model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [1]}, 1, 4),
    ],
)
def test_layers_are_told_from_what_each_kind_writes(
    config: dict[str, Any], num_attending: int, num_layers: int
) -> None:
    assert len(attending_layers(config)) == num_attending
    assert len(layer_types(config) or ()) == num_layers


def test_a_plain_model_has_no_states() -> None:
    plain = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    assert layer_types(plain) is None
    assert len(attending_layers(plain)) == 4
    assert state_bytes(plain, "float32") == 0


def test_a_job_is_refused_where_its_states_have_no_room() -> None:
    free = KVRoom(MEMORY, 1).free_bytes()
    KVRoom(MEMORY, 1, state_bytes=1000).refuse_too_long(10)
    with pytest.raises(KVRoomError, match="cannot allocate the key-value cache: 10 positions need"):
        KVRoom(MEMORY, 1, state_bytes=int(2 * free)).refuse_too_long(10)


def test_sizes_that_are_no_numbers_are_none() -> None:
    assert recurrent_shape(QWEN35) is not None
    assert recurrent_shape(QWEN35 | {"linear_conv_kernel_dim": "4"}) is None
    assert layer_types({"model_type": "nemotron_h", "hybrid_override_pattern": 5}) is None
