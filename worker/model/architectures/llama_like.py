"""Dense decoders: Llama, Mistral, Qwen2, Qwen3, Gemma, Phi, GLM, OLMo, Cohere, Granite and others. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from swiftbatch.worker.kernels.layer_specs import Activation, NormForm
from swiftbatch.worker.model.architectures.attention_layers import (
    TypesOrPattern,
    Windows,
    by_layer_types,
    from_max_window_layers,
    no_windows,
    window_in_all_layers,
    window_in_all_layers_if_said,
    without_windows,
    without_windows_if_said,
)
from swiftbatch.worker.model.architectures.nas_blocks import nas_faults, nas_layers, nas_widths, with_nas_sizes
from swiftbatch.worker.model.architectures.spec import (
    ACTIVATIONS,
    ALWAYS,
    BEHIND,
    IN_FRONT,
    NO_BIASES,
    NULL_HEADS,
    NULL_SIZES,
    NULL_WIDTH,
    PATTERN_RULE,
    SILU,
    WINDOW,
    ArchitectureSpec,
    GGUFSpec,
    WindowAngles,
)
from swiftbatch.worker.model.config_values import SIZE, SWITCH, Config, list_of_layers

SIDE_BY_SIDE = "its norms subtract means, and its layers attend and feed forward side by side"
FUSED_QUERIES = dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj")
FUSED_GATES = dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")
TIED = {"tie_word_embeddings": True}
LLAMA_BASE = 10_000.0  # of rotary positions, by its class's default
NOPE_LAYERS = 4  # every fourth layer of SmolLM3 has no rotary positions

BIASED = ArchitectureSpec("attention_bias", "attention_bias")
QK_NORMED = replace(BIASED, has_qk_norms=True)
LLAMA = replace(BIASED, mlp_bias="mlp_bias", rules=NULL_SIZES)
GLM = ArchitectureSpec("attention_bias", is_interleaved=True, partial_rotary_factor=0.5, names=FUSED_GATES)
GRANITE = replace(
    LLAMA,
    scales={
        "scores": "attention_multiplier",
        "embedding": "embedding_multiplier",
        "residual": "residual_multiplier",
        "logits": "logits_scaling",
    },
    rules=NULL_HEADS,
)
OLMO2 = replace(
    QK_NORMED, joins_heads=True, norms=BEHIND, norm_form=NormForm.ONCE, rounds_angles=False, rules=NULL_HEADS
)
COHERE = replace(
    BIASED,
    is_interleaved=True,
    norms={"input_norm": "input_layernorm"},
    norm_form=NormForm.CENTRED,
    is_parallel=True,
    epsilon_key="layer_norm_eps",
    scales={"logits_factor": "logit_scale"},
    rules=NULL_HEADS,
)
HUNYUAN = replace(
    QK_NORMED,
    norms_after_rope=True,
    names={"query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm"},
    has_fixed_alpha=True,
    known_keys=(
        *("anyres_", "attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id", "im_"),
        *("mask_init_id", "moe_", "num_experts", "num_media_embeds", "num_shared_expert", "org_vocab_size", "pad_id"),
        *("routed_scaling_factor", "sep_id", "text_", "video_", "vit_"),
    ),
    rules=NULL_HEADS,
)
GEMMA_NORMS = {"mlp_norm": "pre_feedforward_layernorm", "input_norm": "input_layernorm"}
SOFTCAPS = {"scores": "attn_logit_softcapping", "logits": "final_logit_softcapping"}
SCORE_RULE = {"query_pre_attn_scalar": SIZE}
GEMMA3_PATTERN = 6  # every sixth layer of Gemma 3 has no window
GEMMA = ArchitectureSpec(
    "attention_bias", "attention_bias", norm_form=NormForm.ONE_MORE, scales_by_width=True, defaults=TIED
)
GEMMA2 = replace(
    GEMMA,
    norms=GEMMA_NORMS | BEHIND,
    activation_key="hidden_activation",
    scales={"score_width": "query_pre_attn_scalar"},
    caps=SOFTCAPS,
    windows=TypesOrPattern(2, None),
    known_keys=("sliding_window_size",),
    rules=SCORE_RULE,
)

GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
GEMMA2_GGUF = GGUFSpec(
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


def where_switched_on(config: Config) -> Windows:
    """Return Qwen's windows if `use_sliding_window` is true, otherwise none."""
    is_on = SWITCH.of({"use_sliding_window": False} | dict(config), "use_sliding_window")
    if not is_on and not isinstance(config.get("sliding_window"), int | None):
        raise ValueError(f"its sliding_window is {config['sliding_window']!r:.80}")
    if config.get("layer_types"):
        windows = by_layer_types(config)
        if any(windows) and not is_on:
            raise ValueError("its layer_types have windows that are switched off")
        return windows
    return from_max_window_layers(config) if is_on else no_windows(config)


def as_completed(config: Config) -> dict[str, Any]:
    """Return a Llama config with what its class defaults to, and without a key of YaRN's own code.

    `finetuned` matters only for the type `dynamic-yarn`.
    """
    view = dict(config)
    if view.get("num_key_value_heads") is None and "num_attention_heads" in view:
        view["num_key_value_heads"] = view["num_attention_heads"]
    if "max_sequence_length" in view:
        view.setdefault("max_position_embeddings", view["max_sequence_length"])
    for key in ("rope_scaling", "rope_parameters"):
        said = view.get(key)
        if isinstance(said, dict) and "yarn" in (said.get("type"), said.get("rope_type")):
            view[key] = {name: value for name, value in said.items() if name != "finetuned"}
    return view


def other_base(config: Config) -> Iterator[str]:
    """Yield a fault if LWM's own name of the rotary base contradicts the one that is read."""
    said = config.get("rope_scaling") or config.get("rope_parameters") or {}
    read = said.get("rope_theta", config.get("rope_theta", LLAMA_BASE)) if isinstance(said, dict) else None
    if "theta" in config and config["theta"] != read:
        yield f"config.json has theta = {config['theta']!r:.80} and rope_theta = {read!r:.80}; expected the same base"


def by_no_rope_layers(config: Config, windows: Windows) -> frozenset[int]:
    """Return the layers without rotary positions: those with a 0 in `no_rope_layers`."""
    turns = list_of_layers(config, "no_rope_layers", (0, 1))
    return frozenset(number for number, is_turned in enumerate(turns) if not is_turned)


def _smollm3_of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    turned = [int(number % NOPE_LAYERS != 0) for number in range(1, config["num_hidden_layers"] + 1)]
    return {"no_rope_layers": turned, "no_rope_layer_interval": NOPE_LAYERS}


def _score_width(config: dict[str, Any], num_layers_of_largest: int) -> int:
    """Return the number whose square root divides queries.

    In the largest model it is `hidden_size / num_attention_heads`.
    """
    is_largest = config["num_hidden_layers"] == num_layers_of_largest
    return int(config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"])


def _gemma3_of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    numbers = range(1, config["num_hidden_layers"] + 1)
    types = ["sliding_attention" if number % GEMMA3_PATTERN else "full_attention" for number in numbers]
    return {"query_pre_attn_scalar": _score_width(config, num_layers_of_largest=62), "layer_types": types}


LLAMA_LIKE: dict[str, ArchitectureSpec] = {
    "apertus": replace(
        QK_NORMED,
        norms={"input_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
        activations={"xielu": Activation.XIELU},
        has_gates=False,
        curve=tuple(f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")),
        rules=NULL_HEADS,
    ),
    "arcee": replace(LLAMA, has_gates=False),
    "cohere": replace(
        COHERE,
        qk_norms_key="use_qk_norm",
        qk_norms_differ=True,
        known_keys=("model_max_length",),
        defaults=TIED | {"use_qk_norm": False},
    ),
    "cohere2": replace(
        COHERE,
        windows=TypesOrPattern(4),
        nope=without_windows,
        known_keys=("layer_switch", "sliding_window_pattern"),
        rules=NULL_HEADS | PATTERN_RULE,
        defaults=TIED,
    ),
    "cwm": ArchitectureSpec(mlp_bias="mlp_bias", windows=by_layer_types),
    "ernie4_5": ArchitectureSpec("use_bias", "use_bias", "use_bias", is_interleaved=True, rules=NULL_SIZES),
    "exaone4": ArchitectureSpec(
        has_qk_norms=True,
        norms=BEHIND,
        windows=by_layer_types,
        nope=without_windows_if_said,
        known_keys=("sliding_window_pattern",),
    ),
    "gemma": replace(
        GEMMA,
        activations={**ACTIVATIONS, "gelu": Activation.GELU_TANH},
        gguf=GGUFSpec("gemma", GELU, has_raised_norms=True),
    ),
    "gemma2": replace(GEMMA2, gguf=GEMMA2_GGUF),
    "gemma3_text": replace(
        GEMMA2,
        has_qk_norms=True,
        windows=TypesOrPattern(GEMMA3_PATTERN),
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
            GEMMA2_GGUF,
            name="gemma3",
            unsaid=dict.fromkeys(SOFTCAPS.values()),
            completed=_gemma3_of_gguf,
            local_base="rope.freq_base_swa",
        ),
    ),
    "glm": GLM,
    "glm4": replace(
        GLM, norms=IN_FRONT | {"output_norm": "post_self_attn_layernorm", "down_norm": "post_mlp_layernorm"}
    ),
    "gpt_neox": ArchitectureSpec(
        epsilon_key="layer_norm_eps",
        kernels_lack=SIDE_BY_SIDE,
    ),
    "granite": replace(
        GRANITE,
        gguf=GGUFSpec(
            "granite",
            SILU | NO_BIASES,
            said={
                "attention.scale": "attention_multiplier",
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
            has_paired_heads=True,
        ),
    ),
    "granite_swa": replace(GRANITE, kernels_lack="its layers have sinks, and angles of their own"),
    "helium": ArchitectureSpec("attention_bias", None, "mlp_bias", is_interleaved=True, norm_form=NormForm.ONCE),
    "hunyuan_v1_dense": HUNYUAN,
    "internlm3": ArchitectureSpec("qkv_bias", "bias", "bias", rules=NULL_SIZES),
    "iquestcoder": LLAMA,
    "jais2": replace(LLAMA, norm_form=NormForm.SHIFTED, has_gates=False, epsilon_key="layer_norm_eps"),
    "llama": replace(
        LLAMA,
        known_keys=("attn_pdrop", "max_sequence_length", "param_scan_axis", "scan_", "theta"),
        defaults={"rope_theta": LLAMA_BASE},
        faults=other_base,
        view=as_completed,
        has_plain_tokenizer=True,
        is_taken_over=True,
        gguf=GGUFSpec(
            "llama",
            SILU | NO_BIASES,
            said=WINDOW,
            unsaid={"sliding_window": 0},
            completed=lambda said: {"model_type": "mistral"} if said["sliding_window"] else {"sliding_window": None},
            has_paired_heads=True,
        ),
    ),
    "ministral": ArchitectureSpec(windows=by_layer_types),
    "ministral3": ArchitectureSpec(windows=window_in_all_layers_if_said, growth_key="llama_4_scaling_beta"),
    "mistral": ArchitectureSpec(
        windows=window_in_all_layers, rules=NULL_WIDTH, nested_in=("mistral3",), is_taken_over=True
    ),
    "nemotron-nas": replace(
        LLAMA,
        widths=nas_widths,
        view=with_nas_sizes,
        faults=nas_faults,
        unlisted_layers=nas_layers,
        has_plain_tokenizer=True,
        lacks_class=True,
        rules=NULL_SIZES | {"intermediate_size": SIZE.or_null()},
    ),
    "olmo": ArchitectureSpec(
        rules=NULL_HEADS,
        kernels_lack="its norms have no weights, and subtract means",
    ),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, windows=TypesOrPattern(4, None), window_angles=WindowAngles(5e5, 5e5)),
    "phi": ArchitectureSpec(epsilon_key="layer_norm_eps", rules=NULL_HEADS, kernels_lack=SIDE_BY_SIDE),
    "phi3": ArchitectureSpec(
        partial_rotary_factor=1.0,
        names=FUSED_QUERIES | FUSED_GATES,
        has_long_angles=True,
        windows=window_in_all_layers_if_said,
        known_keys=("full_attn_mod", "interpolate_factor"),
        rules=NULL_HEADS,
        gguf=GGUFSpec(
            "phi3",
            SILU,
            said=WINDOW,
            unsaid={"sliding_window": 0},
            names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            completed=lambda config: {"sliding_window": config["sliding_window"] or None},
            turns_parts=True,
            tokens_take_spaces=True,
        ),
    ),
    "qwen2": ArchitectureSpec(
        ALWAYS,
        windows=where_switched_on,
        rules=NULL_HEADS,
        aliases=("mimo",),
        gguf=GGUFSpec("qwen2", SILU | {"use_sliding_window": False}),
        is_taken_over=True,
    ),
    "qwen3": replace(
        QK_NORMED,
        windows=where_switched_on,
        rules=NULL_HEADS,
        defaults_head_dim=True,
        aliases=("qwen3_vl_text",),
        nested_in=("qwen3_vl",),
        has_plain_tokenizer=True,
        gguf=GGUFSpec("qwen3", SILU | {"attention_bias": False, "use_sliding_window": False}),
        is_taken_over=True,
    ),
    "seed_oss": ArchitectureSpec("attention_bias", "attention_out_bias", "mlp_bias", rules=NULL_SIZES),
    "smollm3": replace(
        LLAMA,
        nope=by_no_rope_layers,
        known_keys=("no_rope_layer",),
        rules=NULL_HEADS,
        gguf=GGUFSpec(
            "smollm3",
            SILU | NO_BIASES | {"use_sliding_window": False},
            completed=_smollm3_of_gguf,
            has_paired_heads=True,
        ),
    ),
    "starcoder2": ArchitectureSpec(
        "use_bias",
        "use_bias",
        "use_bias",
        names={"up": "mlp.c_fc", "down": "mlp.c_proj"},
        norm_form=NormForm.SHIFTED,
        has_gates=False,
        windows=window_in_all_layers_if_said,
        epsilon_key="norm_epsilon",
        known_keys=("layer_norm_epsilon",),
        defaults=TIED,
    ),
    "vaultgemma": replace(GEMMA2, norms=GEMMA_NORMS),
}
