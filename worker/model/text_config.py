"""The text model of a published config: one view for everything that reads a config or a tensor's name.

Models of text and images keep the text model's keys in `text_config`, and its tensors behind a prefix. Some kinds are
another kind by a name of their own. Layers that predict further tokens (MTP) and towers for images change no text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from swiftbatch.worker.model.config_value_rules import OF_LINEAR_ATTENTION
from swiftbatch.worker.model.layer_types import layer_types

Config = Mapping[str, Any]

NESTING = {  # kinds of whole models that were held against transformers' own, and the kind of text that they default to
    "gemma3": "gemma3_text",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
SAME_AS = {  # kinds whose text model is that of another kind, in layers and names
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
LEFT_OUT: dict[str, dict[str, Any]] = {  # what published configs leave to the class of their kind
    "cohere": {"tie_word_embeddings": True, "use_qk_norm": False},
    "cohere2": {"tie_word_embeddings": True},
    "ernie4_5_moe": {"moe_norm_min": 1e-12, "tie_word_embeddings": True},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
    },
    "lfm2": {"tie_word_embeddings": True},
    "lfm2_moe": {"tie_word_embeddings": True},
    "starcoder2": {"tie_word_embeddings": True},
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "qwen2_moe": {"qkv_bias": True},
    "nemotron_h": {"head_dim": 128, "layer_norm_epsilon": 1e-5, "moe_latent_size": None},
    "vaultgemma": {"tie_word_embeddings": True},
}
NAMED_OTHERWISE = {  # keys of kinds that have names of their own for what others say
    "kimi_linear": {
        "model_max_length": "max_position_embeddings",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
}
OF_THE_WHOLE = ("quantization_config", "compression_config", "eos_token_id", "tie_word_embeddings")
OF_IMAGES = ("mrope_interleaved", "mrope_section")  # positions of texts are the same in all three directions
OTHER_TOWERS = re.compile(
    r"^(?:model\.)?(?:visual|vision_\w+|multi_modal_projector|mm_projector|audio_\w+|embed_(?:vision|audio))\."
)
PREDICTORS = re.compile(r"^(?:model\.)?(?:mtp|mtp_layers|nextn_predict_layers)\.")
TRANSPOSED_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")
WHOLE_DECODER, LAYER = re.compile(r"^model\.language_model\."), re.compile(r"^model\.layers\.(\d+)\.")
HEAD, HEAD_BIAS, EMBEDDING = "lm_head.weight", "lm_head.bias", "model.embed_tokens.weight"
OWN_DECODER = re.compile(r"^backbone\.")
OWN_EMBEDDING = {"nemotron_h": "model.embeddings.weight"}  # of kinds whose classes have another name for it


def text_view(config: Config) -> dict[str, Any]:
    """The config of a model's text part, as if it were published alone, under the kind whose layers it has."""
    view, kind = dict(config), config.get("model_type")
    if nested := nested_config(config):
        whole = {key: config[key] for key in OF_THE_WHOLE if key in config}
        kind = nested.get("model_type") or NESTING.get(str(kind))
        view = whole | nested | {key: value for key, value in whole.items() if key == "tie_word_embeddings"}
    view["model_type"] = SAME_AS.get(kind, kind) if isinstance(kind, str) else kind
    for own, key in NAMED_OTHERWISE.get(str(view["model_type"]), {}).items():
        if own in view:
            view[key] = view.pop(own)
    if isinstance(said := view.get("linear_attn_config"), dict):
        view = {key: said[own] for own, key in OF_LINEAR_ATTENTION.items() if own in said} | view
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(said := view.get(key), dict):
            view[key] = {name: value for name, value in said.items() if name not in OF_IMAGES}
    if view["model_type"] == "nemotron_h" and "num_hidden_layers" not in view and (types := layer_types(view)):
        view["num_hidden_layers"] = len(types)
    return LEFT_OUT.get(str(view["model_type"]), {}) | view


def nested_config(config: Config) -> dict[str, Any]:
    """The config of the text model within that of a whole one; empty where there is none."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def is_another(config: Config) -> bool:
    """Tell whether the text model is another one than the class of the whole config makes."""
    return bool(nested_config(config)) or config.get("model_type") in SAME_AS


def text_name(name: str, config: Config) -> str | None:
    """The name of a stored tensor in the text model of this view; None for one that changes no text.

    A layer behind the last one is passed over only where the config counts it among those that predict further tokens.
    """
    if OTHER_TOWERS.match(name) or PREDICTORS.match(name):
        return None
    name = WHOLE_DECODER.sub("model.", name).removeprefix("language_model.")
    if (own := OWN_EMBEDDING.get(str(config.get("model_type")))) is not None:
        name = OWN_DECODER.sub("model.", name)
        name = EMBEDDING if name == own else name
    if number := LAYER.match(name):
        num_layers = config.get("num_hidden_layers") or 0
        num_predictors = config.get("num_nextn_predict_layers") or 0
        return None if num_layers <= int(number[1]) < num_layers + num_predictors else name
    return name


def class_name(name: str, config: Config) -> str:
    """The name that the class of this view's kind has for a tensor, by its name in the text model."""
    return OWN_EMBEDDING.get(str(config.get("model_type")), name) if name == EMBEDDING else name


def is_of_text(name: str, config: Config) -> bool:
    """Tell whether a stored tensor takes memory in the text model of this view."""
    known = text_name(name, config)
    return known is not None and not (known == HEAD and bool(config.get("tie_word_embeddings")))


def is_transposed(name: str, shape: tuple[int, ...], config: Config) -> bool:
    """Tell whether a model, by its whole config, stores this tensor of experts with rows for columns.

    As it was published; newer versions of `transformers` write it as its layers have it. Where a width is the same in
    both directions, it is taken as published.
    """
    nested = nested_config(config)
    if nested.get("model_type") != "qwen3_vl_moe_text" or not (found := TRANSPOSED_EXPERTS.search(name)):
        return False
    hidden, width = nested.get("hidden_size"), nested.get("moe_intermediate_size")
    stored = (hidden, 2 * width) if found[1] == "gate_up" and isinstance(width, int) else (width, hidden)
    return shape[1:] == stored
