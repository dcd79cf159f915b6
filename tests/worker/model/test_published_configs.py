"""The config.json files that models are published with: which are understood without transformers, and what they give.

Keys and values as they stand there; widths, layers, vocabularies and windows are cut down, so that weights can be made
and windows are shorter than texts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.caches.full import CacheShape, FullKVCache
from swiftbatch.worker.caches.memory.model_sizes import read_sizes
from swiftbatch.worker.kernels.decoder_weights import DecoderWeights, decoder_weights
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.dense import dense_weights
from swiftbatch.worker.model.dense_config import OtherDecoderError, read_dense
from swiftbatch.worker.model.files import ModelFiles
from swiftbatch.worker.model.text_view import text_view
from swiftbatch.worker.target.target import TargetModel
from tests.worker.kernels.kernel_parts import chain
from tests.worker.kernels.reference import ReferenceDecoder
from tests.worker.model.test_dense import files_in, saved

BF16, CPU = torch.bfloat16, torch.device("cpu")
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
SMALL = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "vocab_size": 64}
EVERYWHERE = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    **SMALL,
}
LLAMA = EVERYWHERE | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "transformers_version": "4.42.3",
}
QWEN25 = EVERYWHERE | {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "transformers_version": "4.43.1",
    "use_sliding_window": False,
}
MISTRAL = EVERYWHERE | {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "rms_norm_eps": 1e-05,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B Instruct": LLAMA | {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "Llama 3.2 1B": LLAMA
    | {"head_dim": 64, "tie_word_embeddings": True, "rope_scaling": LLAMA3 | {"factor": 32.0}, "rope_theta": 500000.0},
    "Llama 3.1 as newer versions save it": LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
    "Mistral 7B v0.3": MISTRAL
    | {"rope_theta": 1000000.0, "sliding_window": None, "transformers_version": "4.42.0.dev0"},
    "Mistral 7B v0.1": MISTRAL | {"rope_theta": 10000.0, "sliding_window": 40, "transformers_version": "4.34.0.dev0"},
    "Qwen2.5 7B Instruct": QWEN25,
    "Qwen2 with windows from a layer on": QWEN25
    | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "Qwen2 with windows as newer versions save them": QWEN25
    | {
        "use_sliding_window": True,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Qwen2.5 7B": QWEN25 | {"eos_token_id": 151643, "max_position_embeddings": 131072, "use_mrope": False},
    "Qwen2.5 7B Instruct above 32,768 positions": QWEN25 | {"rope_scaling": YARN},
    "MiMo 7B, which is Qwen2 with a layer more": QWEN25
    | {
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "head_dim": 64,
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
        "rope_theta": 640000,
        "use_mrope": False,
    },
    "Llama 3.1 8B with words of tools": LLAMA
    | {
        "_attn_implementation": "flash_attention_2",
        "auto_map": {"AutoConfig": "configuration.Config"},
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "transformers.js_config": {"dtype": {"model": "q4"}},
        "unsloth_fixed": True,
        "task_specific_params": None,
        "temperature": 1.0,
        "top_k": 50,
    },
    "Qwen3 8B": EVERYWHERE
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "transformers_version": "4.51.0",
        "use_sliding_window": False,
    },
}
LEFT: dict[str, tuple[str, dict[str, Any]]] = {  # to transformers, each from a model that is understood
    "a number that is not known": ("Qwen3 8B", {"residual_multiplier": 0.22}),
    "numbers that are not known": ("Qwen3 8B", {"layer_scales": [0.5, 0.5]}),
    "a window that is no number": ("Qwen2.5 7B Instruct", {"sliding_window": "none"}),
    "types of layers that its class does not look at": (
        "Mistral 7B v0.1",
        {"layer_types": ["full_attention", "sliding_attention"], "head_dim": 64},
    ),
    "one type of layers beside a window": ("Mistral 7B v0.1", {"layer_types": ["full_attention"] * 2, "head_dim": 64}),
    "a ramp of its own": ("Qwen2.5 7B Instruct", {"rope_scaling": YARN | {"ramp": 2.0}}),
    "no factor": ("Llama 3.1 8B Instruct", {"rope_scaling": {"rope_type": "llama3"}}),
    "a factor of 0": ("Llama 3.1 8B Instruct", {"rope_scaling": LLAMA3 | {"factor": 0}}),
    "words for numbers": ("Llama 3.1 8B Instruct", {"rope_scaling": LLAMA3 | {"factor": "8.0"}}),
    "one number more": ("Llama 3.1 8B Instruct", {"rope_scaling": LLAMA3 | {"beta_fast": 32.0}}),
    "no dictionary": ("Llama 3.1 8B Instruct", {"rope_scaling": "llama3"}),
    "a type that is a list": ("Llama 3.1 8B Instruct", {"rope_scaling": LLAMA3 | {"rope_type": ["llama3"]}}),
}
NO_MODEL = {"no factor", "a factor of 0", "words for numbers", "no dictionary", "a type that is a list"}
NO_MODEL |= {"a window that is no number"}


def folder_of(name: str, folder: Path) -> ModelFiles:
    """A random model of a published config, which lies beside the weights word by word."""
    view = {key: value for key, value in text_view(PUBLISHED[name]).items() if key != "_attn_implementation"}
    files = saved(folder, AutoConfig.for_model(**view))
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return files


def logits(weights: DecoderWeights) -> torch.Tensor:
    """Of a block behind another one, so that rows stand at positions where angles are many turns."""
    sizes = weights.sizes
    shape = CacheShape(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, sizes.dtype, CPU)
    cache, decoder, found = FullKVCache(shape, 128), ReferenceDecoder(weights), []
    for start in (0, 64):
        block = [(7 * (start + i)) % sizes.vocab for i in range(64)]
        found.append(decoder.forward([chain(cache, block)])[1])
        cache.advance(len(block))
    return torch.cat([each for each in found if each is not None])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_understood_and_gives_the_bits_of_transformers_weights(name: str, tmp_path: Path) -> None:
    files = folder_of(name, tmp_path)
    ours, theirs = dense_weights(files, BF16), decoder_weights(load_causal_lm(files, BF16))
    assert ours is not None
    assert theirs is not None
    assert ours.sizes == theirs.sizes
    assert (ours.rotary.frequencies == theirs.rotary.frequencies).all()
    assert torch.equal(logits(ours), logits(theirs))
    assert read_sizes(files, "bfloat16") is not None, "a GPU's memory can be planned"


@pytest.mark.parametrize(
    ("name", "key"), [("Llama 3.1 8B Instruct", "rope_scaling"), ("Mistral 7B v0.1", "sliding_window")]
)
def test_a_stretch_and_a_window_change_logits(name: str, key: str, tmp_path: Path) -> None:
    """So that tests of logits would see them left away."""
    files = folder_of(name, tmp_path)
    published = dense_weights(files, BF16)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | {key: None}))
    plain = dense_weights(files, BF16)
    assert published is not None
    assert plain is not None
    assert not torch.equal(logits(published), logits(plain))


@pytest.mark.parametrize("change", LEFT)
def test_what_says_more_is_left_to_transformers_and_ends_in_no_traceback(change: str, tmp_path: Path) -> None:
    name, changes = LEFT[change]
    files = folder_of(name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | changes))
    assert dense_weights(files_in(tmp_path), BF16) is None
    if change in NO_MODEL:
        with pytest.raises(ModelError, match=r"\A.*\Z"):  # in one line
            TargetModel.load(files, "bfloat16", "cpu")
    else:
        assert TargetModel.load(files, "bfloat16", "cpu").vocab_size == SMALL["vocab_size"]


OTHER_FORMS = {
    "Phi-4": EVERYWHERE
    | {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 100257,
        "embd_pdrop": 0.0,
        "eos_token_id": 100265,
        "max_position_embeddings": 16384,
        "model_type": "phi3",
        "original_max_position_embeddings": 16384,
        "pad_token_id": 0,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "transformers_version": "4.47.0",
    },
    "Seed-OSS 36B": EVERYWHERE
    | {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_out_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "mlp_bias": False,
        "model_type": "seed_oss",
        "pad_token_id": 1,
        "residual_dropout": 0.1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
        "transformers_version": "4.55.0",
    },
}


OTHER_FORMS |= {
    "GLM-4 9B": EVERYWHERE
    | {
        "architectures": ["GlmForCausalLM"],
        "attention_bias": True,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "model_type": "glm",
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "rope_theta": 10000.0,
    },
    "ERNIE 4.5 0.3B": EVERYWHERE
    | {
        "architectures": ["Ernie4_5ForCausalLM"],
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "model_type": "ernie4_5",
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    "Granite 3.3 8B": EVERYWHERE
    | {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "granite",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "Granite 4.0 micro, whose layers all attend": EVERYWHERE
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12,
        "layer_types": ["attention", "attention"],
        "logits_scaling": 10,
        "mamba_d_conv": 4,
        "mamba_n_heads": 2,
        "mamba_d_state": 8,
        "mamba_expand": 1,
        "max_position_embeddings": 131072,
        "model_type": "granitemoehybrid",
        "num_experts_per_tok": 0,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000,
        "shared_intermediate_size": 96,
        "tie_word_embeddings": True,
    },
    "SmolLM3 3B": EVERYWHERE
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "no_rope_layers": [1, 0],
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
}


OTHER_FORMS["GLM-4 9B above its positions, which scales half of each head"] = OTHER_FORMS["GLM-4 9B"] | {
    "rope_scaling": YARN
}
WINDOWED = EVERYWHERE | {"rms_norm_eps": 1e-05, "sliding_window": 20}
OTHER_FORMS |= {
    "CWM": WINDOWED
    | {
        "architectures": ["CwmForCausalLM"],
        "head_dim": 128,
        "layer_types": ["full_attention", "sliding_attention"],
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "cwm",
        "rope_scaling": LLAMA3 | {"factor": 16.0},
        "rope_theta": 1000000.0,
    },
    "Ministral": WINDOWED
    | {
        "architectures": ["MinistralForCausalLM"],
        "head_dim": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 32768,
        "model_type": "ministral",
        "rope_theta": 100000000.0,
    },
    "Mistral 7B v0.1": PUBLISHED["Mistral 7B v0.1"] | {"sliding_window": 20},
    "Phi-3 mini 4K": OTHER_FORMS["Phi-4"] | {"rope_theta": 10000.0, "sliding_window": 20},
    "Qwen3 with windows": PUBLISHED["Qwen3 8B"]
    | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
}
GEMMA3 = {
    **{key: value for key, value in EVERYWHERE.items() if key not in ("tie_word_embeddings", "hidden_act")},
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 300,
    "rms_norm_eps": 1e-06,
    "sliding_window": 20,
}
OTHER_FORMS |= {
    "GLM-4 9B 0414": EVERYWHERE
    | {
        "architectures": ["Glm4ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "model_type": "glm4",
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
    },
    "OLMo 2 7B": EVERYWHERE
    | {
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "model_type": "olmo2",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
    },
    "EXAONE 4.0 1.2B, which has no windows": EVERYWHERE
    | {
        "architectures": ["Exaone4ForCausalLM"],
        "head_dim": 64,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 65536,
        "model_type": "exaone4",
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3 | {"factor": 16.0},
        "rope_theta": 1000000,
        "sliding_window": None,
        "sliding_window_pattern": None,
        "tie_word_embeddings": True,
    },
    "Gemma 2B, whose head is tied by default": {
        **{key: value for key, value in EVERYWHERE.items() if key != "tie_word_embeddings"},
        "architectures": ["GemmaForCausalLM"],
        "attention_bias": False,
        "head_dim": 256,
        "hidden_act": "gelu",
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "model_type": "gemma",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
    },
    "Gemma 3 1B, as it was published": GEMMA3
    | {"rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window_pattern": 2, "rope_scaling": None},
    "Gemma 3 4B's text, whose positions are stretched but in windows": GEMMA3
    | {"sliding_window_pattern": 2, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "Gemma 3, as transformers writes it": GEMMA3
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    "Hunyuan 7B, without its long positions": EVERYWHERE
    | {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "attention_bias": False,
        "attention_head_dim": 128,
        "cla_share_factor": 2,
        "class_num": 0,
        "dense_list": [4096, 0],
        "eod_token_id": 3,
        "head_dim": 128,
        "im_end_id": 6,
        "max_position_embeddings": 32768,
        "mlp_bias": False,
        "model_type": "hunyuan_v1_dense",
        "norm_type": "rms",
        "num_experts": 1,
        "num_media_embeds": 257,
        "num_shared_expert": 1,
        "org_vocab_size": 64,
        "pad_id": 0,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "use_cla": False,
        "use_qk_norm": True,
    },
    "Helium 1 2B": EVERYWHERE
    | {
        "architectures": ["HeliumForCausalLM"],
        "attention_bias": False,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_type": "helium",
        "rms_norm_eps": 1e-08,
        "rope_theta": 20000.0,
    },
    "Command R": {
        **{key: value for key, value in EVERYWHERE.items() if key != "tie_word_embeddings"},
        "architectures": ["CohereForCausalLM"],
        "attention_bias": False,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "model_max_length": 131072,
        "model_type": "cohere",
        "pretraining_tp": 1,
        "rope_theta": 8000000.0,
    },
    "AFM 4.5B": EVERYWHERE
    | {
        "architectures": ["ArceeForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "relu2",
        "max_position_embeddings": 65536,
        "mlp_bias": False,
        "model_type": "arcee",
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 20.0,
            "mscale": 1.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
        },
        "rope_theta": 10000.0,
    },
}


UNTIED = {key: value for key, value in EVERYWHERE.items() if key != "tie_word_embeddings"}
OTHER_FORMS |= {  # soft caps, and positions from which queries grow, are cut down as well
    "Gemma 2 27B": {
        **{key: value for key, value in UNTIED.items() if key != "hidden_act"},
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": 2.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 3.0,
        "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "query_pre_attn_scalar": 144,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 20,
        "sliding_window_size": 20,
    },
    "OLMo 3 7B": EVERYWHERE
    | {
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 20,
    },
    "EXAONE 4.0 32B": EVERYWHERE
    | {
        "architectures": ["Exaone4ForCausalLM"],
        "head_dim": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
        "model_type": "exaone4",
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3 | {"factor": 16.0},
        "rope_theta": 1000000,
        "sliding_window": 20,
        "sliding_window_pattern": "LLLG",
    },
    "Command R+, which norms heads": OTHER_FORMS["Command R"] | {"rope_theta": 75000000.0, "use_qk_norm": True},
    "Command R7B": UNTIED
    | {
        "architectures": ["Cohere2ForCausalLM"],
        "attention_bias": False,
        "cache_implementation": "hybrid",
        "head_dim": 64,
        "layer_norm_eps": 1e-05,
        "layer_switch": 2,
        "logit_scale": 0.25,
        "max_position_embeddings": 8192,
        "model_type": "cohere2",
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rope_scaling": None,
        "rope_theta": 50000,
        "rotary_pct": 1.0,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    },
    "Apertus 8B": EVERYWHERE
    | {
        "architectures": ["ApertusForCausalLM"],
        "attention_bias": False,
        "hidden_act": "xielu",
        "hidden_dropout": 0.0,
        "max_position_embeddings": 65536,
        "mlp_bias": False,
        "model_type": "apertus",
        "post_norm": False,
        "qk_norm": True,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3,
        "rope_theta": 12000000,
    },
    "StarCoder2 7B": UNTIED
    | {
        "architectures": ["Starcoder2ForCausalLM"],
        "activation_function": "gelu",
        "attention_dropout": 0.1,
        "attention_softmax_in_fp32": True,
        "embedding_dropout": 0.1,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 16384,
        "mlp_type": "default",
        "model_type": "starcoder2",
        "norm_epsilon": 1e-05,
        "norm_type": "layer_norm",
        "residual_dropout": 0.1,
        "rope_theta": 1000000,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "sliding_window": 20,
        "use_bias": True,
    },
    "Ministral 3 8B's text": EVERYWHERE
    | {
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
    },
}


OTHER_FORMS |= {  # as their classes name the keys
    "VaultGemma 1B": {key: value for key, value in OTHER_FORMS["Gemma 2 27B"].items() if key != "sliding_window_size"}
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
    """As Ministral 8B is published: so drafts may scan its keys."""
    config = OTHER_FORMS["Mistral 7B v0.1"]
    longest = config["max_position_embeddings"]
    assert read_dense(config | {"sliding_window": longest}).windows == (None, None)
    assert read_dense(config | {"sliding_window": longest - 1}).windows == (longest - 1,) * 2


def test_a_window_that_is_left_to_a_default_is_named() -> None:
    for name, key in (("Mistral 7B v0.1", "sliding_window"), ("Qwen3 with windows", "max_window_layers")):
        config = {each: value for each, value in OTHER_FORMS[name].items() if each != key}
        with pytest.raises(OtherDecoderError, match=f"{key} is left to a default"):
            read_dense(config)


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
    read_dense(text_view(OTHER_FORMS[name]))
    with pytest.raises(OtherDecoderError, match=re.escape(words)):
        read_dense(text_view(OTHER_FORMS[name] | change))
