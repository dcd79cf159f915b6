"""Reads from configs which layers have a state or a convolution. Without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftbatch.worker.kernels.layer_specs import RecurrentForm, RecurrentSizes
from swiftbatch.worker.model.config_values import POSITIVE, SWITCH, Config, KeyRule, number_of

# names that configs use for types of layers
ATTENDING = {"attention", "full_attention", "sliding_attention", "chunked_attention", "hybrid", "*"}
RECURRENT = {"linear_attention", "mamba", "conv", "hybrid", "M"}  # these have a state
EXPERTS_ALONE = {"moe", "E"}
STATELESS = {"mlp", "-"} | EXPERTS_ALONE  # layers with only an MLP or only experts
LAYER_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern")  # keys that list the type of each layer

OF_THE_STATES = ("num_layers", "num_decays")  # not among a mixer's own sizes: its kernels have one decay per head
NUM_PARTS = 5  # parts of a Mamba-2 row, each with a scale of its own


@dataclass(frozen=True)
class RecurrentShape:
    """Sizes of the recurrent layers of a model; layers without heads are pure convolutions."""

    num_layers: int
    num_heads: int  # value heads
    num_key_heads: int
    key_dim: int
    value_dim: int
    num_channels: int  # channels of the convolution
    conv_width: int
    num_decays: int = 1  # decays per head: one, or one for each row of its state

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that are not integers."""
        if wrong := [size for size in vars(self).values() if type(size) is not int]:
            raise ValueError(f"found a size of {wrong[0]!r:.80}, expected a whole number")

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all layers' states, in float32."""
        return 4 * self.num_layers * self.num_heads * self.key_dim * self.value_dim

    def step_bytes(self, item_size: int) -> int:
        """Return the bytes that all layers store for one position until the next boundary."""
        numbers = self.num_key_heads * self.key_dim + self.num_heads * (self.value_dim + self.num_decays)
        return self.num_layers * (4 * numbers + item_size * self.num_channels)

    def checkpoint_bytes(self, item_size: int) -> int:
        """Return the bytes of all states and of the last inputs of all convolutions."""
        return self.state_bytes + (self.conv_width - 1) * self.num_channels * item_size * self.num_layers


Order = Callable[[RecurrentShape], list[int]]
"""The order of a stored product's rows, by the roles that they have in our kernels."""


@dataclass(frozen=True)
class MixerSpec:
    """A mixer's stored projections, with the roles that each stacks in order, and its float32 parameters."""

    words: str  # shown to users
    layer_classes: tuple[str, ...]  # names of its classes in transformers
    shape: Callable[[Config, int], RecurrentShape]  # of this number of layers; raises KeyError, TypeError or ValueError
    form: RecurrentForm | None = None  # None if the kernels do not support it
    part: str = ""  # prefix of the names within a layer
    linears: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)  # role -> name
    bias: str | None = None
    tap_bias: str | None = None
    epsilon: str = "rms_norm_eps"
    least_step: str | None = None  # key of the least time step, if `time_step_limit` is ignored
    orders: Mapping[str, Order] = field(default_factory=dict)  # row orders of stored projections that mix roles
    norm: str | None = None  # key of whether results of the state are normed; None if they always are
    norm_in_front: str | None = None  # key of whether this norm precedes the gates
    in_scale: str | None = None  # keys of scales: of the mixer's input, of its output,
    out_scale: str | None = None
    part_scales: str | None = None  # and of gates, values, keys, queries and steps, as a list or null
    keys: Mapping[str, KeyRule] = field(default_factory=dict)  # rules for the keys of its sizes
    known_keys: tuple[str, ...] = ()  # prefixes of keys that are read here or do not change the forward
    one_meaning: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values of keys that may be absent

    def rules(self) -> dict[Any, KeyRule | None]:
        """Return the rules of the keys that are named here."""
        rules: dict[Any, KeyRule | None] = {self.part_scales: POSITIVE.list_of(NUM_PARTS)}
        rules |= dict.fromkeys((self.epsilon, self.least_step, self.in_scale, self.out_scale), POSITIVE)
        rules |= dict.fromkeys((self.bias, self.tap_bias, self.norm, self.norm_in_front), SWITCH)
        return rules | dict(self.keys)


@dataclass(frozen=True)
class RecurrentConfig:
    """The mixers of a model, and the layers that have them."""

    spec: MixerSpec
    shape: RecurrentShape
    sizes: RecurrentSizes
    layers: frozenset[int]
    has_bias: bool
    has_tap_bias: bool
    part_scales: tuple[float, ...] | None

    @property
    def numbers(self) -> dict[str, str]:
        """Names of float32 tensors within a layer, by role."""
        roles = self.sizes.needed() | ({"tap_bias"} if self.has_tap_bias else set())
        return {role: f"{self.spec.part}.{name}" for role, name in self.spec.numbers.items() if role in roles}

    def parts(self) -> Iterator[str]:
        yield from self.numbers.values()
        for name in self.spec.linears:
            yield f"{self.spec.part}.{name}.weight"
            if self.has_bias:
                yield f"{self.spec.part}.{name}.bias"


def listed_layers(config: Config) -> list[str] | None:
    """Return the config's list of layer types, or None if it has no list."""
    said = (config.get(key) for key in LAYER_LISTS)
    return next((list(map(str, each)) for each in said if isinstance(each, list | str) and each), None)


def read_recurrent_layers(
    config: Config, spec: MixerSpec, types: list[str], shape: RecurrentShape | None
) -> RecurrentConfig | None:
    """Read the recurrent layers of a config.

    Raises KeyError for numbers that the config omits, ValueError for unsupported ones.
    """
    if len(types) != config["num_hidden_layers"]:
        raise ValueError("its layers are not named one by one")
    if not (layers := frozenset(number for number, each in enumerate(types) if each in RECURRENT)):
        return None
    if shape is None:
        raise ValueError("the sizes of its states are left to a default")
    scales = None if spec.part_scales is None else POSITIVE.list_of(NUM_PARTS).of(config, spec.part_scales)
    return RecurrentConfig(
        spec,
        shape,
        _sizes(config, spec, shape),
        layers,
        _is_said(config, spec.bias),
        _is_said(config, spec.tap_bias),
        scales and tuple(map(float, scales)),
    )


def _sizes(config: Config, spec: MixerSpec, shape: RecurrentShape) -> RecurrentSizes:
    assert spec.form is not None
    sizes = {name: size for name, size in vars(shape).items() if name not in OF_THE_STATES}
    if spec.form == RecurrentForm.CONVOLUTION:
        return RecurrentSizes(spec.form, **sizes)
    if spec.form == RecurrentForm.DELTA_NET:
        return RecurrentSizes(spec.form, **sizes, norm_width=shape.value_dim, epsilon=config[spec.epsilon])
    width = shape.num_heads * shape.value_dim // shape.num_key_heads
    least, most = _time_step_limits(config, spec)
    return RecurrentSizes(
        spec.form,
        **sizes,
        norm_width=width if _has_norm(config, spec) else 0,
        epsilon=config[spec.epsilon],
        least_step=least,
        most_step=most,
        in_scale=1.0 if spec.in_scale is None else number_of(config, spec.in_scale),
        out_scale=1.0 if spec.out_scale is None else number_of(config, spec.out_scale),
    )


def _has_norm(config: Config, spec: MixerSpec) -> bool:
    has_norm = spec.norm is None or SWITCH.of(config, spec.norm)
    if has_norm and _is_said(config, spec.norm_in_front):
        raise ValueError(f"its {spec.norm_in_front} is True")
    return has_norm


def _time_step_limits(config: Config, spec: MixerSpec) -> tuple[float, float]:
    if spec.least_step is not None:
        return number_of(config, spec.least_step), math.inf
    said = config.get("time_step_limit") or (0.0, math.inf)
    limits = [float(each["__float__"]) if isinstance(each, dict) else each for each in said]  # JSON has no infinity
    if len(limits) != 2 or not all(isinstance(each, float) for each in limits):
        raise ValueError(f"its time_step_limit is {said!r:.80}")
    return limits[0], limits[1]


def _is_said(config: Config, key: str | None) -> bool:
    return key is not None and bool(SWITCH.of(config, key))
