"""Faults in a text model's config: unsupported values, and values that contradict each other. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from swiftbatch.worker.model.architectures.attention_layers import WINDOWED
from swiftbatch.worker.model.architectures.catalogue import architecture_of, layer_types
from swiftbatch.worker.model.architectures.moe_layers import CHOSEN_KEYS, COUNT_KEYS
from swiftbatch.worker.model.config_values import (
    ACTIVATION,
    BASE,
    COUNT,
    DTYPE,
    LAYERS,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SIZE,
    SOME_LAYERS,
    SWITCH,
    WORD,
    Config,
    KeyRule,
    shown,
)
from swiftbatch.worker.model.file_checks import eos_fault
from swiftbatch.worker.model.formats.contract import StoredTensor

SIZES = (
    *("experts_per_token", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "moe_k"),
    *("moe_num_experts", "n_routed_experts", "num_attention_heads", "num_experts", "num_experts_per_tok"),
    *("num_key_value_heads", "original_max_position_embeddings", "pretraining_tp", "vocab_size"),
)
RULES: dict[str, KeyRule] = {  # keys shared by architectures; each architecture adds its own
    **dict.fromkeys(SIZES, SIZE),
    **dict.fromkeys(("max_window_layers", "num_local_experts"), COUNT),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), SWITCH),
    **dict.fromkeys(("dtype", "torch_dtype"), DTYPE.or_null()),
    "hidden_act": ACTIVATION.or_null(),
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": SOME_LAYERS.or_null(),
    "partial_rotary_factor": SHARE.or_null(),
    "rms_norm_eps": POSITIVE,
    "rope_theta": BASE,
    "rotary_pct": SHARE,
    "sliding_window": SIZE.or_null(),
    "use_bidirectional_attention": SWITCH.or_null(),
}
ANGLES: dict[str, KeyRule] = {  # keys within `rope_parameters` and `rope_scaling`
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
KEYS = "model.layers.0.self_attn.k_proj.weight"
PER_LAYER: dict[str, KeyRule] = {  # lists with a value for each layer
    "indexer_types": WORD,
    "layer_rope_theta": NOT_NEGATIVE,
    "layer_types": WORD,
    "layers_block_type": WORD,
    "mlp_layer_types": WORD,
    "no_rope_layers": COUNT,
    "num_attention_heads_per_layer": SIZE,
}
OF_ALL_KINDS = (
    *("max_position_embeddings", "vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
NEEDED = OF_ALL_KINDS[:2]
OF_ATTENTION = ("hidden_size", "num_attention_heads")  # the sizes of caches, beside the number of layers


def config_fault(config: Config) -> str | None:
    """Return the first fault of a text model's config, or None if it has none."""
    for key in OF_ALL_KINDS:
        value = config.get(key)
        if (value is not None or key in NEEDED) and not RULES[key].holds(value):
            return fault_of(key, value, RULES[key])
    if fault := eos_fault("config.json", config):
        return fault
    if (form := architecture_of(config)) is None:
        return None
    return _value_fault(config) or next((fault for find in (form.faults, *RELATIONS) for fault in find(config)), None)


def unsaid_fault(config: Config) -> str | None:
    """Return a fault if the config leaves a size to the class's default."""
    form = architecture_of(config)
    needed = [*OF_ATTENTION, *(form.latent.needed if form is not None and form.latent else ())]
    if form is None or not form.does_one_thing:
        needed.append("num_hidden_layers")
    elif not layer_types(config):
        needed.append("layers_block_type")
    if unsaid := next((key for key in needed if key not in config), None):
        return f"config.json has no {unsaid}; expected the one that its weights are made for"
    return None


def _value_fault(config: Config) -> str | None:
    form = architecture_of(config)
    rules: dict[str, KeyRule | None] = {**form.own_rules(), **RULES, **form.rules} if form else {}
    if config.get("use_sliding_window") is False:
        rules["sliding_window"] = COUNT.or_null()
    for key, value in config.items():
        if (rule := rules.get(key)) is not None and not rule.holds(value):
            return fault_of(key, value, rule)
        if key in ("rope_parameters", "rope_scaling") and (fault := _angles_fault(key, value)):
            return fault
    return None


def fault_of(key: str, value: Any, rule: KeyRule) -> str:
    return f"config.json has {key} = {value!r:.80}; expected {rule.words}"


def _angles_fault(name: str, said: Any) -> str | None:
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


def _layers(config: Config) -> Iterator[str]:
    form = architecture_of(config)
    if form is not None and form.does_one_thing and "layers_block_type" in config and not layer_types(config):
        yield fault_of("layers_block_type", config["layers_block_type"], WORD.list_of())
    if (count := config.get("num_hidden_layers")) is None:
        return
    for key, rule in PER_LAYER.items():
        of_each = rule.list_of(count)
        if config.get(key) is not None and not of_each.holds(config[key]):
            yield fault_of(key, config[key], of_each)
    chosen = SIZE.or_else(SIZE.list_of(count))  # some configs list it for each layer
    if "moe_topk" in config and not chosen.holds(config["moe_topk"]):
        yield fault_of("moe_topk", config["moe_topk"], chosen)
    if WINDOWED in (config.get("layer_types") or ()) and "sliding_window" in config and not config["sliding_window"]:
        yield fault_of("sliding_window", config["sliding_window"], SIZE)


def _heads(config: Config) -> Iterator[str]:
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and keys and heads % keys:
        yield f"config.json has {heads} attention heads for {keys} of keys and values; expected a multiple"
    if "qk_nope_head_dim" in config or not heads:
        return
    hidden, head_dim = config.get("hidden_size"), config.get("head_dim")
    if head_dim is None and hidden and hidden % heads:
        yield f"config.json has hidden_size = {hidden} for {heads} attention heads; expected a multiple, or head_dim"
    if (width := head_dim or (hidden // heads if hidden else None)) and width % 2:
        yield f"config.json has heads of {width} dimensions; expected an even number"


def _experts(config: Config) -> Iterator[str]:
    count, chosen = (_said(config, keys) for keys in (COUNT_KEYS, CHOSEN_KEYS))
    form = architecture_of(config)
    may_be_none = form is not None and form.experts is not None and form.experts.may_be_none
    if not may_be_none and 0 in [config.get(key) for key in COUNT_KEYS]:
        yield "config.json has 0 experts; expected at least one"
    if not count or not chosen:
        return
    if chosen > count:
        yield f"config.json has {chosen} experts of a row, of {count}; expected at most all of them"
    if not (groups := config.get("n_group")) or groups == 1:
        return
    best = config.get("topk_group") or groups
    if count % groups or best > groups or chosen > count // groups * best:
        yield (
            f"config.json has n_group = {groups} and topk_group = {best} for {chosen} of {count} experts; "
            "expected groups of one size, and enough of them"
        )


def _said(config: Config, keys: tuple[str, ...]) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)


def _states(config: Config) -> Iterator[str]:
    yield from _state_heads(config)
    pairs = (("linear_num_value_heads", "linear_num_key_heads"), ("mamba_n_heads", "mamba_n_groups"))
    for many, few in (*pairs, ("mamba_num_heads", "n_groups")):
        if config.get(many) and config.get(few) and config[many] % config[few]:
            yield f"config.json has {many} = {config[many]} for {few} = {config[few]}; expected a multiple"


def _state_heads(config: Config) -> Iterator[str]:
    if "mamba_d_head" not in config or config["mamba_d_head"] == "auto":
        return
    width, heads = config["mamba_d_head"], config.get("mamba_n_heads") or 1
    rows = config.get("mamba_d_ssm") or (config.get("mamba_expand") or 2) * (config.get("hidden_size") or 0)
    if not SIZE.holds(width) or (rows and width * heads != rows):
        yield f"config.json has mamba_d_head = {width!r:.80} for {heads} heads of {rows}; expected auto, or their width"


def keys_fault(config: Config, stored: Mapping[str, StoredTensor]) -> str | None:
    """Return a fault if the first layer's keys are not as wide as the config says."""
    found, head_dim = stored.get(KEYS), config.get("head_dim")
    form = architecture_of(config)
    if found is None or not head_dim or "qk_nope_head_dim" in config or (form and form.own_heads):
        return None
    num_heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or 0
    expected = [num_heads * head_dim, config.get("hidden_size")]
    if list(found.shape) == expected or None in expected:
        return None
    return f"its weights have {KEYS} as {list(found.shape)}; by its config.json expected {expected}"


RELATIONS = (_layers, _heads, _experts, _states)
