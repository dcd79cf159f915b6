"""Experts of each architecture: their layers, tensors and sizes. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftbatch.worker.kernels.kernel_sizes import LANES
from swiftbatch.worker.kernels.layer_specs import Routing, Score
from swiftbatch.worker.model.config_values import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    SOME_LAYERS,
    SWITCH,
    Config,
    KeyRule,
    list_of_layers,
    number_of,
)

MoELayers = Callable[[Config], frozenset[int]]
"""Reads the layers with experts. Raises KeyError for defaults, ValueError for wrong numbers."""

COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_KEYS = ("num_experts_per_tok", "moe_k", "moe_topk", "experts_per_token", "top_k_experts")
ROLES = ("gate", "up", "down")
SHARED_NORM = "shared_norm"  # role of the norm behind the shared expert


def mlp_linears(part: str) -> dict[str, str]:
    return {role: f"{part}.{role}_proj" for role in ROLES}


@dataclass(frozen=True)
class FusedNames:
    """Names of two tensors that have all experts of a layer, stacked."""

    gate_up: str
    down: str
    in_turns: bool = False  # rows of gate and up projections alternate; otherwise all gate rows precede all up rows
    is_transposed: bool | None = False  # matrices are stored transposed; None if only their shape tells
    bias_suffix: str | None = None  # suffix of the bias tensors' names


@dataclass(frozen=True)
class MoETensorNames:
    """The names of tensors within a layer."""

    router: str = "mlp.gate.weight"
    router_bias: str | None = None
    each: Mapping[str, str] | None = field(
        default_factory=lambda: {role: f"mlp.experts.{{}}.{role}_proj.weight" for role in ROLES}
    )  # names of one expert's tensors by its index, without a gate if it has none; None if never stored this way
    fused: FusedNames | None = None
    choice_bias: str | None = None
    choices: str | None = None  # table of each token's experts, in layers that have it in place of `choice_bias`
    shared_gate: str | None = None
    shared: Mapping[str, str] | None = None  # role -> name, of the shared expert's projections
    latent: tuple[str, str] | None = None  # projections before and after all experts
    norms: Mapping[str, str] = field(default_factory=dict)  # role -> name, of norms beside the experts
    scales: Mapping[str, str] = field(default_factory=dict)  # role -> name, of the router's scales


@dataclass(frozen=True)
class MoESpec:
    """The config keys about experts, and how rows choose their experts."""

    score: Score
    layers: MoELayers
    width: str = "moe_intermediate_size"
    names: MoETensorNames = field(default_factory=MoETensorNames)
    normalises: str | bool = True  # a config key, or True for always and False for never
    least_sum: str | float = 0.0
    scale: str | None = None
    groups: tuple[str, str] | None = None  # keys of the number of groups, and of the number a row chooses
    grouping: tuple[str, str] | None = None  # a key, and its value if experts are in groups; None if they always are
    num_best_of_group: int = 2  # a group's score is the sum of its best experts' scores; this is their number
    rounds_logits: bool = True  # rounds logits to the model's dtype
    rounds_weights: bool = True
    keeps_router: bool = False  # the router stays in float32 if it is stored in float32
    shared_width: str | None = None
    num_shared: str | None = None  # key of the shared expert's width, as a multiple of an expert's
    latent_width: str | None = None  # key of the width of the projected vectors that experts read instead of rows
    gate_limit: str | None = None
    gate_slope: str | None = None
    jitter: str | None = None
    tables: MoELayers | None = None  # layers with a table of each token's experts
    may_be_none: bool = False  # models of this architecture may have no experts
    keys: Mapping[str, KeyRule | None] = field(default_factory=dict)  # more keys; None: no effect on the forward
    one_meaning: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # the only supported values of optional keys

    def rules(self) -> dict[Any, KeyRule | None]:
        """Return the rules for all config keys that this spec names."""
        rules: dict[Any, KeyRule | None] = dict.fromkeys((self.width, *(self.groups or ())), SIZE)
        rules |= dict.fromkeys((self.num_shared, self.shared_width), COUNT) | {self.latent_width: SIZE.or_null()}
        rules |= dict.fromkeys((self.scale, self.gate_limit, self.gate_slope), POSITIVE) | {self.normalises: SWITCH}
        return rules | dict.fromkeys((self.least_sum, self.jitter), NOT_NEGATIVE) | dict(self.keys)


def experts_in_all_layers(config: Config) -> frozenset[int]:
    return frozenset(range(config["num_hidden_layers"]))


def in_each_so_many(config: Config) -> frozenset[int]:
    """Return the layers with experts: every `decoder_sparse_step`-th one."""
    step, without = SIZE.of(config, "decoder_sparse_step"), config.get("mlp_only_layers") or []
    if not isinstance(without, list):
        raise ValueError(f"its mlp_only_layers are {without!r:.80}")
    return frozenset(each for each in experts_in_all_layers(config) if (each + 1) % step == 0) - set(without)


def behind_the_first(config: Config, key: str = "first_k_dense_replace") -> frozenset[int]:
    first = COUNT.of(config, key)
    return frozenset(each for each in experts_in_all_layers(config) if each >= first)


def all_but_the_first(config: Config) -> frozenset[int]:
    return experts_in_all_layers(config) - {0}


@dataclass(frozen=True)
class SparseOr:
    """Gives experts to the layers that `mlp_layer_types` calls sparse."""

    otherwise: MoELayers

    def __call__(self, config: Config) -> frozenset[int]:
        if config.get("mlp_layer_types") is None:
            return self.otherwise(config)
        types = list_of_layers(config, "mlp_layer_types", ("dense", "sparse"))
        return frozenset(number for number, each in enumerate(types) if each == "sparse")


SHARED = mlp_linears("mlp.shared_experts")
SCORED_BY_SIGMOID = MoESpec(
    Score.SIGMOID,
    behind_the_first,
    names=MoETensorNames(choice_bias="mlp.gate.e_score_correction_bias", shared=SHARED),
    normalises="norm_topk_prob",
    least_sum=1e-20,
    scale="routed_scaling_factor",
    groups=("n_group", "topk_group"),
    rounds_logits=False,
    rounds_weights=False,
    num_shared="n_shared_experts",
    keys={"first_k_dense_replace": SOME_LAYERS},
    one_meaning={"moe_layer_freq": (1,), "ep_size": (1,)},
)


@dataclass(frozen=True)
class MoEConfig:
    """The experts of a model's layers."""

    form: MoESpec
    routing: Routing
    layers: frozenset[int]
    hidden: int
    width: int  # columns of an expert
    shared_width: int  # width of the shared expert; 0 if there is none
    gate_limit: float
    gate_slope: float
    latent_width: int  # width of the vectors that experts read; 0 if they read rows
    tables: frozenset[int]  # layers with a table of each token's experts

    @property
    def names(self) -> MoETensorNames:
        return self.form.names

    def is_fused(self, stored: set[str], prefix: str) -> bool:
        """Return whether a layer's experts are stored in two tensors whose orientation is certain."""
        if (fused := self.names.fused) is None or self.names.each is None:
            return fused is not None
        is_clear = fused.is_transposed is not None or self.hidden not in (self.width, 2 * self.width)
        return is_clear and prefix + fused.down in stored

    def parts(self, number: int, is_fused: bool) -> Iterator[str]:
        """Yield the names of a layer's router and expert tensors."""
        names = self.names
        chooser = names.choices if number in self.tables else names.choice_bias
        for each in (names.router, names.router_bias, chooser, names.shared_gate):
            if each is not None and (each != names.shared_gate or self.shared_width):
                yield each
        yield from (f"{norm}.weight" for norm in names.norms.values())
        yield from names.scales.values()
        if not is_fused and names.each is not None:
            count = self.routing.num_experts
            yield from (each.format(number) for each in names.each.values() for number in range(count))
        if self.latent_width:
            yield from (f"{name}.weight" for name in names.latent or ())
        if is_fused and (fused := names.fused) is not None:
            suffixes = ("",) if fused.bias_suffix is None else ("", fused.bias_suffix)
            yield from (f"{each}{suffix}" for each in (fused.gate_up, fused.down) for suffix in suffixes)


def read_moe(config: Config, form: MoESpec | None) -> MoEConfig | None:
    """Read the experts of a config.

    Raises KeyError for numbers that the config omits, ValueError for unsupported ones.
    """
    if form is None or (form.may_be_none and config.get("num_local_experts") == 0):
        return None
    if not (layers := form.layers(config)):
        return None
    width = _width(config, form.width)
    groups = _groups(config, form)
    routing = Routing(
        num_experts=_agreed(config, COUNT_KEYS),
        num_chosen=_agreed(config, CHOSEN_KEYS),
        score=form.score,
        is_normalised=form.normalises if isinstance(form.normalises, bool) else SWITCH.of(config, form.normalises),
        least_sum=_number(config, form.least_sum),
        scale=_number(config, form.scale, 1.0),
        num_groups=groups[0],
        num_chosen_groups=groups[1],
        rounds_logits=form.rounds_logits,
        rounds_weights=form.rounds_weights,
        jitter=_number(config, form.jitter),
        num_best_of_group=form.num_best_of_group,
    )
    return MoEConfig(
        form,
        routing,
        layers,
        config["hidden_size"],
        width,
        _shared_width(config, form, width),
        _number(config, form.gate_limit),
        _number(config, form.gate_slope),
        0 if form.latent_width is None or config[form.latent_width] is None else _width(config, form.latent_width),
        frozenset() if form.tables is None else form.tables(config),
    )


def _groups(config: Config, form: MoESpec) -> tuple[int, int]:
    if form.groups is None or (form.grouping is not None and config.get(form.grouping[0]) != form.grouping[1]):
        return 1, 1
    number, chosen = (SIZE.of(config, key) for key in form.groups)
    return number, chosen


def _agreed(config: Config, keys: tuple[str, ...]) -> int:
    """Read the number that all these keys have in common. Raises ValueError if they differ."""
    said = {key: _of_all_layers(config[key]) for key in keys if config.get(key) is not None}
    if not said:
        raise KeyError(keys[0])
    found = set(map(repr, said.values()))
    number = next(iter(said.values()))
    if len(found) > 1 or isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"its {' and '.join(said)} are {', '.join(sorted(found))}")
    return number


def _of_all_layers(said: Any) -> Any:
    return said[0] if isinstance(said, list) and said and all(each == said[0] for each in said) else said


def _shared_width(config: Config, form: MoESpec, width: int) -> int:
    if form.shared_width is not None:
        return _width(config, form.shared_width) if config[form.shared_width] != 0 else 0
    if form.num_shared is None or not config[form.num_shared]:
        return 0
    return width * int(SIZE.of(config, form.num_shared))


def _width(config: Config, key: str) -> int:
    width: int = SIZE.of(config, key)
    if width % LANES:
        raise ValueError(f"its {key} is {width}, no multiple of {LANES}")
    return width


def _number(config: Config, said: str | float | None, default: float = 0.0) -> float:
    if isinstance(said, str):
        return number_of(config, said)
    return default if said is None else said
