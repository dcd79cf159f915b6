"""Decoders with experts: Mixtral, DeepSeek, Qwen's, gpt-oss, GLM, MiniMax, Granite, Cohere and others. Without torch.

DeepSeek's have latent attention (MLA), too. Kimi K2 is DeepSeek V3.
"""

from __future__ import annotations

from dataclasses import replace

from swiftbatch.worker.kernels.layer_specs import NormForm, Score
from swiftbatch.worker.model.architectures.attention_layers import (
    CHOOSES,
    IndexerSpec,
    MLASpec,
    Windows,
    by_layer_types,
    from_max_window_layers,
    no_windows,
    window_in_all_layers_if_said,
    without_windows,
    without_windows_if_said,
)
from swiftbatch.worker.model.architectures.deepseek_v4 import DEEPSEEK_V4
from swiftbatch.worker.model.architectures.gemma4 import GEMMA4, GEMMA4_UNIFIED
from swiftbatch.worker.model.architectures.llama_like import BIASED, COHERE, GRANITE, HUNYUAN, OLMO2, QK_NORMED, TIED
from swiftbatch.worker.model.architectures.mimo import MIMO_V2_FLASH
from swiftbatch.worker.model.architectures.minimax import MINIMAX_M2, MINIMAX_M3
from swiftbatch.worker.model.architectures.moe_layers import (
    ROLES,
    SCORED_BY_SIGMOID,
    SHARED,
    FusedNames,
    MoESpec,
    MoETensorNames,
    SparseOr,
    all_but_the_first,
    behind_the_first,
    experts_in_all_layers,
    in_each_so_many,
    mlp_linears,
)
from swiftbatch.worker.model.architectures.spec import (
    NULL_HEADS,
    NULL_WIDTH,
    SILU,
    ArchitectureSpec,
    GGUFSpec,
    WindowAngles,
)
from swiftbatch.worker.model.config_values import (
    COUNT,
    LAST_LAYER,
    POSITIVE,
    SIZE,
    SOME_LAYERS,
    Config,
)

WITHOUT_BIASES = SCORED_BY_SIGMOID.one_meaning | {"attention_bias": (False,), "mlp_bias": (False,)}
DEEPSEEK_V3 = ArchitectureSpec(
    latent=MLASpec("rope_interleave"),
    experts=replace(SCORED_BY_SIGMOID, one_meaning=WITHOUT_BIASES),
    known_keys=("aux_loss_alpha", "num_mtp_layers"),
)
PLAIN = MoESpec(Score.SOFTMAX, experts_in_all_layers, "intermediate_size")
MIXTRAL = "block_sparse_moe"
OF_MIXTRAL = {role: f"{MIXTRAL}.experts.{{}}.w{number}.weight" for role, number in zip(ROLES, (1, 3, 2), strict=True)}
MIXTRAL_NAMES = MoETensorNames(router=f"{MIXTRAL}.gate.weight", each=OF_MIXTRAL)
GRANITE_SHARED = {**dict.fromkeys(("gate", "up"), "shared_mlp.input_linear"), "down": "shared_mlp.output_linear"}
GRANITE_EXPERTS = MoESpec(
    Score.SOFTMAX_OF_CHOSEN,
    experts_in_all_layers,
    "intermediate_size",
    MoETensorNames(
        router=f"{MIXTRAL}.router.layer.weight",
        each=None,
        fused=FusedNames(f"{MIXTRAL}.input_linear.weight", f"{MIXTRAL}.output_linear.weight"),
        shared=GRANITE_SHARED,
    ),
    normalises=False,
)
GRANITE_MOE = replace(GRANITE, mlp_bias=None, experts=GRANITE_EXPERTS)
SPARSE_KEYS = {"decoder_sparse_step": SIZE, "mlp_only_layers": COUNT.list_of().or_null()}
SWITCHED_OFF = {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
MIXTURE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
GGUF_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",  # experts in order, each a tensor of its own
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def never_windowed(config: Config) -> Windows:
    """Return no windows, whatever `sliding_window` says. Raises ValueError if `use_sliding_window` is true."""
    if config.get("use_sliding_window", False) is not False:
        raise ValueError(f"its use_sliding_window is {config['use_sliding_window']!r:.80}")
    return no_windows(config)


def by_layer_types_if_said(config: Config) -> Windows:
    if config.get("layer_types") is not None:
        return by_layer_types(config)
    return no_windows(config) if config.get("sliding_window") is None else from_max_window_layers(config)


def without_windows_but_dense(config: Config, windows: Windows) -> frozenset[int]:
    """Return Cohere's layers without rotary positions.

    Such a layer has no window. It also has experts, unless `prefix_dense_sliding_window_pattern` rules dense layers.
    """
    with_experts = SparseOr(behind_the_first)({"first_k_dense_replace": 0} | dict(config))
    has_turned_dense = config.get("prefix_dense_sliding_window_pattern", 1) == 1
    return without_windows(config, windows) & (with_experts if has_turned_dense else experts_in_all_layers(config))


def by_thetas(config: Config, windows: Windows) -> frozenset[int]:
    thetas = config["layer_rope_theta"]
    if thetas is not None and (not isinstance(thetas, list) or len(thetas) != len(windows)):
        raise ValueError("its layer_rope_theta do not tell of each layer")
    return frozenset(number for number, theta in enumerate(thetas or []) if not theta)


def between(config: Config) -> frozenset[int]:
    """Return Ernie's layers with experts: every `moe_layer_interval`-th one between the first and the last."""
    step, first = SIZE.of(config, "moe_layer_interval"), COUNT.of(config, "moe_layer_start_index")
    last = LAST_LAYER.of({"moe_layer_end_index": -1} | dict(config), "moe_layer_end_index")
    last = config["num_hidden_layers"] - 1 if last == -1 else last
    return frozenset(each for each in range(first, last + 1) if (each + 1) % step == 0) & experts_in_all_layers(config)


def indexed(indexer: IndexerSpec) -> ArchitectureSpec:
    """Return DeepSeek V3 with indexers. Its class in transformers reads no key of how dimensions are paired."""
    pairs = {"rope_interleave": (True,), "indexer_rope_interleave": (indexer.is_interleaved,)}
    return replace(
        DEEPSEEK_V3,
        latent=MLASpec(indexer=indexer),
        experts=replace(SCORED_BY_SIGMOID, layers=SparseOr(behind_the_first), one_meaning=WITHOUT_BIASES | pairs),
        known_keys=(*DEEPSEEK_V3.known_keys, "index_topk_", "index_skip_topk_offset"),
        rules=NULL_HEADS,
        kernels_alone=CHOOSES,
    )


MIXTURES: dict[str, ArchitectureSpec] = {
    "afmoe": ArchitectureSpec(rules=NULL_HEADS, kernels_lack="its attention has gates"),
    "cohere2_moe": replace(
        COHERE,
        windows=by_layer_types,
        nope=without_windows_but_dense,
        intermediate_key="prefix_dense_intermediate_size",
        one_meaning={
            "expert_selection_fn": ("sigmoid",),
            "rms_norm_eps": (None,),
            "shared_expert_combination_strategy": ("sum",),
        },
        known_keys=("sliding_window_pattern",),
        rules=NULL_HEADS | {"prefix_dense_intermediate_size": SIZE.or_null(), "rms_norm_eps": POSITIVE.or_null()},
        experts=MoESpec(
            Score.SIGMOID_OF_CHOSEN,
            SparseOr(behind_the_first),
            "intermediate_size",
            MoETensorNames(shared=SHARED),
            normalises="norm_topk_prob",
            num_shared="num_shared_experts",
            keys={"first_k_dense_replace": SOME_LAYERS, "prefix_dense_sliding_window_pattern": COUNT},
        ),
    ),
    "deepseek_v2": replace(
        DEEPSEEK_V3,
        latent=MLASpec(),
        rounds_angles=False,
        experts=replace(
            SCORED_BY_SIGMOID,
            score=Score.SOFTMAX,
            names=MoETensorNames(shared=SHARED),
            normalises=False,
            least_sum=0.0,
            grouping=("topk_method", "group_limited_greedy"),
            num_best_of_group=1,
            one_meaning=WITHOUT_BIASES
            | {"topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,)},
        ),
        rules=NULL_HEADS,
    ),
    "deepseek_v3": replace(DEEPSEEK_V3, rules=NULL_HEADS, aliases=("kimi_k2",), nested_in=("kimi_k25",)),
    "deepseek_v32": indexed(IndexerSpec(is_interleaved=False)),
    "deepseek_v4": DEEPSEEK_V4,
    "dots1": replace(QK_NORMED, windows=by_layer_types_if_said, rules=NULL_HEADS, experts=SCORED_BY_SIGMOID),
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
            keys={
                "moe_layer_interval": SIZE,
                "moe_layer_start_index": SOME_LAYERS,
                "moe_layer_end_index": LAST_LAYER,
                "moe_capacity": None,
            },
            one_meaning={"compression_ratio": (1, 1.0)},
        ),
        defaults=TIED | {"moe_norm_min": 1e-12},
    ),
    "exaone_moe": ArchitectureSpec(
        has_qk_norms=True,
        windows=by_layer_types,
        nope=without_windows_if_said,
        known_keys=("sliding_window_pattern",),
        experts=replace(
            SCORED_BY_SIGMOID,
            layers=SparseOr(behind_the_first),
            names=MoETensorNames(choice_bias="mlp.e_score_correction_bias", shared=SHARED),
            num_shared="num_shared_experts",
        ),
    ),
    "flex_olmo": replace(OLMO2, experts=replace(PLAIN, normalises="norm_topk_prob")),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_UNIFIED,
    "glm4_moe": ArchitectureSpec(
        "attention_bias", qk_norms_key="use_qk_norm", partial_rotary_factor=0.5, experts=SCORED_BY_SIGMOID
    ),
    "glm4_moe_lite": replace(
        DEEPSEEK_V3,
        experts=replace(
            SCORED_BY_SIGMOID,
            layers=SparseOr(all_but_the_first),
            keys={},
            one_meaning=WITHOUT_BIASES | {"first_k_dense_replace": (1,)},
        ),
    ),
    "glm_moe_dsa": indexed(IndexerSpec(is_interleaved=True, types_key="indexer_types")),
    "gpt_oss": replace(
        BIASED,
        norm_form=NormForm.ONCE,
        windows=by_layer_types,
        sinks="self_attn.sinks",
        defaults={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
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
            keys={"initial_context_length": None},  # repeats a key within the rotary parameters
        ),
    ),
    "granitemoe": GRANITE_MOE,
    "granitemoe_swa": replace(
        GRANITE_MOE,
        windows=by_layer_types,
        nope=by_thetas,
        thetas_key="layer_rope_theta",
        sinks="self_attn.sinks",
        experts=replace(
            GRANITE_EXPERTS,
            names=MoETensorNames(
                router=f"{MIXTRAL}.router.weight",
                each=None,
                fused=FusedNames(f"{MIXTRAL}.experts.gate_up_proj", f"{MIXTRAL}.experts.down_proj"),
                shared=GRANITE_SHARED,
            ),
            shared_width="shared_intermediate_size",
        ),
    ),
    "granitemoeshared": replace(GRANITE_MOE, experts=replace(GRANITE_EXPERTS, shared_width="shared_intermediate_size")),
    "hunyuan_v1_moe": replace(
        HUNYUAN,
        experts=replace(
            PLAIN,
            names=MoETensorNames(router="mlp.gate.wg.weight", shared=mlp_linears("mlp.shared_mlp")),
            shared_width="intermediate_size",
        ),
    ),
    "hy_v3": replace(
        QK_NORMED,
        mlp_bias="mlp_bias",
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
    "laguna": ArchitectureSpec(kernels_lack="its attention has gates, and its layers different numbers of heads"),
    "llama4_text": ArchitectureSpec(
        nested_in=("llama4",), kernels_lack="its layers have experts and chunks", attends_in_chunks=True
    ),
    "mellum": replace(
        QK_NORMED,
        windows=by_layer_types,
        window_angles=WindowAngles(5e5, 1e4),
        experts=MoESpec(Score.SOFTMAX, SparseOr(experts_in_all_layers), normalises="norm_topk_prob"),
    ),
    "mimo_v2_flash": MIMO_V2_FLASH,
    "minimax_m2": MINIMAX_M2,
    "minimax_m3_vl_text": MINIMAX_M3,
    "mixtral": ArchitectureSpec(
        windows=window_in_all_layers_if_said,
        rules=NULL_WIDTH,
        experts=replace(PLAIN, names=MIXTRAL_NAMES, rounds_weights=False, keys={"router_jitter_noise": None}),
    ),
    "olmoe": replace(
        QK_NORMED,
        joins_heads=True,
        experts=replace(PLAIN, normalises="norm_topk_prob", one_meaning={"clip_qkv": (None,)}),
        rules=NULL_HEADS,
    ),
    "phimoe": replace(
        BIASED,
        norm_form=NormForm.SHIFTED,
        windows=window_in_all_layers_if_said,
        has_long_angles=True,
        scales_long_angles=True,
        head_bias="lm_head_bias",
        experts=MoESpec(
            Score.SPARSE_MIXER,
            experts_in_all_layers,
            "intermediate_size",
            MIXTRAL_NAMES,
            normalises=False,
            jitter="router_jitter_noise",
            keys={"input_jitter_noise": None},
            one_meaning={"num_experts_per_tok": (2,)},
        ),
    ),
    "qwen2_moe": ArchitectureSpec(
        "qkv_bias",
        windows=never_windowed,
        experts=MoESpec(
            Score.SOFTMAX,
            in_each_so_many,
            names=MoETensorNames(shared=mlp_linears("mlp.shared_expert"), shared_gate="mlp.shared_expert_gate.weight"),
            normalises="norm_topk_prob",
            shared_width="shared_expert_intermediate_size",
            keys=SPARSE_KEYS,
        ),
        defaults={"qkv_bias": True},
        gguf=GGUFSpec(
            "qwen2moe",
            SILU | SWITCHED_OFF | {"norm_topk_prob": False, "qkv_bias": True},
            said=MIXTURE | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
            names=GGUF_NAMES,
        ),
    ),
    "qwen3_moe": replace(
        QK_NORMED,
        windows=never_windowed,
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
        aliases=("qwen3_vl_moe_text",),
        nested_in=("qwen3_vl_moe",),
        gguf=GGUFSpec(
            "qwen3moe",
            SILU | SWITCHED_OFF | {"norm_topk_prob": True, "attention_bias": False},
            said=MIXTURE,
            names=GGUF_NAMES,
        ),
    ),
    "solar_open": ArchitectureSpec(
        "attention_bias",
        intermediate_key="moe_intermediate_size",  # every layer has experts
        experts=replace(
            SCORED_BY_SIGMOID,
            layers=experts_in_all_layers,
            one_meaning=SCORED_BY_SIGMOID.one_meaning | {"first_k_dense_replace": (0,), "use_qk_norm": (False,)},
        ),
        known_keys=("intermediate_size",),
    ),
}
