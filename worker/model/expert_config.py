"""Reads what our kernels must know of a model's experts from its config alone. Without torch: the driver asks, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.kernels.kernel_sizes import LANES
from swiftbatch.worker.kernels.layer_forms import Routing
from swiftbatch.worker.model.config_value_rules import number_of
from swiftbatch.worker.model.expert_forms import CHOSEN_KEYS, COUNT_KEYS, ExpertForm, ExpertNames

Config = Mapping[str, Any]


@dataclass(frozen=True)
class ExpertConfig:
    """The experts of a model's layers: which layers have them, how rows choose, how wide all is."""

    form: ExpertForm
    routing: Routing
    layers: frozenset[int]
    hidden: int
    width: int  # columns of an expert
    shared_width: int  # of what all rows meet; 0 for none
    gate_limit: float
    gate_slope: float
    latent_width: int  # of the vectors that experts read; 0 where they read rows

    @property
    def names(self) -> ExpertNames:
        return self.form.names

    def is_fused(self, stored: set[str], prefix: str) -> bool:
        """Tell whether the experts of a layer lie in two tensors, of which it is clear what rows are."""
        if (fused := self.names.fused) is None or self.names.each is None:
            return fused is not None
        is_clear = fused.is_turned is not None or self.hidden not in (self.width, 2 * self.width)
        return is_clear and prefix + fused.down in stored

    def parts(self, is_fused: bool) -> Iterator[str]:
        """Yield the names of a layer's tensors, but those of a dense layer and of what all rows meet."""
        names = self.names
        for each in (names.router, names.router_bias, names.choice_bias, names.shared_gate):
            if each is not None and (each != names.shared_gate or self.shared_width):
                yield each
        if not is_fused and names.each is not None:
            count = self.routing.num_experts
            yield from (each.format(number) for each in names.each.values() for number in range(count))
        if self.latent_width:
            yield from (f"{name}.weight" for name in names.latent or ())
        if is_fused and (fused := names.fused) is not None:
            suffixes = ("",) if fused.bias_suffix is None else ("", fused.bias_suffix)
            yield from (f"{each}{suffix}" for each in (fused.gate_up, fused.down) for suffix in suffixes)


def read_experts(config: Config, form: ExpertForm) -> ExpertConfig | None:
    """None where no layer has them.

    Raises KeyError or ValueError for numbers left to a default, or that the kernels do not take.
    """
    if not (layers := form.layers(config)):
        return None
    width = _width(config, form.width)
    groups = _groups(config, form)
    routing = Routing(
        num_experts=_agreed(config, COUNT_KEYS),
        num_chosen=_agreed(config, CHOSEN_KEYS),
        score=form.score,
        is_normalised=_switch(config, form.normalises),
        least_sum=_number(config, form.least_sum),
        scale=_number(config, form.scale, 1.0),
        num_groups=groups[0],
        num_chosen_groups=groups[1],
        rounds_logits=form.rounds_logits,
        rounds_weights=form.rounds_weights,
        jitter=_number(config, form.jitter),
        num_best_of_group=form.num_best_of_group,
    )
    return ExpertConfig(
        form,
        routing,
        layers,
        config["hidden_size"],
        width,
        _shared_width(config, form, width),
        _number(config, form.gate_limit),
        _number(config, form.gate_slope),
        0 if form.latent_width is None or config[form.latent_width] is None else _width(config, form.latent_width),
    )


def _groups(config: Config, form: ExpertForm) -> tuple[int, int]:
    """The number of groups of experts, and of those that a row chooses from. Raises KeyError or ValueError."""
    if form.groups is None or (form.grouping is not None and config.get(form.grouping[0]) != form.grouping[1]):
        return 1, 1
    number, chosen = (int(number_of(config, key)) for key in form.groups)
    return number, chosen


def _agreed(config: Config, keys: tuple[str, ...]) -> int:
    """The number that all of these keys say that are there."""
    said = {key: _of_all_layers(config[key]) for key in keys if config.get(key) is not None}
    if not said:
        raise KeyError(keys[0])
    found = set(map(repr, said.values()))
    number = next(iter(said.values()))
    if len(found) > 1 or isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"its {' and '.join(said)} are {', '.join(sorted(found))}")
    return number


def _of_all_layers(said: Any) -> Any:
    """The number that a list has for every layer; what is none, as it is."""
    return said[0] if isinstance(said, list) and said and all(each == said[0] for each in said) else said


def _shared_width(config: Config, form: ExpertForm, width: int) -> int:
    if form.shared_width is not None:
        return _width(config, form.shared_width) if config[form.shared_width] != 0 else 0
    if form.num_shared is None or not config[form.num_shared]:
        return 0
    return width * int(number_of(config, form.num_shared))


def _width(config: Config, key: str) -> int:
    width = config[key]
    if isinstance(width, bool) or not isinstance(width, int) or width < 1 or width % LANES:
        raise ValueError(f"its {key} is {width!r:.80}, no multiple of {LANES}")
    return width


def _switch(config: Config, said: str | bool) -> bool:
    if isinstance(said, bool):
        return said
    if not isinstance(config[said], bool):
        raise ValueError(f"its {said} is {config[said]!r:.80}")
    return bool(config[said])


def _number(config: Config, said: str | float | None, default: float = 0.0) -> float:
    if isinstance(said, str):
        return number_of(config, said)
    return default if said is None else said
