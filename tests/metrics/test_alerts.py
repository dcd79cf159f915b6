"""A real Prometheus raises every alert when something breaks, in seconds instead of minutes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from swiftbatch.jobs.run.run import Run
from swiftbatch.metrics.counters import DriverCounters, EngineCounters, GPUFigures
from swiftbatch.metrics.exporter import Labels, driver_families, engine_families, registry_of, serve, server_families
from swiftbatch.metrics.server_counters import ServerCounters
from swiftbatch.scheduler.commands.exit_codes import LIMIT_REACHED
from swiftbatch.scheduler.serve.records.api_keys import make_key
from tests.metrics.prometheus_server import ALERTS, Prometheus, free_port, running_prometheus, until
from tests.scheduler.driving import Driver, swiftbatch
from tests.scheduler.serve.server_parts import serving

pytestmark = pytest.mark.slow

HOUR = 3600.0
STALLED, GONE, REFUSED = "SwiftbatchRunStalled", "SwiftbatchDriverGone", "SwiftbatchServeKeysRefused"
RULES = ALERTS.read_text()
NAMES = set(re.findall(r"alert: (\w+)", RULES))
JOBS = [{"custom_id": f"job-{n}", "prompt": f"the {n}", "max_tokens": 3000, "ignore_eos": True} for n in range(8)]


def quick_rules(folder: Path) -> Path:
    """Write the rules with seconds for minutes and minutes for hours."""
    shorter = {"m": "s", "h": "m"}
    text = re.sub(r"(for: |offset |\[)(\d+)([mh])\b", lambda found: found[1] + found[2] + shorter[found[3]], RULES)
    path = folder / "alerts.yml"
    path.write_text(text.replace("time() - 120", "time() - 5"))
    return path


def raised(prometheus: Prometheus) -> dict[str, dict[str, str]]:
    """Return the labels of firing alerts."""
    alerts = prometheus.get("alerts")["alerts"]
    return {alert["labels"]["alertname"]: alert["labels"] for alert in alerts if alert["state"] == "firing"}


class Breakage:
    """The metrics of a run, its GPU, a night and a server, each of which has something wrong."""

    def __init__(self) -> None:
        self.began = time.time()
        self.driver = DriverCounters(jobs={"pending": 3, "running": 1}, workers={"ready": 0}, last_beat=self.began)
        self.driver.num_gpu_failures["G"] = 2
        self.worker = EngineCounters(last_checkpoint=self.began - HOUR)
        self.gpu = GPUFigures("G", num_ecc_errors=2, throttled={"hw_thermal": 1})
        self.server = ServerCounters(oldest_waiting_seconds=13 * HOUR, disk={"used": 97, "free": 3})

    def collect(self) -> Iterator[Family]:
        self.driver.take_in("w1", self.worker)
        yield from driver_families(self.driver, Labels("m", "suffix", "driver"), {"run": "broken", "team": "red"})
        yield from engine_families(self.worker, Labels("m", "suffix", "w1"), [self.gpu])
        yield from server_families(self.server)
        for name, value in (
            ("kube_cronjob_next_schedule_time", self.began - HOUR),
            ("kube_cronjob_created", self.began - 48 * HOUR),
            ("kube_cronjob_spec_suspend", 0.0),
        ):
            family = GaugeMetricFamily(name, name, labels=("namespace", "cronjob"))
            family.add_metric(("batch", "swiftbatch-nightly"), value)
            yield family

    def get_worse(self) -> None:
        self.worker.num_resumes["kv"] += 20
        self.driver.jobs_finished["failed"] += 1
        self.server.num_requests["5xx"] += 10


def test_what_breaks_raises_its_alert(tmp_path: Path) -> None:
    broken = Breakage()
    address, stop = serve(registry_of(broken.collect), 0, host="127.0.0.1")
    everything = NAMES - {STALLED, REFUSED}
    with running_prometheus(tmp_path, free_port(), [urlsplit(address).netloc], quick_rules(tmp_path)) as prometheus:

        def all_raised() -> bool:
            broken.get_worse()
            return everything <= raised(prometheus).keys()

        try:
            until(all_raised, f"alerts: {everything}")
        finally:
            print("missing:", everything - raised(prometheus).keys())
            stop()
        assert raised(prometheus)["SwiftbatchDeadLetters"]["team"] == "red"


@pytest.mark.ray
def test_a_run_that_hangs_and_one_whose_driver_is_killed_raise_an_alert_until_a_resume(tmp_path: Path) -> None:
    port, run = free_port(), tmp_path / "run"
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in JOBS))
    where = ["--slots", "2", "--metrics-port", str(port), "--checkpoint-seconds", "0.3", "--worker-timeout", "600"]
    model = ["--threads", "1", "--dtype", "float32", "--team", "red"]
    submit = swiftbatch("submit", str(tmp_path / "jobs.jsonl"), "--run", str(run), *model, *where)
    with running_prometheus(tmp_path, port, rules=quick_rules(tmp_path)) as prometheus:
        with Driver(submit, os.environ, run) as driver:
            [worker] = driver.wait_for(driver.busy_workers)
            os.kill(worker.pid, signal.SIGSTOP)
            until(lambda: STALLED in raised(prometheus), STALLED)
            assert GONE not in raised(prometheus)
            os.kill(worker.pid, signal.SIGCONT)
            driver.process.kill()
            until(lambda: GONE in raised(prometheus), GONE)
            assert (raised(prometheus)[GONE]["run"], raised(prometheus)[GONE]["team"]) == (str(run), "red")
        progress = Run.open(str(run)).progress()
        limit = ["--max-total-tokens", str(progress.num_total_tokens + 100)]
        with Driver(swiftbatch("resume", str(run), *where, *limit), os.environ, run) as driver:
            until(lambda: GONE not in raised(prometheus), "the end of the alert")
            assert driver.process.wait(timeout=240) == LIMIT_REACHED
        ended = prometheus.query("last_over_time(swiftbatch_driver_ended[5m]) == 1")
        assert [sample["metric"]["run"] for sample in ended] == [str(run)]  # the driver waited for this scrape
        time.sleep(15)
        assert GONE not in raised(prometheus)


def test_a_server_that_refuses_keys_raises_an_alert(tmp_path: Path) -> None:
    secret, line = make_key("prometheus")
    (tmp_path / "keys").write_text(f"{line} metrics=yes\n")
    with serving(tmp_path / "runs", Path("embedded"), "--api-keys", str(tmp_path / "keys")) as server:
        target = urlsplit(server.url).netloc

        def is_raised() -> bool:
            for _ in range(10):
                with pytest.raises(HTTPError, match="401"):
                    urllib.request.urlopen(f"{server.url}/v1/files", timeout=60)
            return REFUSED in raised(prometheus)

        with running_prometheus(tmp_path, free_port(), [target], quick_rules(tmp_path), secret) as prometheus:
            until(is_raised, REFUSED)
