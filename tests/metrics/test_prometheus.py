"""A real Prometheus has data for all panels and alerts of a running job."""

from __future__ import annotations

import json
import math
import os
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from swiftbatch.jobs.run.run_records import WorkerStatus
from swiftbatch.metrics.counters import DRIVER_METRICS
from tests.jobs.checkpoints.checkpoint_parts import logged_jobs
from tests.metrics.dashboard_files import as_shown, panel_expressions, variable_queries
from tests.metrics.prometheus_server import Prometheus, binary, free_port, running_prometheus, until
from tests.scheduler.driving import Driver, swiftbatch
from tests.scheduler.serve.server_parts import serving

pytestmark = pytest.mark.ray

JOBS = [
    {"custom_id": f"job-{n}", "prompt": f"the quick {n}", "max_tokens": 3500, "ignore_eos": True} for n in range(200)
]
NAMES = {
    *("prompt_tokens_total", "generation_tokens_total", "generation_tokens_by_draft_total"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("spec_decode_num_accepted_tokens_per_pos_total", "jobs", "jobs_finished_total", "job_seconds_bucket"),
    *("job_generation_tokens_bucket", "preemptions_total", "resumes_total", "tokens_recovered_total"),
    *("tokens_recomputed_total", "checkpoint_bytes_total", "checkpoint_seconds_bucket", "checkpoint_age_seconds"),
    *("stale_attempt_rejections_total", "kv_cache_tokens", "step_seconds_sum", "step_seconds_count"),
}
LABELS = {"__name__", "instance", "job", "run", "model_name", "drafter", "worker"}
OWN_LABELS = {"le", "state", "reason", "kind", "phase", "position", "device", "draft", "stage", "status"}
EMPTY_PANELS = {"throughput: Tokens per worker-hour (timeseries, A)": "no worker has a GPU"}
COUNTERS = '{__name__=~"swiftbatch_.+(_total|_bucket|_count|_sum)"}'


@dataclass(frozen=True)
class Scene:
    prometheus: Prometheus
    run: Path
    killed: WorkerStatus
    tokens_before: float  # the driver's total before the kill


@pytest.fixture(scope="module")
def scene(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Two workers, one of which is killed; its successor works."""
    binary("prometheus")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    (folder / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in JOBS))
    fast = ["--model", str(tiny_model), "--threads", "1", "--dtype", "float32", "--checkpoint-seconds", "0.3"]
    where = ["--run", str(folder / "run"), "--workers", "2", "--slots", "2", "--metrics-port", str(port)]
    command = swiftbatch("submit", str(folder / "jobs.jsonl"), *fast, *where)
    with (
        Driver(command, os.environ, folder / "run") as driver,
        serving(folder / "served", tiny_model) as server,
        running_prometheus(folder, port, [urlsplit(server.url).netloc]) as prometheus,
    ):
        until(lambda: len(prometheus.healthy_targets()) == 4, "the driver, two workers and a server")
        until(lambda: prometheus.value("sum(swiftbatch_run_jobs_finished_total)") >= 2, "jobs that finished")
        killed = driver.wait_for(lambda: held_amid_a_job(driver))
        tokens_before = prometheus.value("swiftbatch_run_generation_tokens_total")
        os.kill(killed.pid, signal.SIGKILL)
        until(lambda: prometheus.query('swiftbatch_generation_tokens_total{worker="w3"} > 100'), "its successor")
        until(lambda: prometheus.value("sum(swiftbatch_run_resumes_total)") > 0, "a resume")
        yield Scene(prometheus, folder / "run", killed, tokens_before)


def held_amid_a_job(driver: Driver) -> WorkerStatus | None:
    """Stop a worker whose job has a checkpoint, so that a kill leaves something to resume."""
    for worker in driver.busy_workers():
        os.kill(worker.pid, signal.SIGSTOP)
        if driver.checkpoints(worker).name in logged_jobs(driver.run):
            return worker
        os.kill(worker.pid, signal.SIGCONT)
    return None


def test_the_driver_tells_of_itself_and_its_workers_and_forgets_the_lost(scene: Scene) -> None:
    until(lambda: len(run_targets(scene)) == 3, "the lost worker's target to vanish")
    targets = run_targets(scene)
    assert {labels["run"] for labels in targets.values()} == {str(scene.run)}
    workers = {sample["metric"]["worker"] for sample in scene.prometheus.query("swiftbatch_kv_cache_tokens")}
    assert workers == {"w1", "w2", "w3"} - {scene.killed.id}
    instances = {sample["metric"]["instance"] for sample in scene.prometheus.query("swiftbatch_jobs")}
    assert len(instances) == 1  # the driver's own, discovered through itself
    with urllib.request.urlopen(f"http://{instances.pop()}/sd", timeout=60) as page:
        assert page.headers["Content-Type"] == "application/json"
        [group] = json.load(page)
    assert set(group["targets"]) == set(targets)
    assert scene.killed.metrics_address not in {f"http://{target}/metrics" for target in group["targets"]}


def run_targets(scene: Scene) -> dict[str, dict[str, str]]:
    return {name: labels for name, labels in scene.prometheus.healthy_targets().items() if "run" in labels}


def test_every_name_is_there_with_no_other_labels(scene: Scene) -> None:
    names = set(scene.prometheus.get("label/__name__/values"))
    assert {f"swiftbatch_{name}" for name in NAMES} - names == set()
    samples = scene.prometheus.query('{__name__=~"swiftbatch_.+"}')
    assert {label for sample in samples for label in sample["metric"]} - OWN_LABELS == LABELS
    known = next(metric for metric in DRIVER_METRICS if metric.name == "preemptions_total").label_values
    reasons = {sample["metric"]["reason"] for sample in scene.prometheus.query("swiftbatch_preemptions_total")}
    assert reasons == set(known)


def test_every_panel_shows_something(scene: Scene) -> None:
    until(lambda: not silent_panels(scene) - set(EMPTY_PANELS), f"data for {silent_panels(scene)}")
    assert silent_panels(scene) == set(EMPTY_PANELS)


def silent_panels(scene: Scene) -> set[str]:
    return {
        panel
        for panel, expr in panel_expressions().items()
        if not any(is_number(sample) for sample in scene.prometheus.query(as_shown(expr, str(scene.run))))
    }


def is_number(sample: dict[str, Any]) -> bool:
    return math.isfinite(float(sample["value"][1]))


def test_every_choice_of_a_dashboard_has_values(scene: Scene) -> None:
    for variable, query in variable_queries().items():
        series, _, label = query.removeprefix("label_values(").removesuffix(")").rpartition(", ")
        samples = scene.prometheus.query(as_shown(series, str(scene.run)))
        values = {sample["metric"][label] for sample in samples}
        assert "" not in values, variable
        assert values, variable
        assert "driver" not in values, variable


def test_no_alert_is_on_and_every_rule_can_be_evaluated(scene: Scene) -> None:
    until(lambda: all(rule["lastEvaluation"] > "2" for rule in rules(scene)), "a first evaluation")
    assert {rule["health"] for rule in rules(scene)} == {"ok"}
    raised = [rule["name"] for rule in rules(scene) if scene.prometheus.query(rule["query"])]
    assert set(raised) <= {"SwiftbatchServeDiskFull"}  # the machine's own disk


def rules(scene: Scene) -> list[dict[str, Any]]:
    return [rule for group in scene.prometheus.get("rules", type="alert")["groups"] for rule in group["rules"]]


def test_no_counter_ever_goes_down_and_the_totals_keep_what_the_lost_worker_did(scene: Scene) -> None:
    histories = scene.prometheus.query(f"{COUNTERS}[5m]")
    assert len(histories) > 300
    for history in histories:
        values = [float(value) for _, value in history["values"]]
        assert values == sorted(values), history["metric"]
    now = scene.prometheus.value("swiftbatch_run_generation_tokens_total")
    assert now > scene.tokens_before > 1000
    assert now > scene.prometheus.value("sum(swiftbatch_generation_tokens_total)")  # of living workers
    assert scene.prometheus.value('swiftbatch_preemptions_total{reason="worker_died"}') >= 1
