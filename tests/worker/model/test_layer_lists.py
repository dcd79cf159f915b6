"""Layers with windows and without rotary positions, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from swiftbatch.worker.model.architectures.attention_layers import (
    TypesOrPattern,
    WindowSpec,
    by_layer_types_if_said,
    by_no_rope_layers,
    by_thetas,
    where_switched_on,
)

SIZES = {"num_hidden_layers": 5, "sliding_window": 16, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("form", "said", "expected"),
    [
        (by_layer_types_if_said, {"max_window_layers": 2}, (None, None, 16, 16, 16)),
        (where_switched_on, {"max_window_layers": 2}, (None, None, 16, 16, 16)),
        (TypesOrPattern(2), {}, (16, None, 16, None, 16)),
        (TypesOrPattern(2), {"sliding_window_pattern": 3}, (16, 16, None, 16, 16)),
    ],
)
def test_windows_are_those_of_their_layers(
    form: WindowSpec, said: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert form(SIZES | said) == expected


def test_layers_are_still_where_the_config_says_so() -> None:
    windows = (None,) * 5
    assert by_thetas({"layer_rope_theta": [0, 1e4, 5e5, 0.0, 1e4]}, windows) == {0, 3}
    assert by_no_rope_layers(SIZES | {"no_rope_layers": [0, 1, 1, 0, 1]}, windows) == {0, 3}
