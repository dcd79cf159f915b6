"""A worker's jobs with LoRA adapters: resumed with the same tokens, and with the run's adapters or none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.job import JobRecord, LoraAdapter
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.model.lora import WEIGHTS_FILE
from swiftbatch.worker.model.model_files import OtherModelError
from tests.worker.model.lora_parts import located, write_adapter
from tests.worker.session.session_parts import (
    PLAINLY,
    body,
    digest,
    have_caches_loaded,
    made_with,
    make_run,
    preempted,
    record,
    run_to_end,
    session,
)

NUM_TOKENS = 90


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", tiny_model)


def run_with(adapter: Path, model: Path, folder: Path) -> Run:
    run = made_with(make_run(folder), model)
    [files] = located(own=adapter)
    adapters = {"lora": (f"own={adapter}",), "lora_files": {"own": dict(files.digests)}}
    run.store.write("run.json", run.manifest.model_copy(update=adapters).model_dump_json().encode())
    return Run.open(run.store.uri)


def job_of(adapter: Path, **changes: Any) -> JobRecord:
    [files] = located(own=adapter)
    return record("fox", NUM_TOKENS, lora=LoraAdapter(name="own", fingerprint=files.fingerprint), **changes)


@pytest.mark.parametrize("kind", ["kv", "replay"])
def test_a_lost_worker_s_job_goes_on_elsewhere_with_the_same_tokens(
    kind: str, adapter: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_caches_loaded(monkeypatch)
    alone, run = (run_with(adapter, tiny_model, tmp_path / name) for name in ("alone", "run"))
    job, other = job_of(adapter), record("fox", NUM_TOKENS)
    run_to_end(alone, tiny_model, job, other, **PLAINLY)
    assert digest(alone, job) != digest(alone, other)
    assert body(alone, job)["lora"] == "own"
    assert "lora" not in body(alone, other)
    preempted(run, tiny_model, job, 50, checkpoint="state" if kind == "kv" else "tokens")
    successor = run_to_end(run, tiny_model, other, job, engine="auto")
    assert successor.engine.counters.num_resumes == {kind: 1}
    assert [digest(run, each) for each in (job, other)] == [digest(alone, each) for each in (job, other)]


def test_a_worker_whose_adapter_has_other_files_does_not_start(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    run, other = run_with(adapter, tiny_model, tmp_path / "run"), write_adapter(tmp_path / "other", tiny_model, 2)
    shutil.copy(other / WEIGHTS_FILE, adapter)
    with pytest.raises(OtherModelError, match=r"adapter own: on node .* has other files, expected those"):
        session(run, tiny_model)
