"""Gemma's decoders. Without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swiftbatch.worker.kernels.layer_specs import Activation, NormForm
from swiftbatch.worker.model.architectures.attention_layers import TypesOrPattern
from swiftbatch.worker.model.architectures.spec import (
    ACTIVATIONS,
    BEHIND,
    PATTERN_RULE,
    WINDOW,
    ArchitectureSpec,
    GGUFSpec,
    WindowAngles,
)
from swiftbatch.worker.model.config_values import SIZE

TIED = {"tie_word_embeddings": True}
IN_FRONT = {"mlp_norm": "pre_feedforward_layernorm", "input_norm": "input_layernorm"}
SOFTCAPS = {"scores": "attn_logit_softcapping", "logits": "final_logit_softcapping"}
SCORE_RULE = {"query_pre_attn_scalar": SIZE}
PATTERN = 6  # every sixth layer of Gemma 3 has no window
GEMMA = ArchitectureSpec(
    "attention_bias", "attention_bias", norm_form=NormForm.ONE_MORE, scales_by_width=True, defaults=TIED
)
GEMMA2 = replace(
    GEMMA,
    norms=IN_FRONT | BEHIND,
    activation_key="hidden_activation",
    scales={"score_width": "query_pre_attn_scalar"},
    caps=SOFTCAPS,
    windows=TypesOrPattern(2, None),
    known_keys=("sliding_window_size",),
    rules=SCORE_RULE,
)

GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
GGUF2 = GGUFSpec(
    "gemma2",
    GELU,
    said=WINDOW | {key: key for key in SOFTCAPS.values()},
    unsaid={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    names={
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    completed=lambda config: {"query_pre_attn_scalar": _score_width(config, num_layers_of_largest=46)},
    has_raised_norms=True,
)


def _score_width(config: dict[str, Any], num_layers_of_largest: int) -> int:
    """Return the number whose square root divides queries.

    In the largest model it is `hidden_size / num_attention_heads`.
    """
    is_largest = config["num_hidden_layers"] == num_layers_of_largest
    return int(config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"])


def _gemma3_of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    numbers = range(1, config["num_hidden_layers"] + 1)
    types = ["sliding_attention" if number % PATTERN else "full_attention" for number in numbers]
    return {"query_pre_attn_scalar": _score_width(config, num_layers_of_largest=62), "layer_types": types}


GEMMAS: dict[str, ArchitectureSpec] = {
    "gemma": replace(
        GEMMA,
        activations={**ACTIVATIONS, "gelu": Activation.GELU_TANH},
        gguf=GGUFSpec("gemma", GELU, has_raised_norms=True),
    ),
    "gemma2": replace(GEMMA2, gguf=GGUF2),
    "gemma3_text": replace(
        GEMMA2,
        has_qk_norms=True,
        windows=TypesOrPattern(PATTERN),
        window_angles=WindowAngles(1e6, 1e4, "rope_local_base_freq"),
        known_keys=("_sliding_window_pattern", "sliding_window_pattern"),
        defaults={
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
        rules=SCORE_RULE | PATTERN_RULE,
        nested_in=("gemma3",),
        gguf=replace(
            GGUF2,
            name="gemma3",
            unsaid=dict.fromkeys(SOFTCAPS.values()),
            completed=_gemma3_of_gguf,
            local_base="rope.freq_base_swa",
        ),
    ),
    "vaultgemma": replace(GEMMA2, norms=IN_FRONT),
}
