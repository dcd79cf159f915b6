"""`doctor` says what it measured, and a run's manifest knows it afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from worker import attention
from worker.config import EngineConfig
from worker.doctor import diagnose
from worker.verdicts import known_verdict


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_exact_machine_is_called_exact_and_remembered(tiny_model: Path) -> None:
    config = EngineConfig(model=str(tiny_model), num_threads=2)
    diagnosis = diagnose(config, num_rows=300)
    assert diagnosis.verdict == "exact"
    assert diagnosis.num_rows >= 300
    assert "every engine, batch and resume gives the same tokens" in diagnosis.summary()
    assert known_verdict(diagnosis.key()) == "exact"
    other = diagnosis.model_copy(update={"num_threads": 1})
    assert known_verdict(other.key()) == "not probed"


def test_a_machine_whose_rows_differ_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_ROW_QUANTUM", 1)
    diagnosis = diagnose(EngineConfig(num_threads=2), num_rows=600)
    assert diagnosis.verdict == "exact up to ties"
    assert "can change where two candidates nearly tie" in diagnosis.summary()


def doctor(*args: str) -> subprocess.CompletedProcess[str]:
    """The command on a machine without a GPU, its output in pipes."""
    command = [sys.executable, "-m", "scheduler.cli", "doctor", *args]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": ""}  # bars as a user has them
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_log_holds_the_verdict_and_no_progress_bars(tiny_model: Path) -> None:
    process = doctor("--model", str(tiny_model))
    assert (process.returncode, process.stderr) == (0, "")
    assert "plain decoding" in process.stdout


def test_a_device_that_is_absent_is_told_with_the_build_of_torch(tiny_model: Path) -> None:
    process = doctor("--model", str(tiny_model), "--device", "cuda")
    assert process.returncode == 2
    build = "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
    seen = f"no CUDA device is visible to torch {torch.__version__} ({build})"
    assert process.stderr == f"swiftbatch: device cuda: {seen}; use --device cpu\n"
