from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from swiftbatch.scheduler.commands.options.option_types import parse_deadline


@pytest.fixture(autouse=True)
def _in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


NOW = "2030-01-31T12:00:00+01:00"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("90m", "2030-01-31T13:30:00+01:00"),
        ("6h", "2030-01-31T18:00:00+01:00"),
        ("1d12h30m5s", "2030-02-02T00:30:05+01:00"),
        ("1.5h", "2030-01-31T13:30:00+01:00"),
        ("0s", NOW),
        ("12:30", "2030-01-31T12:30:00+01:00"),
        ("06:30", "2030-02-01T06:30:00+01:00"),
        ("12:00", "2030-02-01T12:00:00+01:00"),
        ("23:59:59", "2030-01-31T23:59:59+01:00"),
        ("2030-02-01T06:00", "2030-02-01T06:00:00+01:00"),
        ("2030-07-01 06:00", "2030-07-01T06:00:00+02:00"),
        ("2030-02-01T06:00Z", "2030-02-01T06:00:00+00:00"),
        ("2030-02-01T06:00-05:00", "2030-02-01T06:00:00-05:00"),
        ("2030-02-01", "2030-02-01T00:00:00+01:00"),
        ("2029-01-01T00:00", "2029-01-01T00:00:00+01:00"),  # past, so the run stops at once
    ],
)
def test_a_duration_a_time_or_a_date_is_that_moment(text: str, meant: str) -> None:
    assert parse_deadline(text, at(NOW)).moment == at(meant)


def test_a_time_of_the_next_day_is_that_of_its_own_zone_when_clocks_change_at_night() -> None:
    assert parse_deadline("06:00", at("2030-03-30T22:00:00+01:00")).moment == at("2030-03-31T06:00:00+02:00")


@pytest.mark.parametrize(
    ("zone", "now", "text", "meant"),
    [
        # the clock goes back from 03:00 to 02:00 and shows 02:30 twice
        ("Europe/Berlin", "2030-10-26T22:00+02:00", "02:30", "2030-10-27T02:30+02:00"),
        ("Europe/Berlin", "2030-10-27T02:29+02:00", "02:30", "2030-10-27T02:30+02:00"),
        ("Europe/Berlin", "2030-10-27T02:40+02:00", "02:30", "2030-10-27T02:30+01:00"),
        ("Europe/Berlin", "2030-10-27T02:10+01:00", "02:30", "2030-10-27T02:30+01:00"),
        ("Europe/Berlin", "2030-10-27T02:40+01:00", "02:30", "2030-10-28T02:30+01:00"),
        ("Europe/Berlin", "2030-10-27T02:40+02:00", "2030-10-27T02:30", "2030-10-27T02:30+01:00"),
        ("Europe/Berlin", "2030-10-27T05:00+01:00", "2030-10-27T02:30", "2030-10-27T02:30+02:00"),
        # the clock jumps from 02:00 to 03:00 and never shows 02:30
        ("Europe/Berlin", "2030-03-30T22:00+01:00", "02:30", "2030-03-31T03:00+02:00"),
        ("Europe/Berlin", "2030-03-31T01:59+01:00", "02:30", "2030-03-31T03:00+02:00"),
        ("Europe/Berlin", "2030-03-31T03:10+02:00", "02:30", "2030-04-01T02:30+02:00"),
        ("Europe/Berlin", "2030-03-31T01:00+01:00", "2030-03-31T02:30", "2030-03-31T03:00+02:00"),
        ("Europe/Berlin", "2030-03-31T01:00+01:00", "90m", "2030-03-31T03:30+02:00"),
        ("America/New_York", "2030-11-03T01:10-05:00", "01:30", "2030-11-03T01:30-05:00"),
        ("America/New_York", "2030-11-03T01:40-04:00", "01:30", "2030-11-03T01:30-05:00"),
        ("America/New_York", "2030-03-10T00:30-05:00", "02:30", "2030-03-10T03:00-04:00"),
        ("America/New_York", "2030-03-10T03:10-04:00", "02:30", "2030-03-11T02:30-04:00"),
        ("Australia/Lord_Howe", "2030-04-07T01:50+11:00", "01:45", "2030-04-07T01:45+10:30"),  # half an hour
        ("UTC", "2030-03-31T01:00+00:00", "02:30", "2030-03-31T02:30+00:00"),
    ],
)
def test_a_time_is_the_next_that_the_clock_shows_in_the_nights_when_it_is_set(
    monkeypatch: pytest.MonkeyPatch, zone: str, now: str, text: str, meant: str
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    assert parse_deadline(text, at(now)).moment == at(meant)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "soon",
        "6",
        "-6h",
        "6h-1m",
        "1m6h",
        "25:00",
        "12:60",
        "6 h",
        "9999999999d",
        "nan",
        "infh",
        "\u0669\u0660m",
        "\u0967h",
        "\u0660\u0666:\u0663\u0660",
        "0\uff16:30",
        "\u0662\u0660\u0663\u0660-01-31",
    ],
)
def test_what_is_none_of_them_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration as 90m or 1d12h, a time of the day as 06:30, or"):
        parse_deadline(text, at(NOW))
