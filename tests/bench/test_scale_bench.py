from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.__main__ import main
from bench.scale import FIGURES, JOBS_FILE, RUN, STAGES, UNMEASURED, Options, measured, shown, write_jobs
from bench.tables import Record, tables
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.queue_loading import count_jobs

NUM_JOBS = 20


def test_each_stage_does_with_a_few_jobs_what_it_is_to_measure(tmp_path: Path) -> None:
    sizes = {"num_jobs": NUM_JOBS, "num_workers": 2, "num_slots": 3}
    options = Options(**sizes, num_seconds=6.0, store_ms=1.0, folder=tmp_path)
    write_jobs(tmp_path / JOBS_FILE, NUM_JOBS)
    found = {name: measured(name, options) for name in STAGES}
    assert found["submit"]["num_rejects"] == found["submit again"]["num_rejects"] == 0
    assert found["drive"]["num_reports"] > 10
    assert found["drive"]["num_requests"] > 0
    assert found["drive"]["longest_without_beat_seconds"] > 0
    num_begun = len(Attempts.read(Store(str(tmp_path / RUN)), 9).counted())
    assert num_begun + found["drive"]["num_finished"] >= 6  # every slot had a job
    assert found["resume"]["num_unfinished"] == NUM_JOBS // 10
    assert count_jobs(Run.open(str(tmp_path / RUN)))["cancelled"] == NUM_JOBS // 10
    assert len((tmp_path / RUN / "output.jsonl").read_bytes().splitlines()) == NUM_JOBS


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--seconds", "many"], "num_seconds"),
        (["--folder", "TMP"], "found a run there, expected a folder without one"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line_before_anything_is(
    options: list[str], told: str, tmp_path: Path
) -> None:
    (tmp_path / RUN).mkdir()
    result = CliRunner().invoke(main, ["scale", *(str(tmp_path) if each == "TMP" else each for each in options)])
    assert result.exit_code == 2
    assert told in result.output
    assert "Traceback" not in result.output


def test_the_table_fits_into_a_terminal_and_shows_every_stage() -> None:
    stages = [name for name in STAGES if name != UNMEASURED]
    records: list[Record] = [{"stage": name, "cpu_seconds": 123456.7, "MiB": 98765.4} for name in stages]
    records[1] |= {"num_requests": 1_234_567, "longest_without_beat_seconds": 0.123456}
    head, *rows = tables(shown(records, Options())).splitlines()
    assert all(name in head for name in stages)
    assert [row.split()[0] for row in rows] == list(FIGURES)
    assert max(map(len, (head, *rows))) <= 80


@pytest.mark.slow
def test_the_command_measures_ten_thousand_jobs(tmp_path: Path) -> None:
    figures = tmp_path / "scale.jsonl"
    options = ["--jobs", "10000", "--workers", "100", "--folder", str(tmp_path / "scale"), "--json", str(figures)]
    result = CliRunner().invoke(main, ["scale", *options])
    assert result.exit_code == 0, result.output
    found = {entry["stage"]: entry for entry in map(json.loads, figures.read_text().splitlines())}
    assert found["resume"]["num_unfinished"] == 1000
    assert found["drive"]["num_finished"] > 0
