"""Rotary positions whose angles depend on the longest text of a forward: a row's bits would depend on its company.

Those of longrope run where our kernels run all of a forward: there each job's own length chooses them, once for all of
it. Without torch, since the driver asks, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from swiftbatch.worker.model.architectures.dense_models import DECODER_ARCHITECTURES
from swiftbatch.worker.model.decoder_config import OtherDecoderError, read_decoder_config

SHIFTING = {"dynamic", "longrope", "su"}


def shifting_rotary(config: dict[str, Any]) -> str | None:
    """Say which angles of a text model change with the length of the text; None where none do."""
    if not (types := shifting_types(config)):
        return None
    shifts = f"its rotary positions ({', '.join(sorted(types))}) change with the length of the text"
    if types != {"longrope"}:
        return shifts
    try:
        read_decoder_config(config)
    except OtherDecoderError as error:
        return f"{shifts}, which only our kernels leave to each job, and these do not run it: {error}"
    return None


def short_length(config: dict[str, Any]) -> int | None:
    """The most positions of jobs that turn by the short factors of longrope; None for a model without these."""
    return read_decoder_config(config).rotary.short_length if shifting_types(config) else None


def shifting_types(config: dict[str, Any]) -> set[str]:
    """The types of angles that change with the length of a text."""
    form = DECODER_ARCHITECTURES.get(str(config.get("model_type")))
    is_fixed_by_alpha = form is not None and form.has_fixed_alpha
    return {
        kind
        for said in _rotary_parameters(config)
        for kind in (str(said.get("rope_type")), str(said.get("type")))
        if kind in SHIFTING and not (is_fixed_by_alpha and kind == "dynamic" and _is_number(said.get("alpha")))
    }


def _rotary_parameters(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The words about angles anywhere in a config: for all layers, or by the kind of layer."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _rotary_parameters(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
