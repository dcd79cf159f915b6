from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import mixed as mixed_bench
from bench import tail as tail_bench
from bench.__main__ import main
from bench.batch_run import BatchError, StartedRun, figures_of
from bench.mixed import mixed_lengths
from bench.tables import Record
from bench.tail import tail_lengths

MIXED = mixed_bench.Options(scale=100, num_threads=1, kv_memory=2.0)
TAIL = tail_bench.Options(scale=1, num_threads=1, num_jobs=9, num_workers=2, longest=4000)


class StubRuns:
    """Stub runs that take given seconds; those in `stopped` are interrupted."""

    def __init__(self, seconds: dict[str, float], digests: dict[str, str] | None = None) -> None:
        self.seconds, self.stopped = seconds, set[str]()
        self.started: list[tuple[str, Sequence[str]]] = []
        self._digests = digests or {}

    def of(self, jobs: Path, name: str, _options: object, _num_workers: int, *further: str) -> StubRuns:
        self.lines = [json.loads(line) for line in jobs.read_text().splitlines()]
        self.started.append((name, further))
        return self

    def figures(self) -> Record:
        name = self.started[-1][0]
        if name in self.stopped:
            raise KeyboardInterrupt
        seconds, num_tokens = self.seconds[name], sum(line["max_tokens"] for line in self.lines)
        speed = {"num_tokens": num_tokens, "seconds": seconds, "tokens_per_second": num_tokens / seconds}
        return speed | {"seconds_of_workers": {"w1": seconds}, "digests": self._digests.get(name, "same")}


def put_in_place(runs: StubRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tail_bench, mixed_bench):
        monkeypatch.setattr(module, "StartedRun", runs)


def test_the_lengths_are_those_that_were_asked_for_over_the_scale() -> None:
    lengths = mixed_lengths(MIXED)
    assert sorted(lengths)[-10:] == [400] * 10
    assert len(lengths) == 100
    assert all(10 <= length <= 40 for length in sorted(lengths)[:90])
    lengths = tail_lengths(TAIL)
    assert (min(lengths), max(lengths), len(lengths)) == (200, 4000, 9)
    assert lengths != sorted(lengths)


def test_slots_have_the_memory_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.02 GB of the embedded model are 4,882 positions: ten times 400 and a prompt."""
    runs = StubRuns({"pages": 10.0, "slots": 20.0})
    put_in_place(runs, monkeypatch)
    found = list(mixed_bench.run(MIXED))
    assert runs.started == [("pages", ("--kv-memory", "0.02")), ("slots", ("--slots", "10"))]
    assert [record["way"] for record in found] == ["pages", "slots"]


def test_runs_with_other_tokens_are_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(StubRuns({"pages": 10.0, "slots": 20.0}, digests={"slots": "others"}), monkeypatch)
    with pytest.raises(BatchError, match="other tokens"):
        list(mixed_bench.run(MIXED))


def test_a_makespan_is_set_against_what_one_worker_takes_over_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_in_place(StubRuns({"together": 11.0, "alone-0": 19.0, "alone-1": 20.0}), monkeypatch)
    [_, alone] = tail_bench.run(TAIL)
    assert alone["over_bound"] == pytest.approx(1.1)  # both had run when the first was asked


class EndedRun:
    def output_lines(self) -> list[tuple[Any, dict[str, Any]]]:
        return [(type("Record", (), {"job": type("Job", (), {"custom_id": f"j{n}"})}), self._line(n)) for n in (0, 1)]

    def progress(self) -> None:
        return None

    def _line(self, number: int) -> dict[str, Any]:
        marks = {"seconds": [0, 8 - number], "num_tokens": [1, 9], "num_drafts": [0, 0], "num_accepted_tokens": [0, 0]}
        timeline = {"started": 101.0 + number, **marks}
        attempt = {
            "attempt": 1,
            "number": 1_000_001,
            "worker_id": f"w{number}",
            "claimed": 100.0 + 2 * number,
            "timeline": timeline,
        }
        body = {
            "created": 120,
            "usage": {"completion_tokens": 9},
            "metrics": {"attempts": [attempt]},
            "choices": [{"token_ids_sha256": str(number)}],
        }
        return {"error": None, "response": {"body": body}}


def started(tmp_path: Path, code: str) -> StartedRun:
    command = [sys.executable, "-c", code]
    return StartedRun(tmp_path, subprocess.Popen(command, stderr=subprocess.PIPE, text=True))


def test_a_benchmark_that_alone_hears_of_an_interruption_ends_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(tmp_path, "import time; time.sleep(20)")
    told = run.process.communicate

    def interrupt() -> None:
        monkeypatch.setattr(run.process, "communicate", told)
        raise KeyboardInterrupt

    monkeypatch.setattr(run.process, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.figures()
    assert run.process.returncode < 0


def test_no_run_goes_on_when_another_that_works_beside_it_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [started(tmp_path, code) for code in ("raise SystemExit(2)", "import time; time.sleep(20)")]
    waiting = iter(runs)
    monkeypatch.setattr(StartedRun, "of", lambda *_: next(waiting))
    options = tail_bench.Options(scale=10, num_threads=1, num_jobs=2, num_workers=2, longest=100)
    with pytest.raises(BatchError, match="exit code 2"):
        tail_bench._alone(tmp_path / "jobs.jsonl", options)
    assert all(run.process.returncode for run in runs)


def test_a_run_is_measured_without_the_starts_of_its_workers() -> None:
    figures = figures_of(EndedRun())  # type: ignore[arg-type]
    assert figures["seconds"] == pytest.approx(109 - 101)
    assert figures["tokens_per_second"] == pytest.approx(18 / 8)
    assert figures["seconds_of_workers"] == pytest.approx({"w0": 9.0, "w1": 7.0})
    assert figures["digests"] == {"j0": "0", "j1": "1"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_batch_runs_on_real_workers(tiny_model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "tail.jsonl"
    options = ["--model", str(tiny_model), "--jobs", "6", "--longest", "100", "--scale", "1", "--threads", "1"]
    result = CliRunner().invoke(main, ["tail", *options, "--json", str(figures)])
    assert result.exit_code == 0, result.output
    together, alone = map(json.loads, figures.read_text().splitlines())
    assert together["digests"] == alone["digests"]
