from __future__ import annotations

import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swiftbatch.metrics import exporter
from swiftbatch.metrics.counters import DriverCounters, EngineCounters
from swiftbatch.metrics.exporter import Labels, MetricsError, driver_families, engine_families, registry_of, serve
from tests.scheduler.driving import wait_until

LABELS = Labels(model_name="embedded", drafter="suffix", worker="w0")


def scrape(address: str) -> dict[tuple[str, str], float]:
    """Return values by (sample name, varying labels)."""
    text = urllib.request.urlopen(address, timeout=60).read().decode()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            extra = [v for k, v in sample.labels.items() if k not in ("model_name", "drafter", "worker")]
            assert sample.labels["model_name"] == "embedded"
            assert sample.labels["drafter"] == "suffix"
            values[(sample.name, " ".join(extra))] = sample.value
    return values


def test_acceptance_length_counts_the_bonus_token_once_per_draft() -> None:
    counters = EngineCounters()
    assert counters.mean_acceptance_length == 1.0
    counters.count_draft(num_draft_tokens=4, num_accepted_tokens=3)
    counters.count_draft(num_draft_tokens=4, num_accepted_tokens=0)
    counters.count_draft(num_draft_tokens=0, num_accepted_tokens=0)
    assert counters.mean_acceptance_length == 2.5
    assert (counters.num_accepted_tokens, counters.num_draft_tokens) == (3, 8)
    assert counters.num_accepted_tokens_per_pos[:4] == [1, 1, 1, 0]


def test_a_worker_serves_every_name_over_http() -> None:
    counters = EngineCounters(num_prompt_tokens=7, num_generation_tokens=9, num_steps=5, kv_cache_tokens=16)
    counters.step_seconds["verify"] = 0.5
    counters.count_draft(num_draft_tokens=8, num_accepted_tokens=20)
    counters.count_resume("replay", num_tokens_recovered=30, num_tokens_recomputed=30)
    counters.note_work(is_running=True)
    counters.count_checkpoint("tokens", num_bytes=400, seconds=0.02)
    counters.num_store_retries = 3
    counters.count_finished("length", seconds=70.0, num_generation_tokens=2000)
    address, stop = serve(registry_of(lambda: engine_families(counters, LABELS)), 0)
    try:
        values = scrape(address)
        counters.num_generation_tokens += 1
        assert scrape(address)[("swiftbatch_generation_tokens_total", "")] == 10.0  # nothing is copied at start
    finally:
        stop()
    assert values[("swiftbatch_prompt_tokens_total", "")] == 7.0
    assert values[("swiftbatch_generation_tokens_total", "")] == 9.0
    assert values[("swiftbatch_spec_decode_num_drafts_total", "")] == 1.0
    assert values[("swiftbatch_spec_decode_num_draft_tokens_total", "")] == 8.0
    assert values[("swiftbatch_spec_decode_num_accepted_tokens_total", "")] == 20.0
    assert values[("swiftbatch_spec_decode_num_accepted_tokens_per_pos_total", "15")] == 1.0
    assert values[("swiftbatch_kv_cache_tokens", "")] == 16.0
    assert values[("swiftbatch_step_seconds_sum", "verify")] == 0.5
    assert values[("swiftbatch_step_seconds_count", "propose")] == 5.0
    assert values[("swiftbatch_resumes_total", "replay")] == 1.0
    assert values[("swiftbatch_tokens_recovered_total", "")] == 30.0
    assert values[("swiftbatch_tokens_recomputed_total", "")] == 30.0
    assert values[("swiftbatch_checkpoint_bytes_total", "tokens")] == 400.0
    assert values[("swiftbatch_checkpoint_bytes_total", "state")] == 0.0
    assert values[("swiftbatch_checkpoint_seconds_bucket", "tokens 0.05")] == 1.0
    assert values[("swiftbatch_checkpoint_seconds_bucket", "tokens 0.01")] == 0.0
    assert values[("swiftbatch_stale_attempt_rejections_total", "")] == 0.0
    assert values[("swiftbatch_store_retries_total", "")] == 3.0
    assert 0.0 <= values[("swiftbatch_checkpoint_age_seconds", "")] < 60.0
    assert values[("swiftbatch_jobs_finished_total", "length")] == 1.0
    assert values[("swiftbatch_job_seconds_bucket", "60.0")] == 0.0
    assert values[("swiftbatch_job_seconds_bucket", "300.0")] == 1.0
    assert values[("swiftbatch_job_seconds_sum", "")] == 70.0
    assert values[("swiftbatch_job_generation_tokens_bucket", "+Inf")] == 1.0


def test_histogram_bounds_reach_a_week_and_128k_tokens() -> None:
    counters = EngineCounters()
    assert counters.job_seconds.bounds[-1] == 7 * 24 * 3600
    assert counters.job_generation_tokens.bounds[-1] == 128 * 1024
    counters.job_generation_tokens.observe(128 * 1024)  # a bound belongs to its own bucket
    counters.job_generation_tokens.observe(128 * 1024 + 1)
    assert counters.job_generation_tokens.counts[-2:] == [1, 1]


def test_no_checkpoint_age_while_nothing_runs() -> None:
    counters = EngineCounters()
    names = {family.name for family in engine_families(counters, LABELS)}
    assert "swiftbatch_checkpoint_age_seconds" not in names
    counters.last_checkpoint = time.time() - 12
    ages = [f.samples[0].value for f in engine_families(counters, LABELS) if f.name.endswith("age_seconds")]
    assert 12 <= ages[0] < 60


def test_the_driver_serves_jobs_by_state() -> None:
    counters = DriverCounters(jobs={"pending": 2, "running": 1}, num_store_retries=2)
    counters.num_preemptions["worker_lost"] += 1
    counters.num_preemptions["worker_lost"] += 1
    counters.jobs_finished["failed"] += 1
    address, stop = serve(registry_of(lambda: driver_families(counters, LABELS)), 0)
    try:
        values = scrape(address)
    finally:
        stop()
    assert values[("swiftbatch_jobs", "pending")] == 2.0
    assert values[("swiftbatch_preemptions_total", "worker_lost")] == 2.0
    assert values[("swiftbatch_store_retries_total", "")] == 2.0
    assert values[("swiftbatch_jobs_finished_total", "failed")] == 1.0


def test_a_taken_port_is_one_clear_line() -> None:
    registry = registry_of(lambda: driver_families(DriverCounters(), LABELS))
    address, stop = serve(registry, 0)
    port = int(address.split(":")[2].split("/")[0])
    try:
        with pytest.raises(MetricsError, match=f"metrics port {port}: .*in use.*choose another"):
            serve(registry, port)
    finally:
        stop()


def test_an_endpoint_is_at_the_address_that_was_asked_for_alone() -> None:
    address, stop = serve(registry_of(lambda: driver_families(DriverCounters(), LABELS)), 0, host="127.0.0.1")
    assert address.startswith("http://127.0.0.1:")
    try:
        assert scrape(address)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(address.split(":")[2].split("/")[0])), timeout=60)
    finally:
        stop()


def test_an_address_of_another_machine_is_one_clear_line() -> None:
    with pytest.raises(MetricsError, match=r"metrics host 192\.0\.2\.77: .*; expected an IPv4 address of this machine"):
        serve(registry_of(lambda: driver_families(DriverCounters(), LABELS)), 0, host="192.0.2.77")


@contextmanager
def idle_clients(num: int) -> Iterator[tuple[str, list[socket.socket]]]:
    address, stop = serve(registry_of(lambda: driver_families(DriverCounters(), LABELS)), 0)
    host, port = address.removeprefix("http://").removesuffix("/metrics").split(":")
    clients = [socket.create_connection((host, int(port)), timeout=60) for _ in range(num)]
    for client in clients[::2]:
        client.sendall(b"GET /metrics HTTP/1.0\r\nHost: ")
    yield address, clients
    for client in clients:
        client.close()
    stop()


def test_idle_clients_take_few_files_and_keep_nobody_out() -> None:
    num_before = len(os.listdir("/proc/self/fd"))
    with idle_clients(60) as (address, clients):
        for _ in range(3):
            assert b"swiftbatch_jobs" in urllib.request.urlopen(address, timeout=60).read()
        most = num_before + len(clients) + exporter.MAX_CONNECTIONS + 2
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= most)


def test_a_client_that_sends_no_more_is_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exporter._SilentHandler, "timeout", 0.3)
    with idle_clients(2) as (_, clients):
        assert [client.recv(1) for client in clients] == [b"", b""]
    assert capfd.readouterr().err == ""
