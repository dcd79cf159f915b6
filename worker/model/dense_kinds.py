"""The kinds of dense decoders that our kernels run, each by what it does otherwise than Llama. Without torch."""

from __future__ import annotations

from dataclasses import replace

from swiftbatch.worker.kernels.layer_forms import Activation, NormForm
from swiftbatch.worker.model.dense_names import (
    ACTIVATIONS,
    ALWAYS,
    AROUND,
    AROUND_PARTS,
    BEHIND,
    COHERE,
    GRANITE,
    HUNYUAN,
    OLMO2,
    Form,
    WindowAngles,
)
from swiftbatch.worker.model.expert_kinds import EXPERT_KINDS
from swiftbatch.worker.model.hybrid_kinds import HYBRID_KINDS
from swiftbatch.worker.model.layer_windows import (
    TypesOrPattern,
    by_layer_types,
    in_all_layers,
    in_all_layers_if_said,
    where_switched_on,
)
from swiftbatch.worker.model.layers_without_rotary import by_no_rope_layers, without_windows, without_windows_if_said

FUSED_QUERIES = dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj")
FUSED_GATES = dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")
IN_ALL = ("attention_bias", "attention_bias", "mlp_bias")
GEMMA_CAPS = {"scores": "attn_logit_softcapping", "logits": "final_logit_softcapping"}
GEMMA2 = Form(
    "attention_bias",
    "attention_bias",
    norms=AROUND_PARTS,
    norm_form=NormForm.ONE_MORE,
    activation_key="hidden_activation",
    scales_by_width=True,
    scales={"score_width": "query_pre_attn_scalar"},
    caps=GEMMA_CAPS,
    windows=TypesOrPattern(2, None),
    unused=("sliding_window_size",),
)
KINDS: dict[str, Form] = {
    "apertus": Form(
        "attention_bias",
        "attention_bias",
        has_head_norms=True,
        norms={"input_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
        activations={"xielu": Activation.XIELU},
        has_gates=False,
        curve=tuple(f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")),
    ),
    "arcee": Form(*IN_ALL, has_gates=False),
    "cohere": replace(COHERE, head_norms_key="use_qk_norm", head_norms_differ=True, unused=("model_max_length",)),
    "cohere2": replace(COHERE, windows=TypesOrPattern(4), still=without_windows, unused=("layer_switch",)),
    "ernie4_5": Form("use_bias", "use_bias", "use_bias", is_interleaved=True),
    "cwm": Form(mlp_bias="mlp_bias", windows=by_layer_types),
    "exaone4": Form(
        has_head_norms=True,
        norms=BEHIND,
        windows=by_layer_types,
        still=without_windows_if_said,
        unused=("sliding_window_pattern",),
    ),
    "gemma": Form(
        "attention_bias",
        "attention_bias",
        norm_form=NormForm.ONE_MORE,
        activations={**ACTIVATIONS, "gelu": Activation.GELU_TANH},
        scales_by_width=True,
    ),
    "gemma2": GEMMA2,
    "gemma3_text": replace(
        GEMMA2,
        has_head_norms=True,
        windows=TypesOrPattern(6),
        window_angles=WindowAngles(1e6, 1e4, "rope_local_base_freq"),
        unused=("_sliding_window_pattern",),
    ),
    "glm": Form("attention_bias", is_interleaved=True, turned_share=0.5, names=FUSED_GATES),
    "glm4": Form("attention_bias", is_interleaved=True, turned_share=0.5, names=FUSED_GATES, norms=AROUND),
    "granite": Form(*IN_ALL, scales=GRANITE),
    "helium": Form("attention_bias", None, "mlp_bias", is_interleaved=True, norm_form=NormForm.ONCE),
    "hunyuan_v1_dense": HUNYUAN,
    "internlm3": Form("qkv_bias", "bias", "bias"),
    "iquestcoder": Form(*IN_ALL),
    "jais2": Form(*IN_ALL, norm_form=NormForm.SHIFTED, has_gates=False, epsilon_key="layer_norm_eps"),
    "llama": Form(*IN_ALL),
    "ministral": Form(windows=by_layer_types),
    "ministral3": Form(windows=in_all_layers_if_said, growth_key="llama_4_scaling_beta"),
    "mistral": Form(windows=in_all_layers),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, windows=TypesOrPattern(4, None), window_angles=WindowAngles(5e5, 5e5)),
    "phi3": Form(
        turned_share=1.0,
        names=FUSED_QUERIES | FUSED_GATES,
        has_long_angles=True,
        windows=in_all_layers_if_said,
        unused=("full_attn_mod", "interpolate_factor"),
    ),
    "qwen2": Form(ALWAYS, windows=where_switched_on),
    "qwen3": Form("attention_bias", "attention_bias", has_head_norms=True, windows=where_switched_on),
    "seed_oss": Form("attention_bias", "attention_out_bias", "mlp_bias"),
    "starcoder2": Form(
        "use_bias",
        "use_bias",
        "use_bias",
        names={"up": "mlp.c_fc", "down": "mlp.c_proj"},
        norm_form=NormForm.SHIFTED,
        has_gates=False,
        windows=in_all_layers_if_said,
        epsilon_key="norm_epsilon",
        unused=("layer_norm_epsilon",),
    ),
    "smollm3": Form(*IN_ALL, still=by_no_rope_layers),
    "vaultgemma": replace(GEMMA2, norms={"input_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}),
}
KINDS |= EXPERT_KINDS | HYBRID_KINDS
