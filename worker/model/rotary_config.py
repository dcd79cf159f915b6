"""Reads rotary positions from a decoder's config. Without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swiftbatch.worker.kernels.rope_scaling import SOME_TURN, QueryGrowth, Rotary, rotary_of
from swiftbatch.worker.model.architectures.attention_layers import WINDOWED, Windows, all_layers
from swiftbatch.worker.model.architectures.spec import ArchitectureSpec, WindowAngles
from swiftbatch.worker.model.config_values import Config, number_of


def num_rotary_dims_of(config: Config, form: ArchitectureSpec, head_dim: int, layers: str = "full_attention") -> int:
    """Return how many dimensions of a head are rotated. Raises ValueError for an odd number."""
    default = 1.0 if form.partial_rotary_factor is None else form.partial_rotary_factor
    if "rotary_dim" in config:
        default = number_of(config, "rotary_dim") / head_dim
    angles = _angles(config, form, layers)
    if angles.get("rope_type") == SOME_TURN:
        return head_dim  # pairs are those of a whole head, some with the angle 0
    said: Any = angles.get("partial_rotary_factor", config.get("partial_rotary_factor", default))
    turned = int(head_dim * float(said))
    if not 0 < turned <= head_dim or turned % 2 or (form.partial_rotary_factor is None and turned < head_dim):
        raise ValueError(f"its partial_rotary_factor is {said!r:.80}")
    return turned


def _angles(config: Config, form: ArchitectureSpec, layers: str = "full_attention") -> dict[str, Any]:
    if form.nope is all_layers:
        return {"rope_type": "default", "rope_theta": 1e4}  # no layer uses these parameters
    if form.window_angles:
        return _angles_by_type(config, form.window_angles, layers)
    said = config.get("rope_scaling") or config.get("rope_parameters") or {"rope_type": "default"}
    return {"rope_theta": config["rope_theta"]} | said if "rope_theta" in config else dict(said)


def _angles_by_type(config: Config, own: WindowAngles, layers: str) -> dict[str, Any]:
    """Read the rotary parameters of one type of layers.

    A common `rope_scaling` does not apply to layers with windows.
    """
    parameters = config.get("rope_parameters") or {}
    if isinstance(parameters.get(layers), dict):
        words: dict[str, Any] = parameters[layers]
        return {"rope_theta": own.theta(layers)} | words
    if parameters:
        raise ValueError("its rope_parameters do not tell of each type of layers")
    if layers == WINDOWED:
        return {"rope_type": "default", "rope_theta": config.get(own.windowed_key or "", own.windowed)}
    said: dict[str, Any] = config.get("rope_scaling") or {"rope_type": "default"}
    return {"rope_theta": config.get(own.full_key, own.full)} | said


def other_rotary_of(config: Config, form: ArchitectureSpec, head_dim: int, num_rotary_dims: int) -> Rotary | None:
    """Return the rotation of layers whose rotation is not the model's, or None if there are no such layers."""
    if form.thetas_key is not None and (bases := _thetas_of(config, form.thetas_key)[1:]):
        said = _angles(config, form) | {"rope_theta": bases[0]}
    elif form.window_angles is not None:
        said = _angles(config, form, WINDOWED)
    else:
        return None
    turned = num_rotary_dims if form.partial_rotary_factor is not None else head_dim
    if form.partial_rotary_factor is not None and num_rotary_dims_of(config, form, head_dim, WINDOWED) != turned:
        raise ValueError("its layers with windows rotate other shares of heads")
    said = {name: value for name, value in said.items() if name != "partial_rotary_factor" or turned == head_dim}
    rotary = replace(rotary_of(said, turned, is_strict=True), is_rounded=form.rounds_angles)
    return rotary if turned == head_dim else rotary.beside_still(head_dim // 2)


def other_layers_of(config: Config, form: ArchitectureSpec, windows: Windows) -> frozenset[int]:
    """Return the layers that use `other_rotary`, including layers whose window is longer than any text."""
    if form.thetas_key is None:
        return frozenset(number for number, size in enumerate(windows) if size is not None)
    thetas, bases = config[form.thetas_key] or [], _thetas_of(config, form.thetas_key)[1:]
    return frozenset(number for number, theta in enumerate(thetas) if theta in bases)


def _thetas_of(config: Config, key: str) -> list[float]:
    """Return the distinct rotary bases (theta) of layers, except 0.

    Raises ValueError for more than two different ones.
    """
    found = list(dict.fromkeys(theta for theta in config[key] or [] if theta))
    if len(found) > 2:
        raise ValueError(f"its {key} has {len(found)} bases")
    return found


def own_rotary(config: Config, form: ArchitectureSpec, head_dim: int, num_rotary_dims: int) -> Rotary:
    """Return the model's rotation. Raises KeyError, TypeError or ValueError for unsupported parameters."""
    beside = {form.growth_key, "max_position_embeddings" if form.growth_key else None}
    said = {name: value for name, value in _angles(config, form).items() if name not in beside}
    if said.get("rope_type") != SOME_TURN:
        said.pop("partial_rotary_factor", None)
    if form.thetas_key is not None and (bases := _thetas_of(config, form.thetas_key)):
        said["rope_theta"] = bases[0]
    kinds = (said.get("rope_type"), said.get("type"))
    if "longrope" in kinds:
        said = _long_angles(said, config, form)
    if "dynamic" in kinds and form.has_fixed_alpha:
        base = number_of(said, "rope_theta") * number_of(said, "alpha") ** (head_dim / (head_dim - 2))
        said = {"rope_type": "default", "rope_theta": base}
    rotary = rotary_of(said, num_rotary_dims, is_strict=True)
    rotary = replace(rotary, is_rounded=form.rounds_angles, growth=_growth(config, form))
    return rotary if num_rotary_dims == head_dim else rotary.beside_still(head_dim // 2)


def _growth(config: Config, form: ArchitectureSpec) -> QueryGrowth | None:
    if form.growth_key is None:
        return None
    said = _angles(config, form)
    length = number_of(said, "original_max_position_embeddings")
    if not length.is_integer():
        raise ValueError(f"its original_max_position_embeddings is {length}")
    return QueryGrowth(number_of(said, form.growth_key), int(length))


def _long_angles(said: dict[str, Any], config: Config, form: ArchitectureSpec) -> dict[str, Any]:
    """Read longrope's parameters, which may be within the rotary parameters or beside them in the config."""
    if not form.has_long_angles:
        raise ValueError("its kind was not tried with longrope")
    most, original = (number_of(config, f"{which}max_position_embeddings") for which in ("", "original_"))
    said = {"factor": most / original} | {name: value for name, value in said.items() if name != "type"}
    if form.scales_long_angles:
        scale, of_long_texts = (number_of(said, f"{which}_mscale") for which in ("short", "long"))
        if scale != of_long_texts:
            raise ValueError(f"its short_mscale and long_mscale are {scale} and {of_long_texts}")
        said = {name: value for name, value in said.items() if not name.endswith("_mscale")}
        said |= {"attention_factor": scale}
    # a value in the config itself overrides the same key within the rotary parameters
    return said | {"rope_type": "longrope", "original_max_position_embeddings": original}
