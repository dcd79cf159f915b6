from __future__ import annotations

import json
import socket
import time
import urllib.request
from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.retries import NO_RETRIES
from swiftbatch.jobs.storage.store import Store
from swiftbatch.metrics import exporter
from swiftbatch.metrics.counters import DriverCounters, EngineCounters
from swiftbatch.metrics.exporter import Labels, driver_families, engine_families, own_host
from swiftbatch.scheduler.cluster.ray_cluster import Cluster
from swiftbatch.scheduler.cluster.worker_actor import WorkerInfo, WorkerSpec
from swiftbatch.scheduler.driver.run_progress import ProgressCounter, served_metrics
from swiftbatch.scheduler.driver.worker_fleet import Fleet, Worker
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.session.work_messages import Orders
from tests.jobs.run.run_parts import MANIFEST
from tests.scheduler.driver.driver_parts import RecordingDisplay, make_context
from tests.worker.session.session_parts import claimed, record, run_to_end, session, to_the_end, until

LABELS = Labels(model_name="embedded", drafter="suffix", worker="driver")


def counted(num_tokens: int) -> EngineCounters:
    counters = EngineCounters(num_generation_tokens=num_tokens, num_steps=2, kv_cache_tokens=99, last_checkpoint=1.0)
    counters.step_seconds["verify"] = 0.25
    counters.count_draft(num_draft_tokens=4, num_accepted_tokens=2)
    counters.count_resume("kv", num_tokens_recovered=30, num_tokens_recomputed=3)
    counters.count_checkpoint("tokens", num_bytes=400, seconds=0.02)
    counters.count_finished("length", seconds=70.0, num_generation_tokens=num_tokens)
    return counters


def make_fleet(num_gpus: int = 0) -> Fleet:
    cluster = Cluster(is_embedded=True, num_gpus=num_gpus, watch=None)
    return Fleet(WorkerSpec(EngineConfig(device="auto"), "run"), cluster, timeout=20)


def started(number: int, drain_reason: str | None = None, ready_at: float = 0.0) -> Worker:
    info = WorkerInfo("here", number, f"http://10.0.0.{number}:9100/metrics", "node", "", 1_000_000)
    return Worker(f"w{number}", actor=None, call=None, info=info, ready_at=ready_at, drain_reason=drain_reason)


def test_a_worker_that_is_lost_takes_nothing_from_the_totals() -> None:
    driver = DriverCounters()
    driver.take_in("w1", counted(100))
    driver.take_in("w2", counted(50))
    driver.take_in("w1", counted(200))  # the count so far, not what was added since
    driver.take_in("w3", EngineCounters())  # the successor of w2, which reports no more
    totals = driver.totals()
    assert totals.num_generation_tokens == 250
    assert totals.num_steps == 4
    assert totals.step_seconds == {"propose": 0.0, "verify": 0.5, "commit": 0.0}
    assert totals.mean_acceptance_length == 3.0
    assert totals.num_accepted_tokens_per_pos[:3] == [2, 2, 0]
    assert totals.num_resumes == {"kv": 2}
    assert totals.checkpoint_bytes == {"tokens": 800, "state": 0}
    assert totals.checkpoint_seconds["tokens"].total == pytest.approx(0.04)
    assert sum(totals.checkpoint_seconds["tokens"].counts) == 2
    assert totals.jobs_finished == {"length": 2}
    assert totals.job_seconds.total == 140.0
    assert driver.by_worker["w2"].num_generation_tokens == 50  # the sums are copies


def test_the_totals_have_what_the_driver_itself_counts() -> None:
    driver = DriverCounters(num_store_retries=2)
    driver.jobs_finished["failed"] += 1
    driver.take_in("w1", EngineCounters(num_store_retries=3, jobs_finished={"stop": 1}))
    assert driver.totals().num_store_retries == 5
    assert driver.totals().jobs_finished == {"failed": 1, "stop": 1}
    assert driver.jobs_finished == {"failed": 1}


def test_totals_have_names_of_their_own_and_no_states() -> None:
    driver = DriverCounters()
    driver.take_in("w1", counted(100))
    samples = {sample.name: sample for family in driver_families(driver, LABELS) for sample in family.samples}
    assert samples["swiftbatch_run_generation_tokens_total"].value == 100.0
    assert samples["swiftbatch_run_generation_tokens_total"].labels["worker"] == "driver"
    assert "swiftbatch_generation_tokens_total" not in samples
    assert not {name for name in samples if name.endswith(("kv_cache_tokens", "age_seconds", "interval_seconds"))}


def test_what_may_be_counted_is_there_as_zero_before_it_happens() -> None:
    families = {family.name: family for family in driver_families(DriverCounters(), LABELS)}
    preemptions = {sample.labels["reason"]: sample.value for sample in families["swiftbatch_preemptions"].samples}
    assert preemptions["worker_died"] == preemptions["node_drained"] == 0.0
    ended = {sample.labels["reason"]: sample.value for sample in families["swiftbatch_jobs_finished"].samples}
    assert ended == {"failed": 0.0, "cancelled": 0.0}
    resumes = {sample.labels["kind"] for sample in families["swiftbatch_run_resumes"].samples}
    assert resumes == {"kv", "replay"}


def test_no_time_is_left_to_tell_before_there_is_a_speed() -> None:
    counters = DriverCounters()
    assert "swiftbatch_eta_seconds" not in {family.name for family in driver_families(counters, LABELS)}
    counters.eta_seconds = 12.0
    [eta] = [f for f in driver_families(counters, LABELS) if f.name == "swiftbatch_eta_seconds"]
    assert eta.samples[0].value == 12.0


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (4, "gpu")])
def test_workers_are_counted_by_state_and_by_the_time_they_are_held(num_gpus: int, device: str, tmp_path: Path) -> None:
    counters, fleet = DriverCounters(), make_fleet(num_gpus)
    census = ProgressCounter(make_context(Run.planned(str(tmp_path), MANIFEST).made(), fleet, counters=counters))
    held = [started(1, ready_at=99.5), started(2, "node_drained", ready_at=99.0)]
    fleet.workers = [*held, Worker("w3", actor=None, call=None)]
    census.take(now=100.0)
    assert counters.workers == {"starting": 1, "ready": 1, "draining": 1}
    assert counters.jobs["pending"] == 0
    assert counters.worker_seconds == {device: 0.5 + 1.0}
    census.take(now=102.0)
    assert counters.worker_seconds == {device: 2.5 + 3.0}  # without the starting one, which may wait for a node


def test_a_discovery_document_has_hosts_and_ports_and_says_whose_run_it_is() -> None:
    text = exporter.discovery_document(
        ["http://10.0.0.1:9100/metrics", "http://10.0.0.2:40123/metrics"], {"run": "s3://bucket/night"}
    )
    assert json.loads(text) == [
        {"targets": ["10.0.0.1:9100", "10.0.0.2:40123"], "labels": {"run": "s3://bucket/night"}}
    ]


def test_workers_that_come_and_go_appear_in_the_discovery_and_vanish(tmp_path: Path) -> None:
    manifest = MANIFEST.model_copy(update={"team": "red"})
    run, fleet, display = Run.planned(str(tmp_path / "run"), manifest).made(), make_fleet(), RecordingDisplay()

    def targets() -> list[str]:
        with urllib.request.urlopen(f"http://{address}/sd", timeout=60) as page:
            assert page.headers["Content-Type"] == "application/json"
            [group] = json.load(page)
        assert group["labels"] == {"run": str(tmp_path / "run"), "team": "red"}
        return list(group["targets"])

    with served_metrics(make_context(run, fleet, display=display), LABELS, "127.0.0.1", 0):
        address = display.notes[0].split("http://")[1].split("/")[0]
        assert display.notes[0].endswith(f"http://{address}/sd")
        assert targets() == [address]  # the driver's own address is always there
        fleet.workers = [Worker("w1", actor=None, call=None), started(2)]
        assert targets() == [address, "10.0.0.2:9100"]  # w1 still loads its model
        fleet.workers = [started(1), started(3)]
        assert targets() == [address, "10.0.0.1:9100", "10.0.0.3:9100"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as page:
            assert "swiftbatch_run_generation_tokens_total" in page.read().decode()


def test_the_discovery_names_an_object_store_without_its_credentials(tmp_path: Path) -> None:
    run, display = Run.planned(str(tmp_path / "run"), MANIFEST).made(), RecordingDisplay()
    run.store = Store("s3://KEYID:s3cr%2Ft@bucket/run?region=us-east-1", NO_RETRIES)
    with served_metrics(make_context(run, make_fleet(), display=display), LABELS, "127.0.0.1", 0):
        address = display.notes[0].split("http://")[1].split("/")[0]
        with urllib.request.urlopen(f"http://{address}/sd", timeout=60) as page:
            [group] = json.load(page)
    assert group["labels"] == {"run": "s3://bucket/run"}


def test_the_address_is_not_the_one_that_debian_gives_a_host_of_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    assert own_host() == "10.1.2.3"
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert own_host() != "127.0.1.1"  # 127.0.0.1 if there is no route


def test_a_workers_report_has_all_that_it_counted_and_is_not_changed_later(tmp_path: Path, tiny_model: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    worker, fox = session(run, tiny_model), record("fox")
    first = worker.work(Orders((claimed(run, fox),)), 0.0).counters
    num_tokens = first.num_generation_tokens
    until(worker, fox, num_tokens + 20)
    assert first.num_generation_tokens == num_tokens
    assert worker.drain(5.0).counters.num_generation_tokens >= num_tokens + 20


def test_an_idle_worker_has_no_checkpoint_age_and_no_cached_tokens(tmp_path: Path, tiny_model: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    worker, fox, dog = session(run, tiny_model, checkpoint_seconds=600.0), record("fox"), record("dog")
    counters = worker.engine.counters
    assert counters.last_checkpoint is None
    started_at = time.time()
    until(worker, fox, 5, claimed(run, fox), claimed(run, dog))
    assert counters.last_checkpoint >= started_at  # the age counts from the start before the first write
    assert counters.kv_cache_tokens > 0
    to_the_end(worker)
    assert counters.last_checkpoint is None
    counters.count_checkpoint("tokens", num_bytes=1, seconds=0.0)  # a file written after the last job's end
    assert counters.last_checkpoint is None
    assert counters.kv_cache_tokens == 0
    [interval] = [f for f in engine_families(counters, LABELS) if f.name.endswith("interval_seconds")]
    assert interval.samples[0].value == 600.0


def test_tokens_that_are_read_before_a_job_goes_on_are_counted(tmp_path: Path, tiny_model: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    fox = record("fox")
    first = session(run, tiny_model, checkpoint="tokens")
    until(first, fox, 100, claimed(run, fox))
    num_prompt_tokens = first.engine.counters.num_prompt_tokens
    assert first.engine.counters.num_read_tokens == num_prompt_tokens - 1  # the last one is the first step's root
    num_tokens = first.drain(5.0).of("released")[0].num_generated_tokens
    second = run_to_end(run, tiny_model, fox, checkpoint="tokens")
    assert second.engine.counters.num_resumes == {"replay": 1}
    assert second.engine.counters.num_read_tokens == num_prompt_tokens + num_tokens - 1
