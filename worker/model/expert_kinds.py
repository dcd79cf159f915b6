"""The kinds with experts that our kernels run, each by what it does otherwise than Llama. Without torch."""

from __future__ import annotations

from swiftbatch.worker.kernels.forms import NormForm
from swiftbatch.worker.kernels.routing import Score
from swiftbatch.worker.model.dense_forms import Form
from swiftbatch.worker.model.expert_forms import (
    ROLES,
    ExpertForm,
    ExpertNames,
    FusedNames,
    behind_the_first,
    between,
    in_all_layers,
    in_each_so_many,
)
from swiftbatch.worker.model.layer_windows import by_layer_types, by_layer_types_if_said, in_all_layers_if_said, never

MIXTRAL = "block_sparse_moe"
OF_MIXTRAL = {role: f"{MIXTRAL}.experts.{{}}.w{number}.weight" for role, number in zip(ROLES, (1, 3, 2), strict=True)}
SHARED = "mlp.shared_experts"
CORRECTED = ExpertNames(choice_bias="mlp.gate.e_score_correction_bias", shared=SHARED)
GRANITE = {"scores": "attention_multiplier", "embedding": "embedding_multiplier", "residual": "residual_multiplier"}
SPARSE_KEYS = ("decoder_sparse_step", "mlp_only_layers")
SCORED_BY_SIGMOID = ExpertForm(  # as DeepSeek V3
    Score.SIGMOID,
    behind_the_first,
    names=CORRECTED,
    normalises="norm_topk_prob",
    least_sum=1e-20,
    scale="routed_scaling_factor",
    groups=("n_group", "topk_group"),
    rounds_logits=False,
    rounds_weights=False,
    num_shared="n_shared_experts",
    keys=("first_k_dense_replace",),
    one_meaning={"moe_layer_freq": (1,), "ep_size": (1,)},
)
EXPERT_KINDS = {
    "dots1": Form(
        "attention_bias",
        "attention_bias",
        has_head_norms=True,
        windows=by_layer_types_if_said,
        experts=SCORED_BY_SIGMOID,
    ),
    "ernie4_5_moe": Form(
        "use_bias",
        "use_bias",
        "use_bias",
        is_interleaved=True,
        experts=ExpertForm(
            Score.SOFTMAX,
            between,
            names=ExpertNames(choice_bias="mlp.moe_statics.e_score_correction_bias", shared=SHARED),
            least_sum="moe_norm_min",
            rounds_logits=False,
            keeps_router=True,
            num_shared="moe_num_shared_experts",
            keys=("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index", "moe_capacity"),
            one_meaning={"compression_ratio": (1, 1.0)},
        ),
    ),
    "glm4_moe": Form(
        "attention_bias",
        head_norms_key="use_qk_norm",
        turned_share=0.5,
        experts=SCORED_BY_SIGMOID,
    ),
    "gpt_oss": Form(
        "attention_bias",
        "attention_bias",
        norm_form=NormForm.ONCE,
        windows=by_layer_types,
        has_sinks=True,
        experts=ExpertForm(
            Score.SOFTMAX_OF_CHOSEN,
            in_all_layers,
            "intermediate_size",
            ExpertNames(
                router="mlp.router.weight",
                router_bias="mlp.router.bias",
                each=None,
                fused=FusedNames("mlp.experts.gate_up_proj", "mlp.experts.down_proj", True, True, "_bias"),
            ),
            normalises=False,
            gate_limit="swiglu_limit",
            gate_slope="swiglu_alpha",
            keys=("initial_context_length",),  # that of the angles once more
        ),
    ),
    "granitemoe": Form(
        "attention_bias",
        "attention_bias",
        scales=GRANITE | {"logits": "logits_scaling"},
        experts=ExpertForm(
            Score.SOFTMAX_OF_CHOSEN,
            in_all_layers,
            "intermediate_size",
            ExpertNames(
                router=f"{MIXTRAL}.router.layer.weight",
                each=None,
                fused=FusedNames(f"{MIXTRAL}.input_linear.weight", f"{MIXTRAL}.output_linear.weight"),
            ),
            normalises=False,
        ),
    ),
    "minimax_m2": Form(
        has_head_norms=True,
        joins_heads=True,
        turned_share=1.0,
        experts=ExpertForm(
            Score.SIGMOID,
            in_all_layers,
            "intermediate_size",
            ExpertNames(
                router=f"{MIXTRAL}.gate.weight", each=OF_MIXTRAL, choice_bias=f"{MIXTRAL}.e_score_correction_bias"
            ),
            rounds_weights=False,
            keys=("rotary_dim", "router_jitter_noise", "mtp_transformer_layers", "num_mtp_modules"),
            one_meaning={
                "shared_intermediate_size": (0,),
                "scoring_func": ("sigmoid",),
                "qk_norm_type": ("per_layer",),
                "use_qk_norm": (True,),
                "use_routing_bias": (True,),
            },
        ),
    ),
    "mixtral": Form(
        windows=in_all_layers_if_said,
        experts=ExpertForm(
            Score.SOFTMAX,
            in_all_layers,
            "intermediate_size",
            ExpertNames(router=f"{MIXTRAL}.gate.weight", each=OF_MIXTRAL),
            rounds_weights=False,
            keys=("router_jitter_noise",),
        ),
    ),
    "olmoe": Form(
        "attention_bias",
        "attention_bias",
        has_head_norms=True,
        joins_heads=True,
        experts=ExpertForm(
            Score.SOFTMAX,
            in_all_layers,
            "intermediate_size",
            normalises="norm_topk_prob",
            one_meaning={"clip_qkv": (None,)},
        ),
    ),
    "qwen2_moe": Form(
        "qkv_bias",
        windows=never,
        experts=ExpertForm(
            Score.SOFTMAX,
            in_each_so_many,
            names=ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate.weight"),
            normalises="norm_topk_prob",
            shared_width="shared_expert_intermediate_size",
            keys=SPARSE_KEYS,
        ),
    ),
    "qwen3_moe": Form(
        "attention_bias",
        "attention_bias",
        has_head_norms=True,
        windows=never,
        experts=ExpertForm(
            Score.SOFTMAX,
            in_each_so_many,
            names=ExpertNames(fused=FusedNames("mlp.experts.gate_up_proj", "mlp.experts.down_proj", is_turned=None)),
            normalises="norm_topk_prob",
            keys=SPARSE_KEYS,
        ),
    ),
}
