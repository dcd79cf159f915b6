"""A GPU that fails costs itself alone: its jobs go on elsewhere without a strike, and it gets no more workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftbatch.jobs.storage.retries import Backoff
from swiftbatch.scheduler.cluster import ray_actors
from swiftbatch.scheduler.cluster.ray_actors import GPU_FAILED, WorkerLostError
from swiftbatch.scheduler.cluster.worker_actor import RefusedGPUs, WorkerInfo
from swiftbatch.scheduler.driver import worker_fleet
from swiftbatch.scheduler.driver.driver import Driver, DriverError
from swiftbatch.worker.config import EngineConfig, NumGPUs
from swiftbatch.worker.session.work_messages import Orders, WorkReport
from tests.scheduler.driver.dispatch_parts import NUM_SLOTS, Answer, Dispatched, Method, NoOpWorker
from tests.scheduler.driver.driver_parts import RecordingDisplay, job_id, make_driver, make_run

BROKEN = (GPU_FAILED, "the GPU failed: CUDA error: unspecified launch failure")


class Machine:
    """A machine whose GPUs go to waiting processes, the one that came free last first."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, gpus: list[str], num_jobs: int, num_each: NumGPUs = 1
    ) -> None:
        self.run = make_run(folder, {f"job-{i}": 8 + i % 50 for i in range(num_jobs)})
        self.fails: Callable[[str, set[str]], bool] = lambda gpu, names: False  # a GPU, names of new jobs
        self.fails_at_start: set[str] = set()
        self.free, self.num_gpus, self.num_each = list(gpus), len(gpus), num_each
        self.dispatched = Dispatched(self.run, num_jobs)
        self.failures: Counter[str] = Counter()
        self.workers: list[GPUWorker] = []
        self.display = RecordingDisplay()
        for name in ("create_actor", "wait", "answer", "kill"):
            patch.setattr(ray_actors, name, getattr(self, name))
        patch.setattr(worker_fleet, "RESTART_BACKOFF", Backoff(0.0, 0.0))

    def driver(self, max_attempts: int = 1) -> Driver:
        """Return a driver that gives a job up at its first strike."""
        cluster: Any = SimpleNamespace(
            is_embedded=True,
            num_cpus_per_worker=lambda: 1,
            gives_gpus=lambda device: True,
            num_gpus=self.num_gpus,
            watch=None,
        )
        config, num_workers = EngineConfig(num_gpus_per_worker=self.num_each), self.num_gpus // self.num_each
        sizes = {"workers": num_workers, "slots": NUM_SLOTS, "attempts": max_attempts}
        return make_driver(self.run, cluster, self.display, config=config, **sizes)

    def create_actor(self, *_: object, num_gpus: int, **__: object) -> GPUWorker:
        assert num_gpus == self.num_each
        self.workers.append(GPUWorker(self))
        return self.workers[-1]

    def wait(self, calls: list[Answer], seconds: float) -> list[Answer]:
        return [call for call in calls if call.value is not None]

    def answer(self, call: Answer) -> object:
        if isinstance(call.value, WorkerLostError):
            raise call.value
        return call.value

    def kill(self, actor: GPUWorker) -> None:
        self.free += actor.gpus
        self.workers.remove(actor)


class GPUWorker(NoOpWorker):
    """A process that gets its GPUs when it starts; without as many free ones, it waits for ever."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.dispatched)
        self.machine = machine
        num_free = len(machine.free)
        self.gpus = () if num_free < machine.num_each else tuple(machine.free[num_free - machine.num_each :])
        del machine.free[num_free - len(self.gpus) :]
        self.start, self.work = Method(self._started), Method(self._checked)

    def _started(self, failed_gpus: frozenset[str]) -> WorkerInfo | RefusedGPUs | WorkerLostError | None:
        if not self.gpus:
            return None
        if not failed_gpus.isdisjoint(self.gpus):
            return RefusedGPUs(self.gpus)
        if not self.machine.fails_at_start.isdisjoint(self.gpus):
            self.machine.failures.update(self.gpus)
            return WorkerLostError(*BROKEN, self.gpus)
        return replace(self.info, gpus=self.gpus)

    def _checked(self, orders: Orders, seconds: float) -> WorkReport | WorkerLostError:
        names = {each.record.job.custom_id for each in orders.assignments}
        if failed := [gpu for gpu in self.gpus if self.machine.fails(gpu, names)]:
            self.machine.failures.update(failed)
            return WorkerLostError(*BROKEN)
        return self.finish_all(orders, seconds)


def test_a_gpu_that_fails_twice_gets_no_more_workers_and_its_jobs_end_elsewhere_without_a_strike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, ["bad", "good"], 40)
    machine.fails = lambda gpu, names: gpu == "bad"
    assert machine.driver().run() == "finished"
    assert machine.failures == {"bad": 2}
    assert machine.workers == []  # also that which held the bad GPU has ended
    assert_all_finished(machine)
    [told] = [note for note in machine.display.notes if note.startswith("GPU bad has failed 2 times")]
    assert told.endswith("look after it: the GPU failed: CUDA error: unspecified launch failure")


def test_a_gpu_that_fails_at_starts_is_left_out_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, ["good", "bad"], 40)
    machine.fails_at_start.add("bad")
    assert machine.driver().run() == "finished"
    assert machine.failures["bad"] <= 2
    assert_all_finished(machine)


def test_a_run_whose_gpus_all_fail_ends_and_a_resume_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, ["a", "b"], 20)
    machine.fails = lambda gpu, names: True
    with pytest.raises(DriverError, match=r"no job gets on, since GPUs fail: .*CUDA error"):
        machine.driver(max_attempts=20).run()
    assert sum(machine.failures.values()) == 16
    machine.fails = lambda gpu, names: False
    assert machine.driver(max_attempts=20).run() == "finished"
    assert_all_finished(machine)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_job_that_breaks_the_last_gpu_is_given_up_and_all_others_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    machine = Machine(tmp_path, monkeypatch, [f"gpu{number}" for number in range(num_gpus)], 40)
    machine.fails = lambda gpu, names: "job-7" in names
    assert machine.driver(max_attempts=3).run() == "finished"
    assert machine.run.ended()[1] == {job_id(machine.run, "job-7")}


def test_a_job_under_which_several_gpus_fail_is_given_up_before_all_gpus_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, [f"gpu{number}" for number in range(8)], 200)
    machine.fails = lambda gpu, names: "job-7" in names
    assert machine.driver(max_attempts=5).run() == "finished"
    assert machine.dispatched.run.ended()[1] == {job_id(machine.run, "job-7")}
    assert sum(machine.failures.values()) < 2 * machine.num_gpus


def test_a_gpu_that_fails_takes_along_those_that_share_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, ["a", "b", "bad", "c"], 40, num_each=2)
    machine.fails = lambda gpu, names: gpu == "bad"
    assert machine.driver().run() == "finished"
    assert machine.failures == {"bad": 2}
    assert_all_finished(machine)
    assert left_out(machine) == ["bad", "c"]
    assert machine.workers == []


def test_of_gpus_in_changing_company_the_one_that_fails_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, ["e", "a", "b", "c", "bad"], 60, num_each=2)
    machine.fails = lambda gpu, names: gpu == "bad"

    def kill(actor: GPUWorker) -> None:
        machine.kill(actor)
        machine.free[:2] = reversed(machine.free[:2])

    monkeypatch.setattr(ray_actors, "kill", kill)
    assert machine.driver().run() == "finished"
    assert machine.failures == {"bad": 2}
    assert_all_finished(machine)
    assert left_out(machine) == ["bad"]


def test_gpus_without_which_no_worker_starts_are_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, ["a", "b", "c", "d"], 40, num_each=4)
    machine.fails = lambda gpu, names: gpu == "d" and "job-7" in names
    assert machine.driver(max_attempts=3).run() == "finished"
    assert machine.run.ended()[1] == {job_id(machine.run, "job-7")}
    assert left_out(machine) == []


def left_out(machine: Machine) -> list[str]:
    return sorted(note.split()[1] for note in machine.display.notes if note.startswith("GPU "))


def assert_all_finished(machine: Machine) -> None:
    finished, failed = machine.run.ended()
    assert (len(finished), failed) == (machine.dispatched.num_jobs, set())
