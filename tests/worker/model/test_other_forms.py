"""The kernels read other decoders' configs and give transformers' logits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.decoder_config import OtherDecoderError, read_decoder_config
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.text_config import text_view
from tests.worker.kernels.kernel_parts import chain
from tests.worker.kernels.reference import ReferenceDecoder
from tests.worker.model.dense_configs import EVERYWHERE, LLAMA
from tests.worker.model.llama_like_configs import LIKE_LLAMA
from tests.worker.model.other_layer_configs import OTHER_LAYERS
from tests.worker.model.test_dense_loading import saved

CPU = torch.device("cpu")

OTHER_FORMS = LIKE_LLAMA | OTHER_LAYERS
OTHER_FORMS |= {  # keys as their classes name them
    "VaultGemma 1B": {key: value for key, value in OTHER_LAYERS["Gemma 2 27B"].items() if key != "sliding_window_size"}
    | {"architectures": ["VaultGemmaForCausalLM"], "model_type": "vaultgemma"},
    "Jais 2 8B": EVERYWHERE
    | {
        "architectures": ["Jais2ForCausalLM"],
        "attention_bias": True,
        "head_dim": 64,
        "hidden_act": "relu2",
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 8192,
        "mlp_bias": True,
        "model_type": "jais2",
        "rope_theta": 500000.0,
    },
    "IQuest Coder 40B": LLAMA | {"head_dim": 128, "model_type": "iquestcoder", "rope_theta": 500000.0},
    "InternLM3 8B, without its long positions": EVERYWHERE
    | {
        "architectures": ["InternLM3ForCausalLM"],
        "bias": False,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "model_type": "internlm3",
        "qkv_bias": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000000,
    },
}


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize("name", OTHER_FORMS)
def test_dense_decoders_by_other_names_say_in_our_kernels_what_transformers_says(name: str, tmp_path: Path) -> None:
    config = OTHER_FORMS[name] | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    files = saved(tmp_path, AutoConfig.for_model(**config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights, token_ids = dense_weights(files, torch.float32), [(7 * i + 3) % 64 for i in range(64)]
    assert weights is not None
    expected = load_causal_lm(files, torch.float32)(input_ids=torch.tensor([token_ids])).logits[0]
    sizes = weights.sizes
    cache = FullKVCache(CacheShape(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, torch.float32, CPU), 128)
    found = ReferenceDecoder(weights).forward([chain(cache, token_ids)])[1]
    assert found is not None
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_window_that_hides_nothing_of_the_longest_text_is_none() -> None:
    """Ministral 8B is published so."""
    config = OTHER_FORMS["Mistral 7B v0.1"]
    longest = config["max_position_embeddings"]
    assert read_decoder_config(config | {"sliding_window": longest}).windows == (None, None)
    assert read_decoder_config(config | {"sliding_window": longest - 1}).windows == (longest - 1,) * 2


def test_a_window_that_is_left_to_a_default_is_named() -> None:
    for name, key in (("Mistral 7B v0.1", "sliding_window"), ("Qwen3 with windows", "max_window_layers")):
        config = {each: value for each, value in OTHER_FORMS[name].items() if each != key}
        with pytest.raises(OtherDecoderError, match=f"{key} is left to a default"):
            read_decoder_config(config)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("GLM-4 9B", {"partial_rotary_factor": 0.0}, "its partial_rotary_factor is 0.0"),
        ("SmolLM3 3B", {"no_rope_layers": [1, 2]}, "its no_rope_layers do not tell of each layer"),
        ("SmolLM3 3B", {"no_rope_layers": [1]}, "its no_rope_layers do not tell of each layer"),
        ("SmolLM3 3B", {"no_rope_layers": None}, "its no_rope_layers do not tell of each layer"),
        ("Granite 3.3 8B", {"residual_multiplier": "0.22"}, "its residual_multiplier is '0.22'"),
        ("Granite 3.3 8B", {"logits_scaling": 0}, "its logits_scaling is 0"),
        ("Granite 4.0 micro, whose layers all attend", {"num_local_experts": 4}, "found 0 of 4 experts for a row"),
        (
            "Granite 4.0 micro, whose layers all attend",
            {"position_embedding_type": "learned"},
            "its position_embedding_type",
        ),
        ("Phi-4", {"sliding_window": 0}, "its sliding_window is 0"),
        ("Phi-4", {"sliding_window": True}, "its sliding_window is True"),
        ("Seed-OSS 36B", {"sliding_window": 4096}, "its sliding_window is 4096"),
        ("CWM", {"layer_types": ["full_attention"]}, "its layer_types do not tell of each layer"),
        ("CWM", {"layer_types": ["full_attention", "chunked_attention"]}, "its layers have chunked_attention"),
        ("CWM", {"layer_types": None}, "its layer_types do not tell of each layer"),
        ("Phi-3 mini 4K", {"layer_types": ["sliding_attention"] * 2}, "its layers have sliding_attention"),
        ("Phi-4", {"hidden_act": "gelu"}, "its hidden_act is 'gelu'"),
        ("EXAONE 4.0 32B", {"sliding_window": 0}, "its sliding_window is 0"),
        ("EXAONE 4.0 32B", {"layer_types": None}, "its layer_types do not tell of each layer"),
        ("OLMo 3 7B", {"rope_parameters": {"rope_theta": 1.0}}, "of each type of layers"),
        ("Gemma 2 27B", {"attn_logit_softcapping": 0}, "its attn_logit_softcapping is 0"),
        ("Gemma 2 27B", {"query_pre_attn_scalar": "256"}, "its query_pre_attn_scalar is '256'"),
        ("Command R7B", {"rotary_pct": 0.5}, "its rotary_pct is 0.5"),
        ("Apertus 8B", {"hidden_act": "silu"}, "its hidden_act is 'silu'"),
        ("Gemma 2B, whose head is tied by default", {"use_bidirectional_attention": True}, "its use_bidirectional"),
        ("Gemma 3 1B, as it was published", {"sliding_window_pattern": 0}, "its sliding_window_pattern is 0"),
        ("Gemma 3, as transformers writes it", {"rope_parameters": {"rope_theta": 1.0}}, "of each type of layers"),
        ("Gemma 2B, whose head is tied by default", {"hidden_act": "quick_gelu"}, "its hidden_act is 'quick_gelu'"),
    ],
)
def test_what_the_kernels_do_not_take_is_named(name: str, change: dict[str, Any], words: str) -> None:
    read_decoder_config(text_view(OTHER_FORMS[name]))
    with pytest.raises(OtherDecoderError, match=re.escape(words)):
        read_decoder_config(text_view(OTHER_FORMS[name] | change))
