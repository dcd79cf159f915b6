"""`doctor` reports its measurements, and a manifest records them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from swiftbatch.scheduler.cli import main
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.exactness.doctor import Diagnosis, diagnose
from swiftbatch.worker.exactness.doctor_verdicts import known_verdict
from swiftbatch.worker.kernels.native_library import NO_KERNELS, OVERRIDE
from tests.worker.exactness.spoilt_attention import rows_that_depend_on_neighbours

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_exact_machine_is_called_exact_and_remembered(tiny_model: Path) -> None:
    config = EngineConfig(model=str(tiny_model), dtype="float32", num_threads=1)
    diagnosis = diagnose(config, num_rows=300)
    assert diagnosis.verdict == "exact"
    assert diagnosis.num_rows >= 300
    assert diagnosis.agreement.agrees
    assert diagnosis.agreement.summary() in diagnosis.summary()
    assert "every engine, batch and resume gives the same tokens" in diagnosis.summary()
    assert known_verdict(diagnosis.key()) == "exact"
    for other in ({"num_threads": 2}, {"instruction_set": "other-bf16", "dtype": "bfloat16"}):
        assert known_verdict(diagnosis.model_copy(update=other).key()) == "not probed"


def test_where_the_kernels_come_from_is_said(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)
    diagnosis = diagnose(EngineConfig(model=str(tiny_model), dtype="float32", num_threads=1), num_rows=1)
    assert f"numerics: {diagnosis.numerics}\n" in diagnosis.summary()
    for changes, words in (
        ({"numerics": "cpu native f32 1", "instruction_set": "avx2"}, "compiled at install, for avx2; here run "),
        ({"numerics": "cpu AVX2", "instruction_set": "avx2"}, "torch's, since those for avx2 do not know this kind"),
        (
            {"numerics": "cpu AVX2, native f32 1 attention", "instruction_set": "avx2"},
            "torch's, with attention compiled at install, for avx2; here run ",
        ),
        ({"instruction_set": None}, "torch's, since none were compiled; install swiftbatch anew"),
        ({"device": "cuda"}, "torch's, on a GPU"),
    ):
        assert f"\nkernels: {words}" in diagnosis.model_copy(update=changes).summary()
    monkeypatch.setenv(OVERRIDE, NO_KERNELS)
    assert "torch leaves them out" in diagnosis.model_copy(update={"instruction_set": None}).summary()


def test_a_machine_whose_rows_differ_is_told_so(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, NO_KERNELS)
    monkeypatch.setattr(diagnose, "__defaults__", (60,))  # rows; nearly every one differs
    with rows_that_depend_on_neighbours():
        result = CliRunner().invoke(main, ["doctor", "--model", str(tiny_model), "--device", "cpu", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    diagnosis = Diagnosis.model_validate_json(result.stdout)
    assert (diagnosis.verdict, known_verdict(diagnosis.key())) == ("exact up to ties", "exact up to ties")
    assert diagnosis.num_differing > 0
    assert "can change where two candidates nearly tie" in diagnosis.summary()


OF_FEW_ROWS = """
from swiftbatch.scheduler.cli import main
from swiftbatch.worker.exactness.doctor import diagnose
diagnose.__defaults__ = (60,)
main()
"""


def test_a_log_holds_the_verdict_and_no_progress_bars(tiny_model: Path) -> None:
    command = [sys.executable, "-c", OF_FEW_ROWS, "doctor", "--model", str(tiny_model)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": ""}  # progress bars as users have them
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (process.returncode, process.stderr) == (0, "")
    assert "plain decoding" in process.stdout


def test_a_device_that_is_absent_is_told_with_the_build_of_torch(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["doctor", "--model", str(tiny_model), "--device", "cuda"])
    assert result.exit_code == 2
    build = "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
    seen = f"no CUDA device is visible to torch {torch.__version__} ({build})"
    assert result.stderr == f"swiftbatch: device cuda: {seen}; use --device cpu\n"
