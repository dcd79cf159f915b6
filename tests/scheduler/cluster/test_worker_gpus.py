"""Workers with several GPUs on a real Ray, whose node has four fake ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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

pytestmark = [pytest.mark.ray, needs_gcc]


def test_a_worker_gets_its_own_gpus_and_one_without_as_many_waits(tmp_path: Path) -> None:
    num_gpus, started, held, num_waiting, _ = answers(tmp_path, "")
    assert (num_gpus, held, num_waiting) == (4, [], 1)
    assert sorted(gpu for gpus in started for gpu in gpus) == list(UUIDS[:4])
    assert [len(gpus) for gpus in started] == [2, 2]


def test_the_process_with_a_failed_gpu_holds_it_and_its_company(tmp_path: Path) -> None:
    _, [started], held, num_waiting, num_most = answers(tmp_path, UUIDS[3])
    assert sorted([*started, *held]) == list(UUIDS[:4])
    assert UUIDS[3] in held
    assert (num_waiting, num_most) == (1, 1)


def answers(folder: Path, failed: str) -> Any:
    place, answer = make_run(folder / "run", {}).store.uri, folder / "answer.json"
    run_with_gpus(folder, PROGRAM, place, f"{COUNTING}:CountingSession", failed, str(answer), num_gpus=4)
    return json.loads(answer.read_text())
