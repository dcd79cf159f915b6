"""The values of a config that a model is made of, and what each must be: told before anything starts. Without torch.

`transformers` checks the types of some of them when it loads a model, and others nowhere. How values must fit together
is told by `config_faults`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
MOST = 2**53  # what JSON's readers agree on
MOST_LAYERS = 10_000  # ten times those of the deepest model: lists have an entry for each
MOST_REAL = 3.4e38  # what a float32 holds
KNOWN_ACTIVATIONS = {  # by the names that transformers has for them
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu"),
    *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
}
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


def number_of(config: Config, key: str) -> float:
    """Raises KeyError or ValueError for a number that is missing or is none."""
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"its {key} is {value!r:.80}")
    return float(value)


def numbers_of(config: Config, key: str, count: int) -> list[float]:
    """Read `count` numbers, all 1 where the config says null. Raises KeyError or ValueError as `number_of` does."""
    values = [1.0] * count if config[key] is None else config[key]
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"its {key} is {values!r:.80}")
    return [number_of({key: value}, key) for value in values]


def shown(name: str) -> str:
    """A name that a config has made up, short, and without what would break a line."""
    return repr(name)[1:-1][:80]


def line_of(error: Exception, most: int) -> str:
    """The words of an error that quotes a file: in one line of so many characters, with nothing a terminal acts on."""
    words = " ".join(str(error).split())[:most]
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in words)


@dataclass(frozen=True)
class KeyRule:
    """A test of a key's value, and in words what the value must be."""

    words: str
    holds: Callable[[Any], bool]

    def or_null(self) -> KeyRule:
        return self.or_else(KeyRule("null", lambda value: value is None))

    def or_else(self, other: KeyRule) -> KeyRule:
        return KeyRule(f"{self.words}, or {other.words}", lambda value: self.holds(value) or other.holds(value))

    def list_of(self, count: int | None = None) -> KeyRule:
        """A list of such values, of so many where it is known."""
        said = "a list, each" if count is None else f"a list of {count:,}, each"

        def holds(value: Any) -> bool:
            return isinstance(value, list) and count in (None, len(value)) and all(map(self.holds, value))

        return KeyRule(f"{said} {self.words}", holds)


def whole(least: int, words: str, most: int = MOST) -> KeyRule:
    """An integer of at least so much, and no more than that."""
    return KeyRule(words, lambda value: type(value) is int and least <= value <= most)


def real(words: str, is_open: bool = True, types: tuple[type, ...] = (int, float)) -> KeyRule:
    """A number above 0, or 0 as well."""

    def holds(value: Any) -> bool:
        return type(value) in types and (value > 0 if is_open else value >= 0) and value <= MOST_REAL

    return KeyRule(words, holds)


SIZE = whole(1, f"a positive integer, at most {MOST:,}")
COUNT = whole(0, f"an integer from 0 to {MOST:,}")
LAYERS = whole(1, f"a positive integer, at most {MOST_LAYERS:,}", MOST_LAYERS)
SOME_LAYERS = whole(0, f"an integer from 0 to {MOST_LAYERS:,}", MOST_LAYERS)
ID = whole(-1, "a token id")
POSITIVE = real("a finite number above 0")
BASE = KeyRule("a finite number above 0, other than 1", lambda value: POSITIVE.holds(value) and value != 1)  # of powers
NOT_NEGATIVE = real("a finite number, 0 or more", is_open=False)
FLOAT = real("a finite number above 0 with a decimal point", types=(float,))  # so transformers' classes want it
FLOAT_OR_ZERO = real("a finite number with a decimal point, 0.0 or more", is_open=False, types=(float,))
SHARE = KeyRule("a number above 0, at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1)
UNIT = KeyRule("a number from 0.0 to 1.0, with a decimal point", lambda value: type(value) is float and 0 <= value <= 1)
DROPOUT = KeyRule("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1)
LIMIT = KeyRule(
    "a number, 0 or more, or Infinity",  # which transformers writes in its own way
    lambda value: (type(value) in (int, float) and value >= 0) or value == {"__float__": "Infinity"},
)
SWITCH = KeyRule("true or false", lambda value: isinstance(value, bool))
ACTIVATION = KeyRule(
    "an activation that transformers has, silu for one",
    lambda value: isinstance(value, str) and value in KNOWN_ACTIVATIONS,
)
WORD = KeyRule("a word", lambda value: isinstance(value, str))
DTYPE = KeyRule(f"one of {', '.join(DTYPES)}", lambda value: isinstance(value, str) and value in DTYPES)

SIZES = (
    *("attention_chunk_size", "block_multiple_of", "chunk_size", "conv_L_cache", "conv_kernel"),
    *("decoder_sparse_step", "expand", "experts_per_token", "floor_scale", "full_attention_interval", "head_dim"),
    *("hidden_size", "interleave_moe_layer_step", "intermediate_size", "intermediate_size_mlp", "kv_lora_rank"),
    *("linear_conv_kernel_dim", "linear_head_dim", "linear_key_head_dim", "linear_num_heads", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_value_head_dim", "mamba_chunk_size", "mamba_d_conv", "mamba_d_ssm"),
    *("mamba_d_state", "mamba_expand", "mamba_head_dim", "mamba_n_groups", "mamba_n_heads", "mamba_num_heads"),
    *("max_position_embeddings", "moe_intermediate_size", "moe_k", "moe_latent_size", "moe_layer_interval"),
    *("moe_num_experts",),
    *("moe_shared_expert_intermediate_size", "n_group", "n_groups", "n_routed_experts", "no_rope_layer_interval"),
    *("num_attention_heads", "num_experts", "num_experts_per_tok", "num_key_value_heads"),
    *("original_max_position_embeddings", "prefix_dense_intermediate_size", "pretraining_tp", "q_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "query_pre_attn_scalar", "rotary_dim", "ssm_state_size", "topk_group"),
    *("v_head_dim", "vocab_size"),
)
COUNTS = (
    *("chunk_size_feed_forward", "global_attn_every_n_layers", "max_window_layers", "moe_num_shared_experts"),
    *("n_shared_experts", "num_local_experts", "num_shared_experts", "prefix_dense_sliding_window_pattern"),
    *("shared_expert_intermediate_size", "shared_intermediate_size"),
)
COUNTS_OF_LAYERS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", "num_nextn_predict_layers")
FLOATS = (
    *("attention_in_multiplier", "attention_out_multiplier", "attn_logit_softcapping", "clip_qkv"),
    *("final_logit_softcapping", "key_multiplier", "layer_norm_eps", "layer_norm_epsilon", "lm_head_multiplier"),
    *("logit_scale", "moe_routed_scaling_factor", "norm_eps", "norm_epsilon", "rms_norm_eps", "route_scale"),
    *("routed_scaling_factor", "router_scaling_factor", "ssm_in_multiplier", "ssm_out_multiplier", "swiglu_alpha"),
    *("swiglu_limit", "time_step_floor", "time_step_max", "time_step_min"),
)
FLOATS_OR_ZERO = (
    *("attn_scale", "input_jitter_noise", "moe_norm_min", "moe_router_logit_softcapping", "router_aux_loss_coef"),
    *("router_jitter_noise", "z_loss_coefficient"),
)
POSITIVES = (
    *("attention_multiplier", "block_ffn_dim_multiplier", "embedding_multiplier", "logits_scaling"),
    *("residual_multiplier", "rope_local_base_freq", "rotary_emb_base"),
)
SHARES = ("partial_rotary_factor", "rotary_pct")
SWITCHES = (
    *("attention_bias", "attention_out_bias", "attn_temperature_tuning", "bias", "conv_bias", "lm_head_bias"),
    *("mlp_bias", "moe_apply_router_weight_on_input", "mup_enabled", "norm_topk_prob", "qk_layernorm", "qkv_bias"),
    *("rope_interleave", "tie_word_embeddings", "use_bias", "use_bidirectional_attention", "use_conv_bias"),
    *("use_expert_bias", "use_parallel_residual", "use_qk_norm", "use_sliding_window"),
)
DROPOUTS = (
    *("attention_dropout", "classifier_dropout", "embd_pdrop", "embedding_dropout", "hidden_dropout", "resid_pdrop"),
    *("residual_dropout",),
)
IDS = ("bos_token_id", "eod_token_id", "pad_token_id", "sep_token_id")
OR_NULL = {  # in all kinds that have them
    *IDS,
    *("attn_logit_softcapping", "clip_qkv", "final_logit_softcapping", "global_attn_every_n_layers", "mamba_d_ssm"),
    *("moe_latent_size", "num_nextn_predict_layers", "partial_rotary_factor", "prefix_dense_intermediate_size"),
    *("q_lora_rank", "sliding_window", "use_bidirectional_attention"),
}
RULES: dict[str, KeyRule] = {
    **dict.fromkeys(SIZES, SIZE),
    **dict.fromkeys(COUNTS, COUNT),
    **dict.fromkeys(COUNTS_OF_LAYERS, SOME_LAYERS),
    "num_hidden_layers": LAYERS,
    **dict.fromkeys(FLOATS, FLOAT),
    **dict.fromkeys(FLOATS_OR_ZERO, FLOAT_OR_ZERO),
    **dict.fromkeys(POSITIVES, POSITIVE),
    **dict.fromkeys(SHARES, SHARE),
    "rope_theta": BASE,
    **dict.fromkeys(SWITCHES, SWITCH),
    **dict.fromkeys(DROPOUTS, DROPOUT),
    **dict.fromkeys(IDS, ID),
    **dict.fromkeys(("hidden_act", "hidden_activation", "mamba_hidden_act", "mlp_hidden_act"), ACTIVATION.or_null()),
    "attn_layer_indices": COUNT.list_of(),
    "dtype": DTYPE.or_null(),
    "full_attn_idxs": COUNT.list_of().or_null(),
    "initializer_range": UNIT,
    "layers_block_type": WORD.list_of().or_null(),
    "mamba_ssm_cache_dtype": WORD,
    "mlp_multipliers": POSITIVE.list_of(2),
    "mlp_only_layers": COUNT.list_of().or_null(),
    "moe_layer_end_index": whole(-1, f"an integer from -1 to {MOST_LAYERS:,}", MOST_LAYERS),
    "moe_layers": COUNT.list_of().or_null(),
    "mtp_layers_block_type": WORD.list_of().or_null(),
    "num_logits_to_keep": COUNT.or_null(),
    "position_embedding_type": WORD.or_null(),
    "sliding_window": SIZE,
    "sliding_window_pattern": SIZE.or_else(WORD).or_null(),
    "ssm_multipliers": POSITIVE.list_of(5),
    "time_step_limit": LIMIT.list_of(2),
    "torch_dtype": DTYPE.or_null(),
}
RULES |= {key: RULES[key].or_null() for key in OR_NULL}
ANGLES: dict[str, KeyRule] = {  # within `rope_parameters` and `rope_scaling`
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), POSITIVE),
    "rope_theta": BASE,
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "alpha"), POSITIVE.or_null()),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NOT_NEGATIVE.or_null()),
    **dict.fromkeys(("short_factor", "long_factor"), POSITIVE.list_of()),
    "llama_4_scaling_beta": NOT_NEGATIVE,
    "original_max_position_embeddings": SIZE,
    "partial_rotary_factor": SHARE,
    "truncate": SWITCH.or_null(),
    "rope_type": WORD,
    "type": WORD,
}


HEADS_MAY_BE_NULL = {  # kinds in which there are then as many of keys as of queries
    *("afmoe", "apertus", "arcee", "cohere", "cohere2", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1"),
    *("ernie4_5", "flex_olmo", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "internlm3", "iquestcoder", "jais2", "llama", "olmo", "olmo2", "olmo3"),
    *("olmoe", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"),
}
WIDTH_MAY_BE_NULL = {  # kinds in which heads then share the width of a row
    *("arcee", "ernie4_5", "internlm3", "iquestcoder", "jais2", "llama", "mistral", "mixtral", "seed_oss"),
}
OF_LINEAR_ATTENTION = {  # sizes within a part of Kimi Linear's config, and how transformers writes them
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
KIMI_LINEAR: dict[str, KeyRule | None] = {  # what its class takes for granted, whatever a config says
    "linear_attn_config": KeyRule(
        f"an object with sizes, each {SIZE.words}",
        lambda value: isinstance(value, dict) and all(SIZE.holds(value.get(key, 1)) for key in OF_LINEAR_ATTENTION),
    ),
    "mla_use_nope": KeyRule("true", lambda value: value is True),
    "moe_layer_freq": KeyRule("1", lambda value: value == 1),
    "moe_router_activation_func": KeyRule("sigmoid", lambda value: value == "sigmoid"),
}
HUNYUAN: dict[str, KeyRule | None] = {"moe_intermediate_size": None}
OF_KINDS: dict[str, dict[str, KeyRule | None]] = {  # where a kind has other rules; None: it does not read the key
    "cohere2_moe": {"attention_dropout": UNIT, "rms_norm_eps": FLOAT.or_null(), "sliding_window_pattern": SIZE},
    "cwm": {"bos_token_id": ID, "sliding_window": SIZE},
    "deepseek_v2": {"attention_dropout": UNIT},
    "exaone_moe": {"sliding_window": SIZE},
    "flex_olmo": {"attention_dropout": UNIT},
    "granitemoehybrid": {"num_experts_per_tok": COUNT},  # which may have no experts
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN,
    "hy_v3": {"attention_dropout": UNIT},
    "kimi_linear": KIMI_LINEAR,
    "laguna": {"sliding_window": SIZE},
    "lfm2_moe": {"layer_types": WORD.list_of()},
    "nemotron_h": {"num_logits_to_keep": COUNT},
}


def numbers_fault(config: Config) -> str | None:
    """Say which number of a text model's config is none that a forward can take, and what was expected."""
    rules = _rules_of(str(config.get("model_type")))
    if config.get("use_sliding_window") is False:
        rules["sliding_window"] = COUNT.or_null()
    for key, value in config.items():
        if (rule := rules.get(key)) is not None and not rule.holds(value):
            return fault_of(key, value, rule)
        if key in ("rope_parameters", "rope_scaling") and (fault := _angles_fault(key, value)):
            return fault
    return None


def _rules_of(kind: str) -> dict[str, KeyRule | None]:
    rules: dict[str, KeyRule | None] = {**RULES, **OF_KINDS.get(kind, {})}
    rules |= {"num_key_value_heads": SIZE.or_null()} if kind in HEADS_MAY_BE_NULL else {}
    return rules | ({"head_dim": SIZE.or_null()} if kind in WIDTH_MAY_BE_NULL else {})


def fault_of(key: str, value: Any, rule: KeyRule) -> str:
    """The words about a value that is not what was expected."""
    return f"config.json has {key} = {value!r:.80}; expected {rule.words}"


def _angles_fault(name: str, said: Any) -> str | None:
    """The same of words about angles, for all layers or by their type."""
    if said is None:
        return None
    if not isinstance(said, dict):
        return f"config.json has {name} = {said!r:.80}; expected an object or null"
    for key, value in said.items():
        if key in ANGLES and not ANGLES[key].holds(value):
            return fault_of(f"{name}.{key}", value, ANGLES[key])
        if isinstance(value, dict) and (fault := _angles_fault(f"{name}.{shown(key)}", value)):
            return fault
    return None
