"""The kinds with experts that our kernels run, each by what it does otherwise than Llama. Without torch."""

from __future__ import annotations

from dataclasses import replace

from swiftbatch.worker.kernels.layer_specs import NormForm, Score
from swiftbatch.worker.model.architectures.attention_layers import (
    MLASpec,
    by_layer_types,
    by_layer_types_if_said,
    by_thetas,
    never,
    window_in_all_layers_if_said,
    without_windows_but_dense,
    without_windows_if_said,
)
from swiftbatch.worker.model.architectures.moe_layers import (
    ROLES,
    FusedNames,
    MoESpec,
    MoETensorNames,
    SparseOr,
    all_but_the_first,
    behind_the_first,
    between,
    experts_in_all_layers,
    in_each_so_many,
    mlp_linears,
)
from swiftbatch.worker.model.architectures.spec import (
    COHERE,
    GRANITE,
    HUNYUAN,
    OLMO2,
    SHARED_GATES,
    ArchitectureSpec,
    WindowAngles,
)

MIXTRAL = "block_sparse_moe"
OF_MIXTRAL = {role: f"{MIXTRAL}.experts.{{}}.w{number}.weight" for role, number in zip(ROLES, (1, 3, 2), strict=True)}
SHARED = mlp_linears("mlp.shared_experts")
CORRECTED = MoETensorNames(choice_bias="mlp.gate.e_score_correction_bias", shared=SHARED)
SPARSE_KEYS = ("decoder_sparse_step", "mlp_only_layers")
SCORED_BY_SIGMOID = MoESpec(  # as DeepSeek V3
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
BIASES = {"attention_bias": (False,), "mlp_bias": (False,)}
CHOSEN_WITHIN_GROUPS = replace(SCORED_BY_SIGMOID, one_meaning=SCORED_BY_SIGMOID.one_meaning | BIASES)
DEEPSEEK_V3 = ArchitectureSpec(
    latent=MLASpec("rope_interleave"),
    experts=CHOSEN_WITHIN_GROUPS,
    unused=("aux_loss_alpha", "num_mtp_layers"),
)
GRANITE_EXPERTS = MoESpec(
    Score.SOFTMAX_OF_CHOSEN,
    experts_in_all_layers,
    "intermediate_size",
    MoETensorNames(
        router=f"{MIXTRAL}.router.layer.weight",
        each=None,
        fused=FusedNames(f"{MIXTRAL}.input_linear.weight", f"{MIXTRAL}.output_linear.weight"),
        shared=SHARED_GATES,
    ),
    normalises=False,
)
GRANITE_MOE = ArchitectureSpec("attention_bias", "attention_bias", scales=GRANITE, experts=GRANITE_EXPERTS)
MOE_ARCHITECTURES = {
    "cohere2_moe": replace(
        COHERE,
        windows=by_layer_types,
        still=without_windows_but_dense,
        intermediate_key="prefix_dense_intermediate_size",
        one_meaning={
            "expert_selection_fn": ("sigmoid",),
            "rms_norm_eps": (None,),
            "shared_expert_combination_strategy": ("sum",),
        },
        unused=("sliding_window_pattern",),
        experts=MoESpec(
            Score.SIGMOID_OF_CHOSEN,
            SparseOr(behind_the_first),
            "intermediate_size",
            MoETensorNames(shared=SHARED),
            normalises="norm_topk_prob",
            num_shared="num_shared_experts",
            keys=("first_k_dense_replace", "prefix_dense_sliding_window_pattern"),
        ),
    ),
    "deepseek_v2": replace(
        DEEPSEEK_V3,
        latent=MLASpec(),
        rounds_angles=False,
        experts=MoESpec(
            Score.SOFTMAX,
            behind_the_first,
            names=MoETensorNames(shared=SHARED),
            normalises=False,
            scale="routed_scaling_factor",
            rounds_logits=False,
            rounds_weights=False,
            num_shared="n_shared_experts",
            groups=("n_group", "topk_group"),
            grouping=("topk_method", "group_limited_greedy"),
            num_best_of_group=1,
            keys=("first_k_dense_replace",),
            one_meaning=CHOSEN_WITHIN_GROUPS.one_meaning
            | {"topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,)},
        ),
    ),
    "deepseek_v3": DEEPSEEK_V3,
    "dots1": ArchitectureSpec(
        "attention_bias",
        "attention_bias",
        has_qk_norms=True,
        windows=by_layer_types_if_said,
        experts=SCORED_BY_SIGMOID,
    ),
    "ernie4_5_moe": ArchitectureSpec(
        "use_bias",
        "use_bias",
        "use_bias",
        is_interleaved=True,
        experts=MoESpec(
            Score.SOFTMAX,
            between,
            names=MoETensorNames(choice_bias="mlp.moe_statics.e_score_correction_bias", shared=SHARED),
            least_sum="moe_norm_min",
            rounds_logits=False,
            keeps_router=True,
            num_shared="moe_num_shared_experts",
            keys=("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index", "moe_capacity"),
            one_meaning={"compression_ratio": (1, 1.0)},
        ),
    ),
    "exaone_moe": ArchitectureSpec(
        has_qk_norms=True,
        windows=by_layer_types,
        still=without_windows_if_said,
        unused=("sliding_window_pattern",),
        experts=replace(
            SCORED_BY_SIGMOID,
            layers=SparseOr(behind_the_first),
            names=replace(CORRECTED, choice_bias="mlp.e_score_correction_bias"),
            num_shared="num_shared_experts",
        ),
    ),
    "flex_olmo": replace(
        OLMO2,
        experts=MoESpec(Score.SOFTMAX, experts_in_all_layers, "intermediate_size", normalises="norm_topk_prob"),
    ),
    "glm4_moe": ArchitectureSpec(
        "attention_bias",
        qk_norms_key="use_qk_norm",
        partial_rotary_factor=0.5,
        experts=SCORED_BY_SIGMOID,
    ),
    "glm4_moe_lite": replace(
        DEEPSEEK_V3,
        experts=replace(
            CHOSEN_WITHIN_GROUPS,
            layers=SparseOr(all_but_the_first),
            keys=(),
            one_meaning=CHOSEN_WITHIN_GROUPS.one_meaning | {"first_k_dense_replace": (1,)},
        ),
    ),
    "gpt_oss": ArchitectureSpec(
        "attention_bias",
        "attention_bias",
        norm_form=NormForm.ONCE,
        windows=by_layer_types,
        has_sinks=True,
        experts=MoESpec(
            Score.SOFTMAX_OF_CHOSEN,
            experts_in_all_layers,
            "intermediate_size",
            MoETensorNames(
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
    "granitemoe": GRANITE_MOE,
    "granitemoe_swa": replace(
        GRANITE_MOE,
        windows=by_layer_types,
        still=by_thetas,
        thetas_key="layer_rope_theta",
        has_sinks=True,
        experts=replace(
            GRANITE_EXPERTS,
            names=MoETensorNames(
                router=f"{MIXTRAL}.router.weight",
                each=None,
                fused=FusedNames(f"{MIXTRAL}.experts.gate_up_proj", f"{MIXTRAL}.experts.down_proj"),
                shared=SHARED_GATES,
            ),
            shared_width="shared_intermediate_size",
        ),
    ),
    "granitemoeshared": replace(GRANITE_MOE, experts=replace(GRANITE_EXPERTS, shared_width="shared_intermediate_size")),
    "hunyuan_v1_moe": replace(
        HUNYUAN,
        experts=MoESpec(
            Score.SOFTMAX,
            experts_in_all_layers,
            "intermediate_size",
            MoETensorNames(router="mlp.gate.wg.weight", shared=mlp_linears("mlp.shared_mlp")),
            shared_width="intermediate_size",
        ),
    ),
    "hy_v3": ArchitectureSpec(
        "attention_bias",
        "attention_bias",
        "mlp_bias",
        has_qk_norms=True,
        experts=MoESpec(
            Score.SIGMOID,
            SparseOr(all_but_the_first),
            names=MoETensorNames(
                router="mlp.router.gate.weight", choice_bias="mlp.expert_bias", shared=mlp_linears("mlp.shared_mlp")
            ),
            least_sum=1e-20,
            scale="router_scaling_factor",
            rounds_logits=False,
            rounds_weights=False,
            num_shared="num_shared_experts",
        ),
    ),
    "mellum": ArchitectureSpec(
        "attention_bias",
        "attention_bias",
        has_qk_norms=True,
        windows=by_layer_types,
        window_angles=WindowAngles(5e5, 1e4),
        experts=MoESpec(Score.SOFTMAX, SparseOr(experts_in_all_layers), normalises="norm_topk_prob"),
    ),
    "minimax_m2": ArchitectureSpec(
        has_qk_norms=True,
        joins_heads=True,
        partial_rotary_factor=1.0,
        experts=MoESpec(
            Score.SIGMOID,
            experts_in_all_layers,
            "intermediate_size",
            MoETensorNames(
                router=f"{MIXTRAL}.gate.weight", each=OF_MIXTRAL, choice_bias=f"{MIXTRAL}.e_score_correction_bias"
            ),
            rounds_weights=False,
            keys=("rotary_dim", "router_jitter_noise", "mtp_transformer_layers", "num_mtp_modules"),
            one_meaning={
                "attn_type_list": (1,),  # attention to all positions
                "shared_intermediate_size": (0,),
                "scoring_func": ("sigmoid",),
                "qk_norm_type": ("per_layer",),
                "use_qk_norm": (True,),
                "use_routing_bias": (True,),
            },
        ),
    ),
    "mixtral": ArchitectureSpec(
        windows=window_in_all_layers_if_said,
        experts=MoESpec(
            Score.SOFTMAX,
            experts_in_all_layers,
            "intermediate_size",
            MoETensorNames(router=f"{MIXTRAL}.gate.weight", each=OF_MIXTRAL),
            rounds_weights=False,
            keys=("router_jitter_noise",),
        ),
    ),
    "olmoe": ArchitectureSpec(
        "attention_bias",
        "attention_bias",
        has_qk_norms=True,
        joins_heads=True,
        experts=MoESpec(
            Score.SOFTMAX,
            experts_in_all_layers,
            "intermediate_size",
            normalises="norm_topk_prob",
            one_meaning={"clip_qkv": (None,)},
        ),
    ),
    "phimoe": ArchitectureSpec(
        "attention_bias",
        "attention_bias",
        norm_form=NormForm.SHIFTED,
        windows=window_in_all_layers_if_said,
        has_long_angles=True,
        scales_long_angles=True,
        head_bias="lm_head_bias",
        experts=MoESpec(
            Score.SPARSE_MIXER,
            experts_in_all_layers,
            "intermediate_size",
            MoETensorNames(router=f"{MIXTRAL}.gate.weight", each=OF_MIXTRAL),
            normalises=False,
            jitter="router_jitter_noise",
            keys=("input_jitter_noise",),
            one_meaning={"num_experts_per_tok": (2,)},
        ),
    ),
    "qwen2_moe": ArchitectureSpec(
        "qkv_bias",
        windows=never,
        experts=MoESpec(
            Score.SOFTMAX,
            in_each_so_many,
            names=MoETensorNames(shared=mlp_linears("mlp.shared_expert"), shared_gate="mlp.shared_expert_gate.weight"),
            normalises="norm_topk_prob",
            shared_width="shared_expert_intermediate_size",
            keys=SPARSE_KEYS,
        ),
    ),
    "qwen3_moe": ArchitectureSpec(
        "attention_bias",
        "attention_bias",
        has_qk_norms=True,
        windows=never,
        experts=MoESpec(
            Score.SOFTMAX,
            in_each_so_many,
            names=MoETensorNames(
                fused=FusedNames("mlp.experts.gate_up_proj", "mlp.experts.down_proj", is_transposed=None)
            ),
            normalises="norm_topk_prob",
            keys=SPARSE_KEYS,
            one_meaning={"shared_expert_intermediate_size": (0,)},
        ),
    ),
    "solar_open": ArchitectureSpec(
        "attention_bias",
        intermediate_key="moe_intermediate_size",  # no layer is without experts
        experts=replace(
            SCORED_BY_SIGMOID,
            layers=experts_in_all_layers,
            one_meaning=SCORED_BY_SIGMOID.one_meaning | {"first_k_dense_replace": (0,), "use_qk_norm": (False,)},
        ),
        unused=("intermediate_size",),
    ),
}
