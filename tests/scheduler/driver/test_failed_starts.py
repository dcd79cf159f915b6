"""Failed starts of workers are retried by reason; lost nodes do not count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from swiftbatch.jobs.storage.retries import Backoff
from swiftbatch.scheduler.cluster import ray_actors
from swiftbatch.scheduler.driver import worker_fleet
from swiftbatch.scheduler.driver.driver import DriverError
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from tests.scheduler.driver.dispatch_parts import NUM_WORKERS, with_driver


@pytest.mark.parametrize(
    ("error", "num_tries"),
    [(KVRoomError("no room on the GPU"), 6), (torch.OutOfMemoryError("no\nroom"), 6), (ValueError("no number"), 3)],
    ids=["room", "torch", "value"],
)
def test_a_start_for_which_memory_may_come_free_is_tried_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, num_tries: int
) -> None:
    _, driver = with_driver(tmp_path, 1, monkeypatch)
    answers = failing(monkeypatch, ray_actors._explain(RayTaskError("start", "", error)))
    with pytest.raises(DriverError, match=rf"no worker starts, {num_tries} tries: .*no"):
        driver.run()
    assert len(answers) == num_tries


@pytest.mark.parametrize(
    ("error", "num_waves"),
    [(ActorDiedError(), 3), (RayTaskError("start", "", ValueError("no number")), 1)],
    ids=["died", "raised"],
)
def test_workers_that_die_while_they_start_together_count_as_one_try_and_those_that_raise_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RayError, num_waves: int
) -> None:
    _, driver = with_driver(tmp_path, 2 * NUM_WORKERS, monkeypatch)
    answers = failing(monkeypatch, ray_actors._explain(error))
    with pytest.raises(DriverError, match="no worker starts, 3 tries"):
        driver.run()
    assert len(answers) == num_waves * NUM_WORKERS  # a dying node takes all of them along


def test_workers_whose_node_goes_while_they_start_are_started_as_often_as_that_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = ActorDiedError()
    lost.error_msg = "The actor died because its node has died. Node Id: 0a"
    _, driver = with_driver(tmp_path, 2 * NUM_WORKERS, monkeypatch)
    answers = failing(monkeypatch, ray_actors._explain(lost), 5 * NUM_WORKERS)
    assert driver.run() == "finished"
    assert len(answers) > 5 * NUM_WORKERS


def failing(patch: pytest.MonkeyPatch, why: tuple[str, str], num_failing: int = 1000) -> list[object]:
    """Make calls to workers fail the first `num_failing` times, without pauses."""
    answers: list[object] = []
    answer = ray_actors.answer

    def fail(call: object) -> object:
        answers.append(call)
        if len(answers) <= num_failing:
            raise ray_actors.WorkerLostError(*why)
        return answer(call)

    patch.setattr(ray_actors, "answer", fail)
    patch.setattr(worker_fleet, "RESTART_BACKOFF", Backoff(0.0, 0.0))
    return answers
