"""Workers that do not start are started anew a number of times, by the reason why."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from swiftbatch.jobs.backoff import Backoff
from swiftbatch.scheduler.cluster import remote
from swiftbatch.scheduler.driver import worker_fleet
from swiftbatch.scheduler.driver.driver import DriverError
from swiftbatch.worker.caches.room import KVRoomError
from tests.scheduler.driver.dispatch_parts import with_driver


@pytest.mark.parametrize(
    ("error", "num_tries"),
    [(KVRoomError("no room on the GPU"), 6), (ValueError("no number"), 3)],
    ids=["room", "value"],
)
def test_a_start_for_which_memory_may_come_free_is_tried_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, num_tries: int
) -> None:
    _, driver = with_driver(tmp_path, 1, monkeypatch)
    answers: list[object] = []

    def fail(call: object) -> None:
        answers.append(call)
        raise remote.WorkerLostError(*remote._explain(RayTaskError("start", "", error)))

    monkeypatch.setattr(remote, "answer", fail)
    monkeypatch.setattr(worker_fleet, "RESTARTS", Backoff(0.0, 0.0))
    with pytest.raises(DriverError, match=rf"no worker starts, {num_tries} tries: .*no"):
        driver.run()
    assert len(answers) == num_tries
