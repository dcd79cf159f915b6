"""The architectures of GGUF that are read here: the kind of each, what its config says, and its tensors' names.

Names and numbers are those of `transformers`' own loader, and, where that leaves out what changes a forward, of
llama.cpp, which writes these files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftbatch.worker.model.text_config import EMBEDDING, HEAD

Config = dict[str, Any]

SIZES = {  # keys of all architectures, behind their names
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
WHOLE = {"token_embd.weight": EMBEDDING, "output.weight": HEAD, "output_norm.weight": "model.norm.weight"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",  # one behind the other, each a tensor of its own
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
NORMS_BEHIND = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """One architecture, as a kind of `transformers`."""

    kind: str
    fixed: Config  # what its config says in every model
    said: Mapping[str, str] = field(default_factory=dict)  # beside `SIZES`
    unsaid: Config = field(default_factory=dict)  # what keys of `said` are where a file leaves them out
    names: Mapping[str, str] = field(default_factory=dict)  # beside `LAYER`, or in place of one
    has_paired_heads: bool = False  # rows of queries and keys that are turned together lie side by side
    has_raised_norms: bool = False  # norms are stored with the one that the kind adds to them


SILU = {"hidden_act": "silu"}
NO_BIASES = {"attention_bias": False, "mlp_bias": False}
GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
WINDOW = {"attention.sliding_window": "sliding_window"}
SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
MIXTURE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
SPARSE = {**SILU, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
ARCHITECTURES = {
    "gemma": Architecture("gemma", GELU, has_raised_norms=True),
    "gemma2": Architecture(
        "gemma2",
        GELU,
        said=WINDOW | SOFTCAPS,
        unsaid={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        names=NORMS_BEHIND,
        has_raised_norms=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        GELU,
        said=WINDOW | SOFTCAPS,
        unsaid={"attn_logit_softcapping": None, "final_logit_softcapping": None},
        names=NORMS_BEHIND,
        has_raised_norms=True,
    ),
    "granite": Architecture("granite", SILU | NO_BIASES, said=GRANITE_SCALES, has_paired_heads=True),
    "llama": Architecture("llama", SILU | NO_BIASES, said=WINDOW, unsaid={"sliding_window": 0}, has_paired_heads=True),
    "phi3": Architecture(
        "phi3",
        SILU,
        said=WINDOW,
        unsaid={"sliding_window": 0},
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "qwen2": Architecture("qwen2", SILU | {"use_sliding_window": False}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        SPARSE | {"norm_topk_prob": False, "qkv_bias": True},
        said=MIXTURE | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        names=EXPERTS,
    ),
    "qwen3": Architecture("qwen3", SILU | {"attention_bias": False, "use_sliding_window": False}),
    "qwen3moe": Architecture(
        "qwen3_moe", SPARSE | {"norm_topk_prob": True, "attention_bias": False}, said=MIXTURE, names=EXPERTS
    ),
    "smollm3": Architecture("smollm3", SILU | NO_BIASES | {"use_sliding_window": False}, has_paired_heads=True),
}
