"""The layers of hybrid models by their config: which attend, which have a state, and how large that is. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

ATTENDING = {"attention", "full_attention", "sliding_attention", "chunked_attention", "hybrid", "*"}
RECURRENT = {"linear_attention", "mamba", "conv", "hybrid", "M"}  # names in configs for layers that have a state
EXPERTS_ALONE = {"moe", "E"}
STATELESS = {"mlp", "-"} | EXPERTS_ALONE  # products or experts alone
ALL_ALIKE = {"falcon_h1": "hybrid", "granitemoehybrid": "mamba"}  # layers of kinds whose config does not name them
DEFAULT_INTERVAL = 4  # one of so many layers of Qwen3-Next attends, where its config does not say it


@dataclass(frozen=True)
class RecurrentShape:
    """Sizes of the recurrent layers of a model; without heads they are convolutions alone."""

    num_layers: int
    num_heads: int  # of values
    num_key_heads: int
    key_dim: int
    value_dim: int
    num_channels: int  # of the convolution in front
    conv_width: int
    num_decays: int = 1  # of a head: or one for each row of its state

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that are no whole numbers, as a config may have them."""
        if wrong := [size for size in vars(self).values() if type(size) is not int]:
            raise ValueError(f"found a size of {wrong[0]!r:.80}, expected a whole number")

    @property
    def state_bytes(self) -> int:
        """The bytes of all layers' states, in float32."""
        return 4 * self.num_layers * self.num_heads * self.key_dim * self.value_dim

    def step_bytes(self, item_size: int) -> int:
        """The bytes that a position leaves in all layers until it is behind the boundary."""
        numbers = self.num_key_heads * self.key_dim + self.num_heads * (self.value_dim + self.num_decays)
        return self.num_layers * (4 * numbers + item_size * self.num_channels)

    def checkpoint_bytes(self, item_size: int) -> int:
        """The bytes of what a checkpoint holds: the states, and the last inputs of the convolutions."""
        return self.state_bytes + (self.conv_width - 1) * self.num_channels * item_size * self.num_layers


def layer_types(config: Config) -> list[str] | None:
    """Return what the config of a text model calls its layers, in order; None for one whose layers are all alike."""
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if isinstance(config.get(key), list | str) and config[key]:
            return list(map(str, config[key]))
    numbers, kind = range(config.get("num_hidden_layers") or 0), config.get("model_type")
    if kind in ALL_ALIKE:
        return [ALL_ALIKE[kind]] * len(numbers)
    if kind == "kimi_linear":  # which counts its layers from 1
        attending = (config.get("linear_attn_config") or {}).get("full_attn_layers") or ()
        return ["full_attention" if number + 1 in attending else "linear_attention" for number in numbers]
    if kind == "qwen3_next":
        interval = config.get("full_attention_interval") or DEFAULT_INTERVAL
        return ["linear_attention" if (number + 1) % interval else "full_attention" for number in numbers]
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if config.get(key) is not None:
            return ["attention" if number in config[key] else "mamba" for number in numbers]
    return ["mamba"] * len(numbers) if kind == "bamba" else None


def num_attending_layers(config: Config) -> int:
    """Count the layers with keys and values."""
    types = layer_types(config)
    if types is None or not set(types) & (RECURRENT | STATELESS):
        return config.get("num_hidden_layers") or 0
    return sum(each in ATTENDING for each in types)


def recurrent_shape(config: Config) -> RecurrentShape | None:
    """The sizes of a model's states; None where its layers have none, or a size is not said."""
    num_layers = sum(each in RECURRENT for each in layer_types(config) or ())
    sizes = SHAPES.get(str(config.get("model_type")))
    try:
        return sizes(config, num_layers) if sizes and num_layers else None
    except (KeyError, TypeError, ValueError):
        return None


def _delta_net(config: Config, num_layers: int) -> RecurrentShape:
    num_heads, num_key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    num_channels = 2 * num_key_heads * key_dim + num_heads * value_dim
    width = config.get("linear_conv_kernel_dim") or 4
    return RecurrentShape(num_layers, num_heads, num_key_heads, key_dim, value_dim, num_channels, width)


def _delta_attention(config: Config, num_layers: int) -> RecurrentShape:
    num_heads, head_dim = config["linear_num_heads"], config["linear_head_dim"]
    heads, dims = (num_heads, num_heads), (head_dim, head_dim)
    width = config["linear_conv_kernel_dim"]
    return RecurrentShape(num_layers, *heads, *dims, 3 * num_heads * head_dim, width, num_decays=head_dim)


def _mamba(config: Config, num_layers: int) -> RecurrentShape:
    num_heads, width = config["mamba_n_heads"], config.get("mamba_d_ssm")
    width = config["mamba_expand"] * config["hidden_size"] if width is None else width
    groups = config["mamba_n_groups"], config["mamba_d_state"]
    return _of_groups(num_layers, num_heads, width // num_heads, groups, config["mamba_d_conv"])


def _nemotron(config: Config, num_layers: int) -> RecurrentShape:
    groups = config["n_groups"], config["ssm_state_size"]
    return _of_groups(num_layers, config["mamba_num_heads"], config["mamba_head_dim"], groups, config["conv_kernel"])


def _of_groups(
    num_layers: int, num_heads: int, head_dim: int, groups: tuple[int, int], conv_width: int
) -> RecurrentShape:
    num_groups, state_size = groups
    num_channels = num_heads * head_dim + 2 * num_groups * state_size
    return RecurrentShape(num_layers, num_heads, num_groups, state_size, head_dim, num_channels, conv_width)


def _convolution(config: Config, num_layers: int) -> RecurrentShape:
    return RecurrentShape(num_layers, 0, 0, 0, 0, config["hidden_size"], config.get("conv_L_cache") or 3)


SHAPES: dict[str, Callable[[Config, int], RecurrentShape]] = {  # by kind
    "bamba": _mamba,
    "falcon_h1": _mamba,
    "granitemoehybrid": _mamba,
    "kimi_linear": _delta_attention,
    "lfm2": _convolution,
    "lfm2_moe": _convolution,
    "nemotron_h": _nemotron,
    "qwen3_5_moe_text": _delta_net,
    "qwen3_5_text": _delta_net,
    "qwen3_next": _delta_net,
}
