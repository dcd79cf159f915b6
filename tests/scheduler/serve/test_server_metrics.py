"""The server's metrics show what its alerts and its dashboard need."""

from __future__ import annotations

import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from swiftbatch.scheduler.serve.batches.batch_driver import DriverOptions, driver_arguments
from swiftbatch.scheduler.serve.batches.batch_ending import end_batch
from swiftbatch.scheduler.serve.batches.service import MAX_TEAMS, Service
from swiftbatch.scheduler.serve.records.api_keys import make_key
from tests.scheduler.serve.api_parts import batch_of, bearer, client_of, service_on, upload
from tests.scheduler.serve.batch_parts import submit_two, worked

SECRET, LINE = make_key("alice")


def keyed_service(folder: Path) -> Service:
    keys = folder / "keys"
    keys.write_text(f"{LINE} metrics=yes\n")
    return service_on(folder, api_keys=str(keys))


def figures(service: Service) -> dict[str, float]:
    text = client_of(service).get("/metrics", headers=bearer(SECRET)).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {" ".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


def test_refused_keys_are_counted(tmp_path: Path) -> None:
    service = keyed_service(tmp_path)
    assert figures(service)["swiftbatch_serve_refused_keys_total"] == 0
    for headers in ({}, bearer("sb_wrong"), bearer(SECRET)):
        client_of(service).get("/v1/files", headers=headers)
    assert figures(service)["swiftbatch_serve_refused_keys_total"] == 2


def test_the_disk_is_that_of_the_folder(tmp_path: Path) -> None:
    found = figures(keyed_service(tmp_path))
    assert found["swiftbatch_serve_disk_bytes free"] > 0
    assert found["swiftbatch_serve_disk_bytes used"] > 0


def test_the_queue_is_as_old_as_the_oldest_batch_that_waits(tmp_path: Path) -> None:
    service = keyed_service(tmp_path)
    assert figures(service)["swiftbatch_serve_oldest_waiting_seconds"] == 0
    client = client_of(service)
    for _ in range(2):
        file_id = upload(client, bearer(SECRET))
        assert client.post("/v1/batches", json=batch_of(file_id), headers=bearer(SECRET)).status_code == 200
    oldest, newest = sorted(service.keeper.courses(), key=lambda course: course.batch.created)
    oldest.stage, newest.stage = "running", "waiting"
    assert figures(service)["swiftbatch_serve_oldest_waiting_seconds"] <= time.time() - newest.batch.created
    oldest.stage = "waiting"
    assert figures(service)["swiftbatch_serve_oldest_waiting_seconds"] >= newest.batch.created - oldest.batch.created
    assert figures(service)["swiftbatch_serve_batches waiting"] == 2


def test_a_batch_s_team_is_its_key_and_metrics_tell_a_hundred_of_them_apart(tmp_path: Path) -> None:
    service = keyed_service(tmp_path)
    client = client_of(service)
    client.post("/v1/batches", json=batch_of(upload(client, bearer(SECRET))), headers=bearer(SECRET))
    [course] = service.keeper.courses()
    words = driver_arguments(course.batch, service.files, DriverOptions())
    assert words[words.index("--team") + 1] == "alice"
    assert service.team_labels(None) == {}
    found = [service.team_labels(f"key-{number}")["team"] for number in range(MAX_TEAMS + 2)]
    assert found == [*(f"key-{number}" for number in range(MAX_TEAMS)), "other", "other"]
    assert service.team_labels("key-7") == {"team": "key-7"}


def test_what_a_team_used_is_counted_once_while_its_batch_runs_after_a_restart_and_at_its_end(
    tiny_model: Path, tmp_path: Path
) -> None:
    def used(service: Service) -> list[float]:
        found = figures(service)
        kinds = ("input_tokens", "output_tokens", "generated_tokens", "worker_seconds")
        return [found[f"swiftbatch_serve_{kind}_total alice"] for kind in kinds]

    service = keyed_service(tmp_path)
    client = client_of(service)
    client.post("/v1/batches", json=batch_of(upload(client, bearer(SECRET))), headers=bearer(SECRET))
    assert used(service) == [0, 0, 0, 0]
    [course] = service.keeper.courses()
    course.stage = "running"
    run = submit_two(course.batch, tiny_model, tmp_path, 2)
    worked(run, num_tokens=12, seconds=30.0)
    assert used(service) == used(keyed_service(tmp_path)) == [0, 0, 12, 30]
    worked(run, num_tokens=15, seconds=40.0)
    assert used(service) == used(keyed_service(tmp_path)) == [0, 0, 15, 40]
    end_batch(service.batches, service.files, course.batch, "finished", None)
    ended = course.batch.ended
    expected = [ended.num_input_tokens, ended.num_generated_tokens, 15, 40]
    assert used(service) == used(keyed_service(tmp_path)) == expected
    assert min(map(int, expected)) > 0
