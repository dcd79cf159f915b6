"""Finds faults in a text model's config: numbers that a forward cannot take, or that do not fit together. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from swiftbatch.worker.model.architectures.moe_layers import CHOSEN_KEYS, COUNT_KEYS
from swiftbatch.worker.model.config_value_rules import (
    COUNT,
    NOT_NEGATIVE,
    RULES,
    SIZE,
    WORD,
    KeyRule,
    fault_of,
    numbers_fault,
)
from swiftbatch.worker.model.file_checks import eos_fault
from swiftbatch.worker.model.formats.contract import StoredTensor
from swiftbatch.worker.model.layer_types import layer_types
from swiftbatch.worker.model.supported_models import SUPPORTED_ARCHITECTURES

Config = Mapping[str, Any]
WINDOWED = "sliding_attention"
KEYS = "model.layers.0.self_attn.k_proj.weight"
WITHOUT_EXPERTS = ("granitemoehybrid",)  # kinds that may have none
PER_LAYER: dict[str, KeyRule] = {  # lists with a value for each layer
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
OF_ATTENTION = ("hidden_size", "num_attention_heads")  # what caches are laid out by, beside the number of layers
OF_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT_KINDS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear")
NAMES_LAYERS = ("nemotron_h",)  # kinds whose layers are named one by one, and counted so


def config_fault(config: Config) -> str | None:
    """Say what keeps a text model's config from running; None where nothing does.

    Of a kind that is not known here, the meaning of most keys is not either.
    """
    for key in OF_ALL_KINDS:
        value = config.get(key)
        if (value is not None or key in NEEDED) and not RULES[key].holds(value):
            return fault_of(key, value, RULES[key])
    if fault := eos_fault("config.json", config):
        return fault
    if config.get("model_type") not in SUPPORTED_ARCHITECTURES:
        return None
    return numbers_fault(config) or next((fault for find in RELATIONS for fault in find(config)), None)


def unsaid_fault(config: Config) -> str | None:
    """Say which size the config of a kind that runs here leaves to the class, whose defaults are not known here."""
    kind = config.get("model_type")
    needed = [*OF_ATTENTION, *(OF_LATENT if kind in LATENT_KINDS else ())]
    if kind not in NAMES_LAYERS:
        needed.append("num_hidden_layers")
    elif not layer_types(config):
        needed.append("layers_block_type")
    if unsaid := next((key for key in needed if key not in config), None):
        return f"config.json has no {unsaid}; expected the one that its weights are made for"
    return None


def _layers(config: Config) -> Iterator[str]:
    """Lists that are too short or too long."""
    if config.get("model_type") in NAMES_LAYERS and "layers_block_type" in config and not layer_types(config):
        yield fault_of("layers_block_type", config["layers_block_type"], WORD.list_of())
    if (count := config.get("num_hidden_layers")) is None:
        return
    for key, rule in PER_LAYER.items():
        of_each = rule.list_of(count)
        if config.get(key) is not None and not of_each.holds(config[key]):
            yield fault_of(key, config[key], of_each)
    chosen = SIZE.or_else(SIZE.list_of(count))  # which some say layer by layer
    if "moe_topk" in config and not chosen.holds(config["moe_topk"]):
        yield fault_of("moe_topk", config["moe_topk"], chosen)
    if WINDOWED in (config.get("layer_types") or ()) and "sliding_window" in config and not config["sliding_window"]:
        yield fault_of("sliding_window", config["sliding_window"], SIZE)


def _numbered_layers(config: Config) -> Iterator[str]:
    """Yield what is wrong where Kimi Linear's lists of layers do not name each number from 1 on once."""
    count, said = config.get("num_hidden_layers"), config.get("linear_attn_config") or {}
    if config.get("model_type") != "kimi_linear" or config.get("layer_types") is not None or count is None:
        return
    lists = [said.get(key) for key in ("full_attn_layers", "kda_layers")]
    numbers = [number for each in lists if isinstance(each, list) for number in each]
    if any(type(number) is not int for number in numbers) or sorted(numbers) != list(range(1, count + 1)):
        yield (
            "config.json has full_attn_layers and kda_layers that do not number its layers; "
            f"expected each number from 1 to {count} in one of these lists of linear_attn_config"
        )


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
    """More experts for a row than there are, and groups that do not divide them."""
    count, chosen = (_said(config, keys) for keys in (COUNT_KEYS, CHOSEN_KEYS))
    if config.get("model_type") not in WITHOUT_EXPERTS and 0 in [config.get(key) for key in COUNT_KEYS]:
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
    """Heads of Mamba-2 that are not as wide together as its rows are."""
    if "mamba_d_head" not in config or config["mamba_d_head"] == "auto":
        return
    width, heads = config["mamba_d_head"], config.get("mamba_n_heads") or 1
    rows = config.get("mamba_d_ssm") or (config.get("mamba_expand") or 2) * (config.get("hidden_size") or 0)
    if not SIZE.holds(width) or (rows and width * heads != rows):
        yield f"config.json has mamba_d_head = {width!r:.80} for {heads} heads of {rows}; expected auto, or their width"


def keys_fault(config: Config, stored: Mapping[str, StoredTensor]) -> str | None:
    """Say that the first layer's keys are not as wide as the config says; None where they are."""
    found, head_dim = stored.get(KEYS), config.get("head_dim")
    if found is None or not head_dim or "qk_nope_head_dim" in config:
        return None
    num_heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or 0
    expected = [num_heads * head_dim, config.get("hidden_size")]
    if list(found.shape) == expected or None in expected:
        return None
    return f"its weights have {KEYS} as {list(found.shape)}; by its config.json expected {expected}"


RELATIONS = (_layers, _numbered_layers, _heads, _experts, _states)
