"""The kinds of dense decoders that our kernels run, each by what it does otherwise than Llama. Without torch."""

from __future__ import annotations

from dataclasses import replace

from swiftbatch.worker.kernels.layer_specs import Activation, NormForm
from swiftbatch.worker.model.architectures.attention_layers import (
    TypesOrPattern,
    by_layer_types,
    by_no_rope_layers,
    where_switched_on,
    window_in_all_layers,
    window_in_all_layers_if_said,
    without_windows,
    without_windows_if_said,
)
from swiftbatch.worker.model.architectures.hybrid_models import HYBRID_ARCHITECTURES
from swiftbatch.worker.model.architectures.moe_models import MOE_ARCHITECTURES
from swiftbatch.worker.model.architectures.spec import (
    ACTIVATIONS,
    ALWAYS,
    AROUND,
    AROUND_PARTS,
    BEHIND,
    COHERE,
    GRANITE,
    HUNYUAN,
    OLMO2,
    ArchitectureSpec,
    WindowAngles,
)

FUSED_QUERIES = dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj")
FUSED_GATES = dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")
IN_ALL = ("attention_bias", "attention_bias", "mlp_bias")
GEMMA_SOFTCAPS = {"scores": "attn_logit_softcapping", "logits": "final_logit_softcapping"}
GEMMA2 = ArchitectureSpec(
    "attention_bias",
    "attention_bias",
    norms=AROUND_PARTS,
    norm_form=NormForm.ONE_MORE,
    activation_key="hidden_activation",
    scales_by_width=True,
    scales={"score_width": "query_pre_attn_scalar"},
    caps=GEMMA_SOFTCAPS,
    windows=TypesOrPattern(2, None),
    unused=("sliding_window_size",),
)
DECODER_ARCHITECTURES: dict[str, ArchitectureSpec] = {
    "apertus": ArchitectureSpec(
        "attention_bias",
        "attention_bias",
        has_qk_norms=True,
        norms={"input_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
        activations={"xielu": Activation.XIELU},
        has_gates=False,
        curve=tuple(f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")),
    ),
    "arcee": ArchitectureSpec(*IN_ALL, has_gates=False),
    "cohere": replace(COHERE, qk_norms_key="use_qk_norm", qk_norms_differ=True, unused=("model_max_length",)),
    "cohere2": replace(COHERE, windows=TypesOrPattern(4), still=without_windows, unused=("layer_switch",)),
    "ernie4_5": ArchitectureSpec("use_bias", "use_bias", "use_bias", is_interleaved=True),
    "cwm": ArchitectureSpec(mlp_bias="mlp_bias", windows=by_layer_types),
    "exaone4": ArchitectureSpec(
        has_qk_norms=True,
        norms=BEHIND,
        windows=by_layer_types,
        still=without_windows_if_said,
        unused=("sliding_window_pattern",),
    ),
    "gemma": ArchitectureSpec(
        "attention_bias",
        "attention_bias",
        norm_form=NormForm.ONE_MORE,
        activations={**ACTIVATIONS, "gelu": Activation.GELU_TANH},
        scales_by_width=True,
    ),
    "gemma2": GEMMA2,
    "gemma3_text": replace(
        GEMMA2,
        has_qk_norms=True,
        windows=TypesOrPattern(6),
        window_angles=WindowAngles(1e6, 1e4, "rope_local_base_freq"),
        unused=("_sliding_window_pattern",),
    ),
    "glm": ArchitectureSpec("attention_bias", is_interleaved=True, partial_rotary_factor=0.5, names=FUSED_GATES),
    "glm4": ArchitectureSpec(
        "attention_bias", is_interleaved=True, partial_rotary_factor=0.5, names=FUSED_GATES, norms=AROUND
    ),
    "granite": ArchitectureSpec(*IN_ALL, scales=GRANITE),
    "helium": ArchitectureSpec("attention_bias", None, "mlp_bias", is_interleaved=True, norm_form=NormForm.ONCE),
    "hunyuan_v1_dense": HUNYUAN,
    "internlm3": ArchitectureSpec("qkv_bias", "bias", "bias"),
    "iquestcoder": ArchitectureSpec(*IN_ALL),
    "jais2": ArchitectureSpec(*IN_ALL, norm_form=NormForm.SHIFTED, has_gates=False, epsilon_key="layer_norm_eps"),
    "llama": ArchitectureSpec(*IN_ALL),
    "ministral": ArchitectureSpec(windows=by_layer_types),
    "ministral3": ArchitectureSpec(windows=window_in_all_layers_if_said, growth_key="llama_4_scaling_beta"),
    "mistral": ArchitectureSpec(windows=window_in_all_layers),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, windows=TypesOrPattern(4, None), window_angles=WindowAngles(5e5, 5e5)),
    "phi3": ArchitectureSpec(
        partial_rotary_factor=1.0,
        names=FUSED_QUERIES | FUSED_GATES,
        has_long_angles=True,
        windows=window_in_all_layers_if_said,
        unused=("full_attn_mod", "interpolate_factor"),
    ),
    "qwen2": ArchitectureSpec(ALWAYS, windows=where_switched_on),
    "qwen3": ArchitectureSpec("attention_bias", "attention_bias", has_qk_norms=True, windows=where_switched_on),
    "seed_oss": ArchitectureSpec("attention_bias", "attention_out_bias", "mlp_bias"),
    "starcoder2": ArchitectureSpec(
        "use_bias",
        "use_bias",
        "use_bias",
        names={"up": "mlp.c_fc", "down": "mlp.c_proj"},
        norm_form=NormForm.SHIFTED,
        has_gates=False,
        windows=window_in_all_layers_if_said,
        epsilon_key="norm_epsilon",
        unused=("layer_norm_epsilon",),
    ),
    "smollm3": ArchitectureSpec(*IN_ALL, still=by_no_rope_layers),
    "vaultgemma": replace(GEMMA2, norms={"input_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}),
}
DECODER_ARCHITECTURES |= MOE_ARCHITECTURES | HYBRID_ARCHITECTURES
