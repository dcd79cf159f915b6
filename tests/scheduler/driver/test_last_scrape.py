"""A driver's metrics tell the end of its run: at a last scrape, or in a textfile."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swiftbatch.metrics.counters import DriverCounters
from swiftbatch.metrics.exporter import Labels, MetricsError, driver_families, registry_of, textfile_writer
from swiftbatch.scheduler.driver.run_progress import LONGEST_STAY_SECONDS, Scrapes

LABELS = Labels(model_name="embedded", drafter="suffix", worker="driver")


class Clock:
    """A clock that only pauses advance; it scrapes at the given times."""

    def __init__(self, *times: float) -> None:
        self.now = 0.0
        self.times = list(times)
        self.scrapes = Scrapes(lambda: self.now)

    def pause(self, seconds: float) -> None:
        end = self.now + seconds
        while self.times and self.times[0] <= end:
            self.now = self.times.pop(0)
            self.scrapes.note()
        self.now = end

    def stay(self, is_stopping: bool = False) -> float:
        """Return how long a driver stays that ends now."""
        began = self.now
        self.scrapes.wait_for_last(lambda: is_stopping, self.pause)
        return self.now - began


def test_a_driver_stays_until_the_next_scrape() -> None:
    clock = Clock(5, 20, 35, 50)
    clock.pause(37)
    assert clock.stay() == pytest.approx(13, abs=0.2)


def test_a_driver_waits_no_longer_than_twice_for_a_prometheus_that_is_gone() -> None:
    clock = Clock(5, 20, 35)
    clock.pause(37)
    assert clock.stay() == pytest.approx(30, abs=0.2)
    rare = Clock(0, 600)
    rare.pause(1)
    rare.pause(600)
    assert rare.stay() == pytest.approx(LONGEST_STAY_SECONDS, abs=0.2)


@pytest.mark.parametrize("times", [(), (5,)])
def test_a_driver_that_was_not_scraped_regularly_ends_at_once(times: tuple[float, ...]) -> None:
    clock = Clock(*times, 50)
    clock.pause(37)
    assert clock.stay() == 0


def test_a_signal_ends_the_stay() -> None:
    clock = Clock(5, 20, 35, 50)
    clock.pause(37)
    assert clock.stay(is_stopping=True) == 0


def samples(path: Path) -> dict[str, tuple[dict[str, str], float]]:
    families = text_string_to_metric_families(path.read_text())
    return {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}


def test_a_textfile_has_the_driver_s_metrics_with_its_run_and_team(tmp_path: Path) -> None:
    path, counters = tmp_path / "night.prom", DriverCounters(last_beat=7.0)
    registry = registry_of(lambda: driver_families(counters, LABELS, {"run": "/runs/night", "team": "red"}))
    write = textfile_writer(str(path), registry)
    assert samples(path)["swiftbatch_driver_ended"][1] == 0
    counters.has_ended, counters.last_beat = True, 9.5
    write()
    assert list(tmp_path.iterdir()) == [path]
    assert samples(path)["swiftbatch_driver_ended"] == ({**LABELS._asdict(), "run": "/runs/night", "team": "red"}, 1)
    assert samples(path)["swiftbatch_driver_heartbeat_seconds"][1] == 9.5
    assert samples(path)["swiftbatch_run_generation_tokens_total"][0]["run"] == "/runs/night"


def test_a_textfile_that_cannot_be_written_is_refused_at_the_start_and_harms_no_run(tmp_path: Path) -> None:
    registry, folder = registry_of(lambda: driver_families(DriverCounters(), LABELS)), tmp_path / "textfiles"
    with pytest.raises(MetricsError, match=r"--metrics-textfile .*/a\.prom: No such file .* a folder that exists"):
        textfile_writer(str(folder / "a.prom"), registry)
    folder.mkdir()
    write = textfile_writer(str(folder / "a.prom"), registry)
    (folder / "a.prom").unlink()
    folder.rmdir()
    write()
