from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import suite
from bench.suite import MACHINE, PAGE, STAGES, Options, page_of, run, with_figures
from swiftbatch.worker.decode_bench import NUM_WARMUP_TOKENS
from tests.worker.kernels.kernel_parts import needs_kernels

pytestmark = [pytest.mark.long, needs_kernels]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "book.txt"
    text.write_text("".join(f"The {number}th night was colder than the {number - 1}th. " for number in range(400)))
    return Options(text=text, output=tmp_path / "figures", small=True, num_threads=1)


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(suite, "STAGES", tuple(stage for stage in STAGES if stage.name in names))


@pytest.mark.slow  # the stages have their own tests
def test_every_stage_leaves_its_records_and_the_page_has_a_table_of_each(options: Options) -> None:
    assert NUM_WARMUP_TOKENS > 0
    found = list(run(options))
    assert [(record["stage"], record["state"]) for record in found] == [(stage.name, "measured") for stage in STAGES]
    page = (options.output / PAGE).read_text()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        f"## {each[0]}" for each in suite.SECTIONS
    ]
    assert "NO" not in page


def test_what_is_there_is_not_measured_again_and_the_page_takes_it(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "agreement")
    assert [record["stage"] for record in run(options)] == ["agreement"]
    assert list(run(options)) == []
    once = with_figures(
        "before\n<!-- figures: old -->\nstale\n<!-- end of the figures -->\nafter\n", options.output, "x"
    )
    assert once.startswith("before\n<!-- figures: x -->\n\n")
    assert "\n".join(page_of(options.output)) in once
    assert once.endswith("\n\n<!-- end of the figures -->\nafter\n")
    assert "stale" not in once
    assert json.loads((options.output / MACHINE).read_text())["small"]


def test_a_stage_that_cannot_run_is_left_out_and_the_others_run(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "greedy", "agreement")
    greedy, agreement = suite.STAGES
    monkeypatch.setattr(
        suite, "STAGES", (replace(greedy, small=greedy.small | {"positions": (90_000_000,)}), agreement)
    )
    left_out, measured = run(options)
    assert left_out["state"].startswith("left out: 90000000 + ")
    assert measured["state"] == "measured"
