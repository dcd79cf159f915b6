from __future__ import annotations

import pytest

from swiftbatch.scheduler.serve.records.server_records import RefusedError, window_seconds


@pytest.mark.parametrize(("text", "seconds"), [("1s", 1), ("90m", 5400), ("24h", 86_400), ("30d", 30 * 86_400)])
def test_a_number_and_a_unit_are_a_time(text: str, seconds: int) -> None:
    assert window_seconds(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "24", "h", "0s", "31d", "-1h", "1.5h", "24 h", "\u0662\u0664h", "\uff12\uff14h", "\u0968\u096ah", "24\uff48"],
)
def test_what_is_none_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(RefusedError, match=r"completion_window: found .*, expected a whole number with s, m, h or d"):
        window_seconds(text)
