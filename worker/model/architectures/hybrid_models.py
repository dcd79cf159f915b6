"""The kinds with layers that have a state or a convolution, each by what it does otherwise than Llama. No torch."""

from __future__ import annotations

from dataclasses import replace

from swiftbatch.worker.kernels.layer_specs import NormForm, Score
from swiftbatch.worker.model.architectures.attention_layers import always, where_no_rope_is_said
from swiftbatch.worker.model.architectures.moe_layers import (
    FusedNames,
    MoESpec,
    MoETensorNames,
    behind_the_dense_ones,
    by_their_names,
    experts_in_all_layers,
    in_each_so_many,
    mlp_linears,
)
from swiftbatch.worker.model.architectures.moe_models import GRANITE_EXPERTS, SCORED_BY_SIGMOID
from swiftbatch.worker.model.architectures.recurrent_layers import (
    DELTA_NET,
    FALCON_MAMBA,
    JOINT_DELTA_NET,
    MAMBA,
    NEMOTRON_MAMBA,
    SHORT_CONVOLUTION,
    lfm2_width,
)
from swiftbatch.worker.model.architectures.spec import GRANITE, LINEARS, SHARED_GATES, ArchitectureSpec

LFM2_MLP = {"gate": "w1", "up": "w3", "down": "w2"}
LFM2 = ArchitectureSpec(
    has_qk_norms=True,
    norms={"input_norm": "operator_norm", "mlp_norm": "ffn_norm"},
    names={"output": "self_attn.out_proj"}
    | {role: f"feed_forward.{name}" for role, name in LFM2_MLP.items()}
    | {"query_norm": "self_attn.q_layernorm", "key_norm": "self_attn.k_layernorm"},
    mixer=SHORT_CONVOLUTION,
    final_norm="model.embedding_norm",
    width=lfm2_width,
    activation_key=None,
    epsilon_key="norm_eps",
)
QWEN35 = ArchitectureSpec(
    "attention_bias",
    "attention_bias",
    has_qk_norms=True,
    norm_form=NormForm.ONE_MORE,
    partial_rotary_factor=0.25,
    gates_heads=True,
    mixer=DELTA_NET,
)
SHARED_EXPERT = MoESpec(
    Score.SOFTMAX,
    experts_in_all_layers,
    names=MoETensorNames(
        shared=mlp_linears("mlp.shared_expert"),
        shared_gate="mlp.shared_expert_gate.weight",
        fused=FusedNames("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    shared_width="shared_expert_intermediate_size",
)
BAMBA = ArchitectureSpec(
    "attention_bias",
    "attention_bias",
    "mlp_bias",
    norms={"input_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
    names=mlp_linears("feed_forward"),
    mixer=MAMBA,
    final_norm="model.final_layernorm",
)
NEMOTRON_MLP = ("up", "down")
NEMOTRON_EXPERTS = replace(
    SCORED_BY_SIGMOID,
    layers=by_their_names,
    names=MoETensorNames(
        router="mixer.gate.weight",
        each={role: f"mixer.experts.{{}}.{role}_proj.weight" for role in NEMOTRON_MLP},
        choice_bias="mixer.gate.e_score_correction_bias",
        shared={role: f"mixer.shared_experts.{role}_proj" for role in NEMOTRON_MLP},
        latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    ),
    num_shared=None,
    shared_width="moe_shared_expert_intermediate_size",
    latent_width="moe_latent_size",
    keys=(),
    one_meaning={"n_shared_experts": (1,)},
)
HYBRID_ARCHITECTURES: dict[str, ArchitectureSpec] = {
    "bamba": replace(
        BAMBA,
        partial_rotary_factor=0.5,
        unused=("attn_layer_indices", "attn_rotary_emb", "num_logits_to_keep", "z_loss_coefficient"),
    ),
    "falcon_h1": replace(
        BAMBA,
        scales={
            "embedding": "embedding_multiplier",
            "logits_factor": "lm_head_multiplier",
            "attention_in_scale": "attention_in_multiplier",
            "key_scale": "key_multiplier",
            "attention_out_scale": "attention_out_multiplier",
        },
        scale_lists={"mlp_multipliers": ("gate_scale", "down_scale")},
        mixer=FALCON_MAMBA,
        unused=("num_logits_to_keep",),
    ),
    "granitemoehybrid": ArchitectureSpec(
        "attention_bias",
        "attention_bias",
        names=SHARED_GATES,
        scales=GRANITE,
        intermediate_key="shared_intermediate_size",
        still=where_no_rope_is_said,
        experts=replace(GRANITE_EXPERTS, shared_width="shared_intermediate_size"),
        mixer=MAMBA,
        one_meaning={"position_embedding_type": ("rope", "nope")},
        unused=("layers_block_type",),
    ),
    "lfm2": LFM2,
    "lfm2_moe": replace(
        LFM2,
        width=None,
        experts=MoESpec(
            Score.SIGMOID,
            behind_the_dense_ones,
            names=MoETensorNames(
                router="feed_forward.gate.weight",
                each={role: f"feed_forward.experts.{{}}.{name}.weight" for role, name in LFM2_MLP.items()},
                choice_bias="feed_forward.expert_bias",
            ),
            normalises="norm_topk_prob",
            least_sum=1e-6,
            scale="routed_scaling_factor",
            keys=("num_dense_layers",),
            one_meaning={"use_expert_bias": (True,)},
        ),
    ),
    "nemotron_h": ArchitectureSpec(
        norms=dict.fromkeys(("input_norm", "mlp_norm"), "norm"),
        norm_form=NormForm.ONCE,
        has_gates=False,
        activation_key="mlp_hidden_act",
        names={role: name.replace("self_attn", "mixer").replace("mlp", "mixer") for role, name in LINEARS.items()},
        still=always,
        experts=NEMOTRON_EXPERTS,
        mixer=NEMOTRON_MAMBA,
        does_one_thing=True,
        final_norm="model.norm_f",
        epsilon_key="layer_norm_epsilon",
        unused=("attention_head_dim", "norm_eps", "num_logits_to_keep"),
    ),
    "qwen3_5_moe_text": replace(QWEN35, intermediate_key="shared_expert_intermediate_size", experts=SHARED_EXPERT),
    "qwen3_5_text": QWEN35,
    "qwen3_next": replace(
        QWEN35,
        mixer=JOINT_DELTA_NET,
        experts=replace(
            SHARED_EXPERT,
            layers=in_each_so_many,
            normalises="norm_topk_prob",
            keys=("decoder_sparse_step", "mlp_only_layers"),
        ),
    ),
}
