"""The forms that kinds with experts differ in, as their configs and tensors say them. Light: the driver asks, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftbatch.worker.kernels.layer_forms import Score
from swiftbatch.worker.model.recurrent_sizes import EXPERTS_ALONE, layer_types

LayerForm = Callable[[Mapping[str, Any]], frozenset[int]]
"""Reads which layers have experts. Raises KeyError for what is left to a default, ValueError for no such numbers."""

COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_KEYS = ("num_experts_per_tok", "moe_k", "moe_topk", "experts_per_token")
ROLES = ("gate", "up", "down")


def products_of(part: str) -> dict[str, str]:
    """The names of the products of such a part, by their roles."""
    return {role: f"{part}.{role}_proj" for role in ROLES}


@dataclass(frozen=True)
class FusedNames:
    """All experts of a layer in two tensors, each with the experts one behind the other."""

    gate_up: str
    down: str
    in_turns: bool = False  # a row of gates, a row of ups; else all gates and then all ups
    is_turned: bool | None = False  # rows stand for columns; None: their shape says it
    bias_suffix: str | None = None  # behind these names


@dataclass(frozen=True)
class ExpertNames:
    """The names of tensors within a layer."""

    router: str = "mlp.gate.weight"
    router_bias: str | None = None
    each: Mapping[str, str] | None = field(
        default_factory=lambda: {role: f"mlp.experts.{{}}.{role}_proj.weight" for role in ROLES}
    )  # of one expert by its number, without gates where they have none; None where they are never stored so
    fused: FusedNames | None = None
    choice_bias: str | None = None
    shared_gate: str | None = None
    shared: Mapping[str, str] | None = None  # of the products that all rows meet, by their roles
    latent: tuple[str, str] | None = None  # of the products in front of all experts and behind them


@dataclass(frozen=True)
class ExpertForm:
    """Names that a kind has for its experts: keys of its config, and what it does with their numbers."""

    score: Score
    layers: LayerForm
    width: str = "moe_intermediate_size"
    names: ExpertNames = field(default_factory=ExpertNames)
    normalises: str | bool = True  # a key, or always or never
    least_sum: str | float = 0.0
    scale: str | None = None
    groups: tuple[str, str] | None = None  # the number of them, and of those that are chosen from
    grouping: tuple[str, str] | None = None  # a key, and the word with which there are groups; None: always
    num_best_of_group: int = 2  # that tell how good it is
    rounds_logits: bool = True  # to the model's dtype
    rounds_weights: bool = True
    keeps_router: bool = False  # in float32, where it is stored so
    shared_width: str | None = None
    num_shared: str | None = None  # so many widths of an expert
    latent_width: str | None = None  # of what experts read in place of a row, where the config says one
    gate_limit: str | None = None
    gate_slope: str | None = None
    jitter: str | None = None
    keys: tuple[str, ...] = ()  # more numbers that are read here, or that change no forward
    one_meaning: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # of keys that may be left away

    def known_keys(self) -> set[str]:
        """All keys whose numbers are understood."""
        said = (self.width, self.normalises, self.least_sum, self.scale, self.shared_width, self.num_shared)
        more = (self.latent_width, self.gate_limit, self.gate_slope, self.jitter, *(self.groups or ()), *self.keys)
        of_experts = {each for each in (*said, *more, *self.one_meaning) if isinstance(each, str)}
        return of_experts | {*COUNT_KEYS, *CHOSEN_KEYS, "router_aux_loss_coef"}


def in_all_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Every layer has experts."""
    return frozenset(range(config["num_hidden_layers"]))


def by_their_names(config: Mapping[str, Any]) -> frozenset[int]:
    """Layers that are called so have experts, and nothing else."""
    return frozenset(number for number, each in enumerate(layer_types(config) or ()) if each in EXPERTS_ALONE)


def in_each_so_many(config: Mapping[str, Any]) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer has them, but for those that are named."""
    step, without = _whole(config, "decoder_sparse_step"), config.get("mlp_only_layers") or []
    if not isinstance(without, list):
        raise ValueError(f"its mlp_only_layers are {without!r:.80}")
    return frozenset(each for each in in_all_layers(config) if (each + 1) % step == 0) - set(without)


def behind_the_first(config: Mapping[str, Any]) -> frozenset[int]:
    """All layers have them but for the first few."""
    first = _whole(config, "first_k_dense_replace", least=0)
    return frozenset(each for each in in_all_layers(config) if each >= first)


def behind_the_dense_ones(config: Mapping[str, Any]) -> frozenset[int]:
    """The same, under another key."""
    return behind_the_first(dict(config) | {"first_k_dense_replace": config["num_dense_layers"]})


def all_but_the_first(config: Mapping[str, Any]) -> frozenset[int]:
    """Every layer but the first one has experts."""
    return in_all_layers(config) - {0}


@dataclass(frozen=True)
class SparseOr:
    """Give experts to the layers that `mlp_layer_types` calls sparse; without that key, as `otherwise` has it."""

    otherwise: LayerForm

    def __call__(self, config: Mapping[str, Any]) -> frozenset[int]:
        if (types := config.get("mlp_layer_types")) is None:
            return self.otherwise(config)
        if not isinstance(types, list) or len(types) != config["num_hidden_layers"] or set(types) - {"dense", "sparse"}:
            raise ValueError("its mlp_layer_types do not tell of each layer")
        return frozenset(number for number, each in enumerate(types) if each == "sparse")


def between(config: Mapping[str, Any]) -> frozenset[int]:
    """Every so-manieth layer from one to another has them; -1, or none, is the last."""
    step, first = _whole(config, "moe_layer_interval"), _whole(config, "moe_layer_start_index", least=0)
    last = _whole({"moe_layer_end_index": -1} | dict(config), "moe_layer_end_index", least=-1)
    last = config["num_hidden_layers"] - 1 if last == -1 else last
    return frozenset(each for each in range(first, last + 1) if (each + 1) % step == 0) & in_all_layers(config)


def _whole(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"its {key} is {value!r:.80}")
    return value
