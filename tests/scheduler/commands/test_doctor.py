from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from click.testing import CliRunner

import tests.worker.interpreter  # noqa: F401
from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.run_records import Exactness, LinearName
from swiftbatch.scheduler.cli import main
from swiftbatch.worker.config import Computation
from swiftbatch.worker.exactness.doctor_verdicts import known_verdict, verdict_key
from swiftbatch.worker.exactness.gpu_doctor import gpu_doctor
from swiftbatch.worker.exactness.gpu_doctor.findings import Check, Finding
from swiftbatch.worker.exactness.gpu_doctor.gpu_doctor import FirstRun, run_checks
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.forward import hardware
from swiftbatch.worker.forward.hardware import hardware_of
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from tests.worker.exactness.gpu_doctor.small_parts import small_parts


def check(name: str, passed: bool) -> Check:
    finding = Finding(passed=passed, words=f"{name} was tried", rows=[{"ms": 1.5}])
    return Check(name, f"{name} holds", lambda parts: finding)


@pytest.fixture(params=[True, False])
def outcome(request: pytest.FixtureRequest, embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Passes or fails the second of two checks."""

    def checked(parts: Parts, report: Callable[[str], None]) -> FirstRun:
        return run_checks(parts, report, [check("machine", True), check("products", request.param)])

    parts = small_parts(embedded_files, linear="cublas")
    monkeypatch.setattr(hardware, "resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(gpu_doctor, "resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(Parts, "of", lambda *args: parts)
    monkeypatch.setattr(gpu_doctor, "run_checks", checked)
    passed: bool = request.param
    return passed


def test_each_check_is_printed_and_the_verdict_is_kept(
    outcome: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "doctor.json"
    result = CliRunner().invoke(main, ["doctor", "--device", "cuda", "--threads", "1", "--json", str(file)])
    assert result.exit_code == (0 if outcome else 1), result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("machine: passed (")
    assert f"products: {'passed' if outcome else 'FAILED'} (" in result.stdout
    assert ("STOPPED at products: products was tried" in lines) is not outcome
    written = FirstRun.model_validate_json(file.read_text())
    assert written.verdict == ("exact" if outcome else "exact up to ties")
    assert known(CudaKernels()) == written.verdict


def known(kernels: CudaKernels) -> Exactness:
    key = verdict_key(
        locate_model("embedded").fingerprint, "bfloat16", "cuda", 1, hardware_of("cuda"), torch.__version__,
        gpu_doctor.chosen_numerics("cuda", "bfloat16", kernels),
    )  # fmt: skip
    return known_verdict(key)


@pytest.mark.parametrize("asked", ["cublas", "triton"])
def test_a_run_with_the_kernel_that_doctor_names_is_exact(
    embedded_files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: LinearName
) -> None:
    def checked(parts: Parts, report: Callable[[str], None]) -> FirstRun:
        only_triton = Finding(passed=True, words="not by cublas", rows=[], linear="triton")
        return run_checks(parts, report, [Check("products", "products hold", lambda parts: only_triton)])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in (hardware, gpu_doctor):
        monkeypatch.setattr(module, "resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(
        Parts, "of", lambda files, dtype, device, kernels: small_parts(embedded_files, linear=kernels.linear)
    )
    monkeypatch.setattr(gpu_doctor, "run_checks", checked)
    result = CliRunner().invoke(main, ["doctor", "--device", "cuda", "--threads", "1", "--linear", asked])
    assert result.exit_code == 0, result.output
    assert known(CudaKernels(linear="triton")) == "exact"
    assert known(CudaKernels()) == ("exact up to ties" if asked == "cublas" else "not probed")
    assert ("use --linear triton, which is exact" in result.stdout) is (asked == "cublas")


def test_json_alone_is_all_that_stdout_holds(outcome: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = CliRunner().invoke(main, ["doctor", "--device", "cuda", "--json"])
    assert [each["name"] for each in json.loads(result.stdout)["results"]] == ["machine", "products"]
    assert "machine: passed" in result.stderr


def test_a_model_that_the_kernels_do_not_know_is_left_to_the_probe(
    outcome: bool, embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = small_parts(embedded_files)
    parts.load = lambda: None
    monkeypatch.setattr(Parts, "of", lambda *args: parts)

    def probe(config: Computation) -> NoReturn:
        raise UserError(f"{config.device} is probed")

    monkeypatch.setattr("swiftbatch.worker.exactness.doctor.diagnose", probe)
    result = CliRunner().invoke(main, ["doctor", "--device", "cuda"])
    assert (result.exit_code, result.stderr) == (2, "swiftbatch: cuda is probed\n")
