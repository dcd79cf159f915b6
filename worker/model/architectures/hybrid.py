"""Hybrid decoders, some of whose layers have a state or a convolution instead of attention. Without torch.

Qwen3-Next and Qwen3.5 (gated delta nets), Bamba, Falcon-H1, Granite 4 h and Nemotron-H (Mamba-2), LFM2, Kimi Linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from swiftbatch.worker.kernels.layer_specs import NormForm, RecurrentForm, Score
from swiftbatch.worker.model.architectures.attention_layers import MLASpec, all_layers
from swiftbatch.worker.model.architectures.llama_like import BIASED, QK_NORMED, TIED
from swiftbatch.worker.model.architectures.moe import (
    GRANITE_EXPERTS,
    GRANITE_MOE,
    GRANITE_SHARED,
    SPARSE_KEYS,
)
from swiftbatch.worker.model.architectures.moe_layers import (
    SCORED_BY_SIGMOID,
    FusedNames,
    MoESpec,
    MoETensorNames,
    behind_the_first,
    experts_in_all_layers,
    in_each_so_many,
    mlp_linears,
)
from swiftbatch.worker.model.architectures.recurrent_layers import (
    EXPERTS_ALONE,
    MixerSpec,
    RecurrentShape,
    listed_layers,
)
from swiftbatch.worker.model.architectures.spec import LINEARS, ArchitectureSpec
from swiftbatch.worker.model.config_values import COUNT, LIMIT, POSITIVE, SIZE, SOME_LAYERS, WORD, Config, KeyRule

OUTPUT: dict[str, tuple[str, ...]] = {"out_proj": ("output",)}
TAPS = {"taps": "conv1d.weight", "tap_bias": "conv1d.bias", "rates": "A_log", "step_bias": "dt_bias"}
TAPS |= {"norm": "norm.weight"}
SILU_ALONE: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}  # the convolution and the gates use it too

# Gated delta nets: Qwen3-Next and Qwen3.5


def _delta_shape(config: Config, num_layers: int) -> RecurrentShape:
    num_heads, num_key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    num_channels = 2 * num_key_heads * key_dim + num_heads * value_dim
    width = config.get("linear_conv_kernel_dim") or 4
    return RecurrentShape(num_layers, num_heads, num_key_heads, key_dim, value_dim, num_channels, width)


def _by_key_heads(shape: RecurrentShape, widths: tuple[int, ...]) -> list[int]:
    """Return the row order that groups rows by part; they are stored by key head."""
    starts = [sum(widths[:number]) for number in range(len(widths))]
    heads = range(shape.num_key_heads)
    return [
        head * sum(widths) + start + row
        for start, width in zip(starts, widths, strict=True)
        for head in heads
        for row in range(width)
    ]


def _queries_to_gates(shape: RecurrentShape) -> list[int]:
    values = shape.num_heads // shape.num_key_heads * shape.value_dim
    return _by_key_heads(shape, (shape.key_dim, shape.key_dim, values, values))


def _next_layers(config: Config) -> list[str]:
    interval = config.get("full_attention_interval") or 4
    numbers = range(1, (config.get("num_hidden_layers") or 0) + 1)
    return ["linear_attention" if number % interval else "full_attention" for number in numbers]


DELTA_SIZES = (
    *("full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_value_head_dim"),
)
DELTA_NET = MixerSpec(
    "gated delta nets",
    ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
    _delta_shape,
    RecurrentForm.DELTA_NET,
    "linear_attn",
    {"in_proj_qkv": ("inputs",), "in_proj_z": ("gates",), "in_proj_b": ("betas",), "in_proj_a": ("steps",), **OUTPUT},
    TAPS,
    keys=dict.fromkeys(DELTA_SIZES, SIZE),
    known_keys=("linear_", "full_attention_interval", "mtp_"),
    one_meaning=SILU_ALONE,
)
JOINT_DELTA_NET = replace(
    DELTA_NET,
    layer_classes=("Qwen3NextGatedDeltaNet",),
    linears={"in_proj_qkvz": ("inputs", "gates"), "in_proj_ba": ("betas", "steps"), **OUTPUT},
    orders={
        "in_proj_qkvz": _queries_to_gates,
        "in_proj_ba": lambda shape: _by_key_heads(shape, (shape.num_heads // shape.num_key_heads,) * 2),
    },
)
QWEN35 = replace(QK_NORMED, norm_form=NormForm.ONE_MORE, partial_rotary_factor=0.25, gates_heads=True, mixer=DELTA_NET)
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

# Mamba-2: Bamba, Falcon-H1, Granite 4 h and Nemotron-H


def _mamba_shape(config: Config, num_layers: int) -> RecurrentShape:
    num_heads, width = config["mamba_n_heads"], config.get("mamba_d_ssm")
    width = config["mamba_expand"] * config["hidden_size"] if width is None else width
    groups = config["mamba_n_groups"], config["mamba_d_state"]
    return _shape_of_groups(num_layers, num_heads, width // num_heads, groups, config["mamba_d_conv"])


def _nemotron_shape(config: Config, num_layers: int) -> RecurrentShape:
    groups = config["n_groups"], config["ssm_state_size"]
    return _shape_of_groups(
        num_layers, config["mamba_num_heads"], config["mamba_head_dim"], groups, config["conv_kernel"]
    )


def _shape_of_groups(
    num_layers: int, num_heads: int, head_dim: int, groups: tuple[int, int], conv_width: int
) -> RecurrentShape:
    num_groups, state_size = groups
    num_channels = num_heads * head_dim + 2 * num_groups * state_size
    return RecurrentShape(num_layers, num_heads, num_groups, state_size, head_dim, num_channels, conv_width)


def _bamba_layers(config: Config) -> list[str]:
    attending = config.get("attn_layer_indices") or ()
    return ["attention" if number in attending else "mamba" for number in range(config.get("num_hidden_layers") or 0)]


def by_their_names(config: Config) -> frozenset[int]:
    return frozenset(number for number, each in enumerate(listed_layers(config) or ()) if each in EXPERTS_ALONE)


def _with_count(config: Config) -> dict[str, Any]:
    types = listed_layers(config)
    return ({"num_hidden_layers": len(types)} if types else {}) | dict(config)


MAMBA = MixerSpec(
    "Mamba-2",
    ("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"),
    _mamba_shape,
    RecurrentForm.STATE_SPACE,
    "mamba",
    {"in_proj": ("gates", "inputs", "steps"), **OUTPUT},
    TAPS | {"skip": "D"},
    bias="mamba_proj_bias",
    tap_bias="mamba_conv_bias",
    keys=dict.fromkeys(("mamba_d_conv", "mamba_d_state", "mamba_expand", "mamba_n_groups", "mamba_n_heads"), SIZE)
    | {"mamba_d_ssm": SIZE.or_null(), "time_step_limit": LIMIT.list_of(2)},
    known_keys=("mamba_", "time_step_limit"),
    one_meaning=SILU_ALONE,
)
NEMOTRON_SIZES = ("conv_kernel", "expand", "n_groups", "ssm_state_size")
NEMOTRON_MAMBA = replace(
    MAMBA,
    shape=_nemotron_shape,
    part="mixer",
    bias="use_bias",
    tap_bias="use_conv_bias",
    epsilon="layer_norm_epsilon",
    least_step="time_step_min",
    keys=dict.fromkeys((*NEMOTRON_SIZES, "mamba_head_dim", "mamba_num_heads"), SIZE),
    known_keys=("mamba_", "time_step_", "chunk_size", *NEMOTRON_SIZES),
    one_meaning={"mamba_hidden_act": ("silu",), "mlp_bias": (False,), "residual_in_fp32": (False,)},
)
FALCON_MAMBA = replace(
    MAMBA,
    norm="mamba_rms_norm",
    norm_in_front="mamba_norm_before_gate",
    in_scale="ssm_in_multiplier",
    out_scale="ssm_out_multiplier",
    part_scales="ssm_multipliers",
    known_keys=("mamba_", "time_step_limit", "ssm_"),
    one_meaning=SILU_ALONE | {"mamba_use_mlp": (True,), "projectors_bias": (False,)},
)
BAMBA = replace(
    BIASED,
    mlp_bias="mlp_bias",
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
    keys={},
    one_meaning={"n_shared_experts": (1,)},
)

# Short convolutions: LFM2


def _lfm2_shape(config: Config, num_layers: int) -> RecurrentShape:
    return RecurrentShape(num_layers, 0, 0, 0, 0, config["hidden_size"], config.get("conv_L_cache") or 3)


def _lfm2_layers(config: Config) -> list[str] | None:
    attending, numbers = config.get("full_attn_idxs"), range(config.get("num_hidden_layers") or 0)
    return None if attending is None else ["attention" if number in attending else "conv" for number in numbers]


def lfm2_width(config: Config) -> int:
    width: int = config["block_ff_dim"] if "block_ff_dim" in config else config["intermediate_size"]
    if not config["block_auto_adjust_ff_dim"]:
        return width
    width, multiple = 2 * width // 3, config["block_multiple_of"]
    if config.get("block_ffn_dim_multiplier") is not None:
        width = int(config["block_ffn_dim_multiplier"] * width)
        width = -(-width // multiple) * multiple
    return width


LFM2_MLP = {"gate": "w1", "up": "w3", "down": "w2"}
LFM2 = ArchitectureSpec(
    has_qk_norms=True,
    norms={"input_norm": "operator_norm", "mlp_norm": "ffn_norm"},
    names={"output": "self_attn.out_proj"}
    | {role: f"feed_forward.{name}" for role, name in LFM2_MLP.items()}
    | {"query_norm": "self_attn.q_layernorm", "key_norm": "self_attn.k_layernorm"},
    mixer=MixerSpec(
        "short convolutions",
        ("Lfm2ShortConv", "Lfm2MoeShortConv"),
        _lfm2_shape,
        RecurrentForm.CONVOLUTION,
        "conv",
        {"in_proj": ("betas", "gates", "inputs"), **OUTPUT},
        {"taps": "conv.weight", "tap_bias": "conv.bias"},
        bias="conv_bias",
        tap_bias="conv_bias",
        keys={
            "block_ffn_dim_multiplier": POSITIVE,
            "block_multiple_of": SIZE,
            "conv_L_cache": SIZE,
            "full_attn_idxs": COUNT.list_of().or_null(),
        },
        known_keys=("block_", "conv_", "full_attn_idxs", "num_heads"),
        one_meaning={"tie_embedding": (True,), "block_use_swiglu": (True,), "use_pos_enc": (True,)},
    ),
    final_norm="model.embedding_norm",
    width=lfm2_width,
    activation_key=None,
    epsilon_key="norm_eps",
    unlisted_layers=_lfm2_layers,
    defaults=TIED,
)

# Delta attention (KDA): Kimi Linear

LINEAR_SIZES = {  # keys within `linear_attn_config` -> keys in transformers
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
OWN_KEYS = {
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def _kimi_shape(config: Config, num_layers: int) -> RecurrentShape:
    num_heads, head_dim = config["linear_num_heads"], config["linear_head_dim"]
    heads, dims = (num_heads, num_heads), (head_dim, head_dim)
    width = config["linear_conv_kernel_dim"]
    return RecurrentShape(num_layers, *heads, *dims, 3 * num_heads * head_dim, width, num_decays=head_dim)


def _kimi_layers(config: Config) -> list[str]:
    attending = (config.get("linear_attn_config") or {}).get("full_attn_layers") or ()
    numbers = range(1, (config.get("num_hidden_layers") or 0) + 1)
    return ["full_attention" if number in attending else "linear_attention" for number in numbers]


def _kimi_view(config: Config) -> dict[str, Any]:
    view = {OWN_KEYS.get(key, key): value for key, value in config.items()}
    if isinstance(said := config.get("linear_attn_config"), dict):
        view = {key: said[own] for own, key in LINEAR_SIZES.items() if own in said} | view
    return view


def _kimi_faults(config: Config) -> Iterator[str]:
    """Yield a fault if the config's lists do not name each layer exactly once."""
    count, said = config.get("num_hidden_layers"), config.get("linear_attn_config") or {}
    if config.get("layer_types") is not None or count is None:
        return
    lists = [said.get(key) for key in ("full_attn_layers", "kda_layers")]
    numbers = [number for each in lists if isinstance(each, list) for number in each]
    if any(type(number) is not int for number in numbers) or sorted(numbers) != list(range(1, count + 1)):
        yield (
            "config.json has full_attn_layers and kda_layers that do not number its layers; "
            f"expected each number from 1 to {count} in one of these lists of linear_attn_config"
        )


KIMI_RULES: dict[str, KeyRule | None] = {  # the class in transformers ignores these keys
    "linear_attn_config": KeyRule(
        f"an object with sizes, each {SIZE.words}",
        lambda value: isinstance(value, dict) and all(SIZE.holds(value.get(key, 1)) for key in LINEAR_SIZES),
    ),
    "mla_use_nope": KeyRule("true", lambda value: value is True),
    "moe_layer_freq": KeyRule("1", lambda value: value == 1),
    "moe_router_activation_func": KeyRule("sigmoid", lambda value: value == "sigmoid"),
}

HYBRIDS: dict[str, ArchitectureSpec] = {
    "bamba": replace(
        BAMBA,
        partial_rotary_factor=0.5,
        known_keys=("attn_layer_indices", "attn_rotary_emb", "num_logits_to_keep", "z_loss_coefficient"),
        unlisted_layers=_bamba_layers,
        rules={"attn_layer_indices": COUNT.list_of()},
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
        unlisted_layers=lambda config: ["hybrid"] * (config.get("num_hidden_layers") or 0),
        known_keys=("num_logits_to_keep",),
    ),
    "granitemoehybrid": replace(
        GRANITE_MOE,
        names=GRANITE_SHARED,
        intermediate_key="shared_intermediate_size",
        nope=lambda config, windows: (
            frozenset(range(len(windows))) if config["position_embedding_type"] == "nope" else frozenset()
        ),
        experts=replace(GRANITE_EXPERTS, shared_width="shared_intermediate_size", may_be_none=True),
        mixer=MAMBA,
        unlisted_layers=lambda config: ["mamba"] * (config.get("num_hidden_layers") or 0),
        rules={"num_experts_per_tok": COUNT},
        one_meaning={"position_embedding_type": ("rope", "nope")},
        known_keys=("layers_block_type",),
    ),
    "kimi_linear": ArchitectureSpec(
        latent=MLASpec(),
        experts=SCORED_BY_SIGMOID,
        mixer=MixerSpec(
            "delta attention (KDA)",
            ("KimiLinearDeltaAttention",),
            _kimi_shape,
            keys=dict.fromkeys(LINEAR_SIZES.values(), SIZE),
        ),
        unlisted_layers=_kimi_layers,
        rules=KIMI_RULES,
        faults=_kimi_faults,
        view=_kimi_view,
        kernels_lack="its layers have states: delta attention (KDA)",
    ),
    "lfm2": LFM2,
    "lfm2_moe": replace(
        LFM2,
        width=None,
        experts=MoESpec(
            Score.SIGMOID,
            lambda config: behind_the_first(config, "num_dense_layers"),
            names=MoETensorNames(
                router="feed_forward.gate.weight",
                each={role: f"feed_forward.experts.{{}}.{name}.weight" for role, name in LFM2_MLP.items()},
                choice_bias="feed_forward.expert_bias",
            ),
            normalises="norm_topk_prob",
            least_sum=1e-6,
            scale="routed_scaling_factor",
            keys={"num_dense_layers": SOME_LAYERS},
            one_meaning={"use_expert_bias": (True,)},
        ),
        rules={"layer_types": WORD.list_of()},
    ),
    "nemotron_h": ArchitectureSpec(
        norms=dict.fromkeys(("input_norm", "mlp_norm"), "norm"),
        norm_form=NormForm.ONCE,
        has_gates=False,
        activation_key="mlp_hidden_act",
        names={role: name.replace("self_attn", "mixer").replace("mlp", "mixer") for role, name in LINEARS.items()},
        nope=all_layers,
        experts=NEMOTRON_EXPERTS,
        mixer=NEMOTRON_MAMBA,
        does_one_thing=True,
        final_norm="model.norm_f",
        own_decoder="backbone.",
        own_embedding="model.embeddings.weight",
        epsilon_key="layer_norm_epsilon",
        known_keys=("attention_head_dim", "norm_eps", "num_logits_to_keep"),
        defaults={"head_dim": 128, "layer_norm_epsilon": 1e-5, "moe_latent_size": None},
        rules={"num_nextn_predict_layers": SOME_LAYERS},
        view=_with_count,
    ),
    "qwen3_5_moe_text": replace(
        QWEN35, intermediate_key="shared_expert_intermediate_size", experts=SHARED_EXPERT, nested_in=("qwen3_5_moe",)
    ),
    "qwen3_5_text": replace(QWEN35, nested_in=("qwen3_5",)),
    "qwen3_next": replace(
        QWEN35,
        mixer=JOINT_DELTA_NET,
        unlisted_layers=_next_layers,
        experts=replace(SHARED_EXPERT, layers=in_each_so_many, normalises="norm_topk_prob", keys=SPARSE_KEYS),
    ),
}
