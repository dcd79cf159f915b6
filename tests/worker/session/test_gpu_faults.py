"""A failing GPU ends the worker and blames no job; a full memory puts one job back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftbatch.jobs.errors import GPUFailedError
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.hardware import gpu_failures
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.session.session import WorkerSession
from swiftbatch.worker.session.work_messages import Orders, WorkReport
from tests.worker.engine.memory_parts import full_memory
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.session.session_parts import (
    PLAINLY,
    claimed,
    digest,
    have_caches_loaded,
    make_run,
    record,
    run_to_end,
    session,
    step_one_by_one,
    to_the_end,
    until,
)

pytestmark = needs_kernels

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"
BROKEN: dict[str, Callable[[], Exception]] = {
    "AcceleratorError": lambda: torch.AcceleratorError(ILLEGAL),
    "RuntimeError": lambda: RuntimeError(ILLEGAL),
}
JOBS = [record(name, 90) for name in ("fox", "dog", "cat")]
CACHES: dict[str, Any] = {"checkpoint": "state", "checkpoint_tokens": 16}


class Breaking:
    """Raises an error in calls of a method from the moment that `error` is set, `num_times` times."""

    def __init__(self, patch: pytest.MonkeyPatch, part: type, name: str, num_times: int | None = None) -> None:
        self.error: Callable[[], Exception] | None = None
        self.num_calls, self._num_left = 0, num_times
        call = getattr(part, name)

        def breaking(*args: Any, **kwargs: Any) -> Any:
            found = call(*args, **kwargs)  # a fault behind the work leaves more behind
            self.num_calls += self.error is not None
            if self.error is not None and self._num_left != 0:
                self._num_left = None if self._num_left is None else self._num_left - 1
                raise self.error()
            return found

        patch.setattr(part, name, breaking)


@pytest.fixture(autouse=True)
def _one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    step_one_by_one(monkeypatch)  # a job of 90 tokens would end before the fault comes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, str]:
    run = make_run(tmp_path_factory.mktemp("undisturbed"))
    run_to_end(run, tiny_model, *JOBS, **PLAINLY)
    return digests(run)


def digests(run: Run) -> dict[str, str]:
    return {job.job_id: digest(run, job) for job in JOBS}


def finished_elsewhere(run: Run, model: Path) -> dict[str, str]:
    """Let another worker run what the lost one has not ended; return the digests of all jobs."""
    ended = run.ended()[0]
    report = to_the_end(session(run, model), *(claimed(run, job) for job in JOBS if job.job_id not in ended))
    assert sorted(outcome.job_id for outcome in report.of("finished")) == sorted(
        job.job_id for job in JOBS if job.job_id not in ended
    )
    return digests(run)


def begun(run: Run, model: Path, num_jobs: int, **changes: Any) -> WorkerSession:
    """Return a worker whose first job has some tokens."""
    worker = session(run, model, **changes)
    given = [replace(claimed(run, job), seniority=number) for number, job in enumerate(JOBS[:num_jobs])]
    until(worker, JOBS[0], 20, *given)
    return worker


def work_until_told(run: Run, model: Path) -> None:
    """Work until a worker hears of the copy in the background."""
    worker = begun(run, model, 3, **CACHES)
    while True:
        worker.work(Orders(), 0.0)
        time.sleep(0.01)


def assert_nothing_followed(worker: WorkerSession, broken: Breaking) -> None:
    """Check that the call that broke was the last one of the GPU's."""
    assert broken.num_calls == 1
    assert worker._report.of("failed", "refused", "evicted", "released") == []


@pytest.mark.parametrize("error", BROKEN.values(), ids=BROKEN)
class TestABrokenGPU:
    def test_in_a_step_loses_no_token_and_blames_no_job(
        self, run: Run, tiny_model: Path, undisturbed: dict[str, str], error: Callable[[], Exception], monkeypatch: Any
    ) -> None:
        worker = begun(run, tiny_model, 3)
        broken = Breaking(monkeypatch, NativeForwards, "run")
        broken.error = error
        with pytest.raises(GPUFailedError, match=r"^the GPU failed: CUDA error: an illegal memory access[^\n]*$"):
            worker.work(Orders(), 10.0)
        assert_nothing_followed(worker, broken)
        broken.error = None
        assert finished_elsewhere(run, tiny_model) == undisturbed

    def test_at_a_job_s_start_is_not_that_job_s_failure_nor_the_next_one_s(
        self, run: Run, tiny_model: Path, undisturbed: dict[str, str], error: Callable[[], Exception], monkeypatch: Any
    ) -> None:
        worker = begun(run, tiny_model, 1)
        broken = Breaking(monkeypatch, Engine, "new_cache")
        broken.error = error
        with pytest.raises(GPUFailedError):
            worker.work(Orders(tuple(claimed(run, job) for job in JOBS[1:])), 10.0)
        assert_nothing_followed(worker, broken)
        broken.error = None
        assert finished_elsewhere(run, tiny_model) == undisturbed

    def test_in_a_checkpoint_s_copy_is_neither_the_store_s_nor_a_job_s_failure(
        self, run: Run, tiny_model: Path, undisturbed: dict[str, str], error: Callable[[], Exception], monkeypatch: Any
    ) -> None:
        broken = Breaking(monkeypatch, FullKVCache, "kv")
        broken.error = error
        with pytest.raises(GPUFailedError):
            work_until_told(run, tiny_model)
        assert broken.num_calls == 1
        broken.error = None
        assert finished_elsewhere(run, tiny_model) == undisturbed


def test_a_gpu_that_fails_while_the_model_is_loaded_is_told_as_such(
    run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Breaking(monkeypatch, NativeForwards, "new_batch_sampler").error = BROKEN["RuntimeError"]
    with pytest.raises(GPUFailedError):
        session(run, tiny_model)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA error: out of memory", torch.OutOfMemoryError),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", torch.OutOfMemoryError),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", GPUFailedError),
        ("Triton Error [CUDA]: device kernel image is invalid", GPUFailedError),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", GPUFailedError),
        ("mat1 and mat2 shapes cannot be multiplied", RuntimeError),
    ],
)
def test_errors_of_the_gpu_are_told_from_full_memory_and_from_all_others(text: str, kind: type) -> None:
    with pytest.raises(RuntimeError) as caught, gpu_failures():
        raise RuntimeError(text)
    assert type(caught.value) is kind


class Worker:
    """Gives a worker jobs until all have ended, evicted ones again."""

    def __init__(self, run: Run, session: WorkerSession) -> None:
        self._run, self._session = run, session
        self.evicted: list[tuple[str, str]] = []  # job and reason
        self.failed: list[str] = []

    def run_all(self) -> None:
        waiting: list[JobRecord] = list(JOBS)
        while len(self._run.ended()[0]) < len(JOBS):
            given = [replace(claimed(self._run, job), seniority=JOBS.index(job)) for job in waiting]
            report = self._session.work(Orders(tuple(given)), 1e-3)
            waiting = [job for job in JOBS if any(each.job_id == job.job_id for each in report.of("evicted"))]
            self.evicted += [(each.job_id, each.reason) for each in report.of("evicted")]
            self.failed += [each.reason for each in report.of("failed", "refused")]


FULL = "the GPU's memory was full"


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("quick_disk")
class TestAFullMemory:
    def test_in_a_step_puts_the_youngest_job_back_and_the_others_go_on(
        self, run: Run, tiny_model: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = Breaking(monkeypatch, NativeForwards, "run", num_times=1)
        session_ = session(run, tiny_model)
        full.error = full_memory
        worker = Worker(run, session_)
        worker.run_all()
        assert worker.evicted == [(JOBS[2].job_id, FULL)]
        assert worker.failed == []
        assert digests(run) == undisturbed
        assert session_.engine.counters.num_out_of_memory == 1

    def test_twice_in_a_step_loses_the_worker_but_no_token(
        self, run: Run, tiny_model: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = Breaking(monkeypatch, NativeForwards, "run", num_times=2)
        worker = begun(run, tiny_model, 2)
        full.error = full_memory
        with pytest.raises(torch.OutOfMemoryError):
            worker.work(Orders(), 10.0)
        assert finished_elsewhere(run, tiny_model) == undisturbed

    def test_at_a_start_beside_other_jobs_puts_that_job_back(
        self, run: Run, tiny_model: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = Breaking(monkeypatch, Engine, "start", num_times=1)
        worker = begun(run, tiny_model, 1)
        full.error = full_memory
        report = worker.work(Orders(tuple(claimed(run, job) for job in JOBS[1:])), 0.0)
        assert [(each.job_id, each.reason) for each in report.of("evicted")] == [(JOBS[1].job_id, FULL)]
        assert [slot.sequence_id for slot in worker.engine.sequences] == [JOBS[0].job_id, JOBS[2].job_id]
        finished = WorkReport(to_the_end(worker, claimed(run, JOBS[1])).outcomes).of("finished")
        assert sorted(each.job_id for each in finished) == sorted(job.job_id for job in JOBS)
        assert digests(run) == undisturbed

    def test_at_the_start_of_a_job_alone_is_its_failure(
        self, run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Breaking(monkeypatch, Engine, "start").error = full_memory
        worker = session(run, tiny_model)
        report = worker.work(Orders((claimed(run, JOBS[0]),)), 0.0)
        [outcome] = report.of("failed")
        assert outcome.reason.startswith("OutOfMemoryError: CUDA out of memory")
        assert worker.engine.sequences == []

    @pytest.mark.parametrize("num_times", [3, None])
    def test_in_checkpoints_copies_skips_them_alone(
        self,
        tmp_path: Path,
        run: Run,
        tiny_model: Path,
        undisturbed: dict[str, str],
        num_times: int | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        full = Breaking(monkeypatch, FullKVCache, "kv", num_times)
        full.error = full_memory
        have_caches_loaded(monkeypatch)
        worker = begun(run, tiny_model, 3, **CACHES)
        until(worker, JOBS[0], 60)
        worker.drain(30.0)
        assert full.num_calls >= 3
        full.error = None
        files = sorted({path.name for path in tmp_path.rglob("checkpoints/*/*/*")})
        assert "tokens.bin" in files
        assert any(name.startswith("kv") for name in files) == (num_times is not None), files
        assert finished_elsewhere(run, tiny_model) == undisturbed
