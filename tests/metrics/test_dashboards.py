"""Dashboards, alert rules and the reference match the code."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from swiftbatch.metrics import reference
from swiftbatch.metrics.counters import DriverCounters, EngineCounters, GPUFigures
from swiftbatch.metrics.exporter import Labels, driver_families, engine_families, server_families
from swiftbatch.metrics.grafana import build
from swiftbatch.metrics.server_counters import ServerCounters
from tests.metrics.dashboard_files import BOARDS, METRICS, metric_names, panel_expressions, read_board, variable_queries
from tests.metrics.prometheus_server import binary

LABELS = Labels(model_name="embedded", drafter="suffix", worker="w1")


def exported_names() -> set[str]:
    worker = EngineCounters(last_checkpoint=1.0, kv_cache_pages_ratio=0.5)
    driver = DriverCounters(eta_seconds=1.0, last_beat=1.0, num_gpu_failures=Counter(["GPU-1"]))
    server = ServerCounters(disk={"free": 1})
    gpu = GPUFigures("GPU-1", 0, {}, 50, 1, 2, 0.5)
    families = [*engine_families(worker, LABELS, [gpu]), *driver_families(driver, LABELS), *server_families(server)]
    return {sample.name for family in families for sample in family.samples}


def test_the_reference_is_not_stale() -> None:
    page = (METRICS / "REFERENCE.md").read_text()
    assert page == reference.render(), "write it again: python -m swiftbatch.metrics.reference"


@pytest.mark.parametrize("board", build.BOARDS, ids=lambda board: board.name)
def test_a_dashboard_file_is_not_stale(board: build.Board) -> None:
    page = (METRICS / "grafana" / f"{board.name}.json").read_text()
    assert page == build.render(board), "write it again: python -m swiftbatch.metrics.grafana.build"


def test_there_is_a_file_for_each_dashboard_and_no_other() -> None:
    assert {path.stem for path in BOARDS} == {board.name for board in build.BOARDS}


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_lets_choose_run_model_and_worker_or_a_server(path: Path) -> None:
    board = read_board(path)
    choices = ["instance"] if path.stem == "server" else ["run", "model", "worker"]
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", *choices]
    assert [panel["id"] for panel in board["panels"]] == list(range(1, len(board["panels"]) + 1))
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in board["panels"])
    for panel in board["panels"]:
        assert all(f"${choices[0]}" in target["expr"] for target in panel["targets"]), panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_every_metric_in_a_dashboard_or_a_rule_is_exported() -> None:
    text = " ".join([*panel_expressions().values(), *variable_queries().values()])
    used = metric_names(text + (METRICS / "alerts.yml").read_text())
    assert used - exported_names() == set()


def test_every_exported_metric_is_in_the_reference() -> None:
    page = (METRICS / "REFERENCE.md").read_text()
    suffixes = ("_bucket", "_count", "_sum", "_created")
    missing = [
        name
        for name in exported_names()
        if f"`{name}`" not in page and not any(f"`{name.removesuffix(suffix)}`" in page for suffix in suffixes)
    ]
    assert missing == []


@pytest.mark.long
@pytest.mark.parametrize("arguments", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]])
def test_the_alert_rules_are_sound_and_fire_when_they_should(arguments: list[str]) -> None:
    result = subprocess.run([binary("promtool"), *arguments], cwd=METRICS, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SUCCESS" in result.stdout


def test_a_missing_prometheus_is_skipped_outside_ci_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="promtool is not there: apt-get install prometheus"):
        binary("promtool")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="promtool is not there"):
        binary("promtool")
