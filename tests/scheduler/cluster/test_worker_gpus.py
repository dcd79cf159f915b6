"""Workers with two GPUs each on a real Ray, whose node has four fake ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scheduler.driver.driver_parts import COUNTING, make_run
from tests.worker.fake_gpus import UUIDS, needs_gcc, run_with_gpus

PROGRAM = """
import json, os, sys, time
from swiftbatch.scheduler.cluster.ray_cluster import connect
from swiftbatch.scheduler.cluster.worker_actor import WorkerSpec
from swiftbatch.scheduler.driver.worker_fleet import Fleet, Started
from swiftbatch.worker.config import EngineConfig

place, factory, failed, answer = sys.argv[1:]
os.environ["PYTHONPATH"] = os.getcwd()
with connect(None, num_workers=3) as cluster:
    config = EngineConfig(device="cuda", num_gpus_per_worker=2)
    fleet = Fleet(WorkerSpec(config, place, session_factory=factory), cluster, timeout=60)
    fleet._failed_gpus.update(failed.split())
    fleet.fill(3, time.monotonic())
    started = []
    while len(started) + len(fleet._placeholders) < 2:
        started += [event.info.gpus for event in fleet.wait(1.0, time.monotonic()) if isinstance(event, Started)]
    held, num_waiting = sorted(fleet._failed_gpus), len(fleet.workers) - len(started)
    with open(answer, "w") as file:
        json.dump([cluster.num_gpus, started, held, num_waiting, fleet._most_workers()], file)
    fleet.stop()
"""


@pytest.mark.ray
@needs_gcc
def test_of_three_workers_one_gets_gpus_one_holds_a_failed_one_with_its_company_and_one_waits(tmp_path: Path) -> None:
    place, answer = make_run(tmp_path / "run", {}).store.uri, tmp_path / "answer.json"
    run_with_gpus(tmp_path, PROGRAM, place, f"{COUNTING}:CountingSession", UUIDS[3], str(answer), num_gpus=4)
    num_gpus, [started], held, num_waiting, num_most = json.loads(answer.read_text())
    assert sorted([*started, *held]) == list(UUIDS[:num_gpus])
    assert UUIDS[3] in held
    assert (num_gpus, len(started), num_waiting, num_most) == (4, 2, 1, 1)
