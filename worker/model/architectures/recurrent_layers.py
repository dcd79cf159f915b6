"""The layers with a state or a convolution in place of attention, as configs and tensors say them. Without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from swiftbatch.worker.kernels.layer_specs import RecurrentForm, RecurrentSizes
from swiftbatch.worker.model.config_value_rules import number_of, numbers_of
from swiftbatch.worker.model.layer_types import ATTENDING, RECURRENT, RecurrentShape, layer_types, recurrent_shape

Config = Mapping[str, Any]
OF_THE_STATES = ("num_layers", "num_decays")  # beside a mixer's own sizes: the kernels' have one decay for a head
NUM_PARTS = 5  # of a row of Mamba-2 that have scales of their own
Order = Callable[[RecurrentShape], list[int]]
"""The order of a stored product's rows, by the roles that they have in our kernels."""


@dataclass(frozen=True)
class RecurrentTensorNames:
    """A kind's mixer: its stored products with the roles whose rows each holds in turn, and float32 numbers.

    Products have biases, and the convolution has one, where the config's keys of these names say so.
    """

    form: RecurrentForm
    part: str  # what stands before the names within a layer
    linears: Mapping[str, tuple[str, ...]]
    numbers: Mapping[str, str]  # by role
    bias: str | None = None
    tap_bias: str | None = None
    epsilon: str = "rms_norm_eps"
    least_step: str | None = None  # key of the least time step, where `time_step_limit` does not count
    orders: Mapping[str, Order] = field(default_factory=dict)  # of stored products whose roles are mixed
    norm: str | None = None  # key that says whether there is a norm of what is found; None: always
    norm_in_front: str | None = None  # key that says whether this norm, if there is one, is in front of the gates
    in_scale: str | None = None  # keys of numbers that multiply what the mixer reads, what it gives,
    out_scale: str | None = None
    part_scales: str | None = None  # and gates, values, keys, queries and steps: a list, or null
    keys: tuple[str, ...] = ()  # beginnings of keys whose numbers are read here, or change no forward
    one_meaning: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # of keys that may be left away


@dataclass(frozen=True)
class RecurrentConfig:
    """The mixers of a model's layers, and which layers have them and which attend."""

    names: RecurrentTensorNames
    shape: RecurrentShape
    sizes: RecurrentSizes
    layers: frozenset[int]
    attending: frozenset[int]
    has_bias: bool
    has_tap_bias: bool
    part_scales: tuple[float, ...] | None

    @property
    def numbers(self) -> dict[str, str]:
        """The names of tensors of float32 numbers within a layer, by role."""
        roles = self.sizes.needed() | ({"tap_bias"} if self.has_tap_bias else set())
        return {role: f"{self.names.part}.{name}" for role, name in self.names.numbers.items() if role in roles}

    def parts(self) -> Iterator[str]:
        """The tensors of a layer with a mixer, beside those that all layers have."""
        yield from self.numbers.values()
        for name in self.names.linears:
            yield f"{self.names.part}.{name}.weight"
            if self.has_bias:
                yield f"{self.names.part}.{name}.bias"


def read_recurrent_layers(config: Config, names: RecurrentTensorNames) -> RecurrentConfig | None:
    """None for a model without. Raises KeyError or ValueError for numbers left to a default, or that are not taken."""
    types = layer_types(config) or []
    if len(types) != config["num_hidden_layers"]:
        raise ValueError("its layers are not named one by one")
    if not (layers := frozenset(number for number, each in enumerate(types) if each in RECURRENT)):
        return None
    if (shape := recurrent_shape(config)) is None:
        raise ValueError("the sizes of its states are left to a default")
    return RecurrentConfig(
        names,
        shape,
        _sizes(config, names, shape),
        layers,
        frozenset(number for number, each in enumerate(types) if each in ATTENDING),
        _is_said(config, names.bias),
        _is_said(config, names.tap_bias),
        None if names.part_scales is None else tuple(numbers_of(config, names.part_scales, NUM_PARTS)),
    )


def _sizes(config: Config, names: RecurrentTensorNames, shape: RecurrentShape) -> RecurrentSizes:
    sizes = {name: size for name, size in vars(shape).items() if name not in OF_THE_STATES}
    if names.form == RecurrentForm.CONVOLUTION:
        return RecurrentSizes(names.form, **sizes)
    if names.form == RecurrentForm.DELTA_NET:
        return RecurrentSizes(names.form, **sizes, norm_width=shape.value_dim, epsilon=config[names.epsilon])
    width = shape.num_heads * shape.value_dim // shape.num_key_heads
    least, most = _time_step_limits(config, names)
    return RecurrentSizes(
        names.form,
        **sizes,
        norm_width=width if _has_norm(config, names) else 0,
        epsilon=config[names.epsilon],
        least_step=least,
        most_step=most,
        in_scale=1.0 if names.in_scale is None else number_of(config, names.in_scale),
        out_scale=1.0 if names.out_scale is None else number_of(config, names.out_scale),
    )


def _has_norm(config: Config, names: RecurrentTensorNames) -> bool:
    """Raises KeyError or ValueError, also for a norm that the kernels have in another place."""
    has_norm = names.norm is None or _is_said(config, names.norm)
    if has_norm and _is_said(config, names.norm_in_front):
        raise ValueError(f"its {names.norm_in_front} is True")
    return has_norm


def _time_step_limits(config: Config, names: RecurrentTensorNames) -> tuple[float, float]:
    if names.least_step is not None:
        return number_of(config, names.least_step), math.inf
    said = config.get("time_step_limit") or (0.0, math.inf)
    limits = [float(each["__float__"]) if isinstance(each, dict) else each for each in said]  # JSON has no infinity
    if len(limits) != 2 or not all(isinstance(each, float) for each in limits):
        raise ValueError(f"its time_step_limit is {said!r:.80}")
    return limits[0], limits[1]


def _is_said(config: Config, key: str | None) -> bool:
    if key is None:
        return False
    if not isinstance(config[key], bool):
        raise ValueError(f"its {key} is {config[key]!r:.80}")
    return bool(config[key])


def _by_key_heads(shape: RecurrentShape, widths: tuple[int, ...]) -> list[int]:
    """Rows of parts that stand side by side for each head of keys, brought part by part."""
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


def _betas_and_steps(shape: RecurrentShape) -> list[int]:
    return _by_key_heads(shape, (shape.num_heads // shape.num_key_heads,) * 2)


def lfm2_width(config: Config) -> int:
    """The width between the products of LFM2. Raises KeyError where the config does not say it."""
    width: int = config["block_ff_dim"] if "block_ff_dim" in config else config["intermediate_size"]
    if not config["block_auto_adjust_ff_dim"]:
        return width
    width, multiple = 2 * width // 3, config["block_multiple_of"]
    if config.get("block_ffn_dim_multiplier") is not None:
        width = int(config["block_ffn_dim_multiplier"] * width)
        width = -(-width // multiple) * multiple
    return width


OUTPUT: dict[str, tuple[str, ...]] = {"out_proj": ("output",)}
TAPS = {"taps": "conv1d.weight", "tap_bias": "conv1d.bias", "rates": "A_log", "step_bias": "dt_bias"}
TAPS |= {"norm": "norm.weight"}
DELTA_KEYS = ("linear_", "full_attention_interval", "mtp_")
SILU_ALONE: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}  # of the convolution and the gates, too
DELTA_NET = RecurrentTensorNames(
    RecurrentForm.DELTA_NET,
    "linear_attn",
    {"in_proj_qkv": ("inputs",), "in_proj_z": ("gates",), "in_proj_b": ("betas",), "in_proj_a": ("steps",), **OUTPUT},
    TAPS,
    keys=DELTA_KEYS,
    one_meaning=SILU_ALONE,
)
JOINT_DELTA_NET = RecurrentTensorNames(  # Qwen3-Next
    RecurrentForm.DELTA_NET,
    "linear_attn",
    {"in_proj_qkvz": ("inputs", "gates"), "in_proj_ba": ("betas", "steps"), **OUTPUT},
    TAPS,
    orders={"in_proj_qkvz": _queries_to_gates, "in_proj_ba": _betas_and_steps},
    keys=DELTA_KEYS,
    one_meaning=SILU_ALONE,
)
MAMBA = RecurrentTensorNames(
    RecurrentForm.STATE_SPACE,
    "mamba",
    {"in_proj": ("gates", "inputs", "steps"), **OUTPUT},
    TAPS | {"skip": "D"},
    bias="mamba_proj_bias",
    tap_bias="mamba_conv_bias",
    keys=("mamba_", "time_step_limit"),
    one_meaning=SILU_ALONE,
)
NEMOTRON_MAMBA = replace(
    MAMBA,
    part="mixer",
    bias="use_bias",
    tap_bias="use_conv_bias",
    epsilon="layer_norm_epsilon",
    least_step="time_step_min",
    keys=("mamba_", "time_step_", "chunk_size", "conv_kernel", "expand", "n_groups", "ssm_state_size"),
    one_meaning={"mamba_hidden_act": ("silu",), "mlp_bias": (False,), "residual_in_fp32": (False,)},
)
FALCON_MAMBA = replace(
    MAMBA,
    norm="mamba_rms_norm",
    norm_in_front="mamba_norm_before_gate",
    in_scale="ssm_in_multiplier",
    out_scale="ssm_out_multiplier",
    part_scales="ssm_multipliers",
    keys=("mamba_", "time_step_limit", "ssm_"),
    one_meaning=SILU_ALONE | {"mamba_use_mlp": (True,), "projectors_bias": (False,)},
)
SHORT_CONVOLUTION = RecurrentTensorNames(
    RecurrentForm.CONVOLUTION,
    "conv",
    {"in_proj": ("betas", "gates", "inputs"), **OUTPUT},
    {"taps": "conv.weight", "tap_bias": "conv.bias"},
    bias="conv_bias",
    tap_bias="conv_bias",
    keys=("block_", "conv_", "full_attn_idxs", "num_heads"),
    one_meaning={"tie_embedding": (True,), "block_use_swiglu": (True,), "use_pos_enc": (True,)},
)
