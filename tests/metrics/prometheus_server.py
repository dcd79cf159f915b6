"""Debian's real Prometheus, queried over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from swiftbatch.metrics import exporter
from tests import ROOT

ALERTS = ROOT / "metrics" / "alerts.yml"
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{alerts}"]
scrape_configs:
  - job_name: swiftbatch
    http_sd_configs: [{{url: "{url}", refresh_interval: 1s}}]
  - job_name: others
    static_configs: [{{targets: {targets}}}]
    authorization: {{credentials: "{key}"}}
"""
DEADLINE_SECONDS = 240


def binary(name: str) -> str:
    """Skip without the package `prometheus`, but fail in CI."""
    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not there: apt-get install prometheus"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self._address}/api/v1/{path}?{urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as page:
            answer = json.load(page)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the samples of an expression, of a range all within it."""
        return list(self.get("query", query=expr)["result"])

    def value(self, expr: str) -> float:
        samples = self.query(expr)
        assert len(samples) <= 1, samples
        return float(samples[0]["value"][1]) if samples else 0.0

    def healthy_targets(self) -> dict[str, dict[str, str]]:
        targets = self.get("targets", state="active")["activeTargets"]
        return {target["labels"]["instance"]: target["labels"] for target in targets if target["health"] == "up"}


@contextmanager
def running_prometheus(
    folder: Path, driver_port: int, targets: Sequence[str] = (), rules: Path = ALERTS, key: str = "none"
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes `targets` with a `key`, and those that this driver port tells it every second."""
    port = free_port()
    url = f"http://127.0.0.1:{driver_port}{exporter.DISCOVERY_PATH}"
    config = CONFIG.format(alerts=rules, url=url, targets=list(targets), key=key)
    (folder / "prometheus.yml").write_text(config)
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        command = [binary("prometheus"), *options, f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(timeout=60)


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until the condition gives something, even while the server does not answer."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        try:
            if found := condition():
                return found
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"waited in vain for {what}")
