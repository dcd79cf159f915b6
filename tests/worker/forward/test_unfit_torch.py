"""Refusals of a GPU that this torch can't use: a run must not spend its night on cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.forward import hardware
from tests.worker.fake_gpus import needs_gcc, process_with_gpus, run_with_gpus

OLD_DRIVER = {"FAKE_DRIVER": "550.54.15", "FAKE_CUDA": "12040"}
needs_cpu_build = pytest.mark.skipif(torch.version.cuda is not None, reason="torch would look for the fake GPU")
RESOLVED = """
import sys
from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.forward import hardware

if len(sys.argv) > 1:
    hardware.torch_build = lambda: ("2.13.0", sys.argv[1])
workers = (lambda device=device: hardware.resolve_device(device) for device in ("auto", "cuda"))
for decide in (hardware.has_cuda, *workers):
    try:
        print(decide())
    except ModelError as error:
        print(error)
"""
MANIFEST = """
import sys
from swiftbatch.scheduler.runs.run_manifest import kept_or_new_manifest, with_model
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.worker.forward import hardware
from swiftbatch.worker.model.model_files import locate_model

hardware.torch_build = lambda: ("2.13.0", "13.0")
hardware.cublas_version = lambda: "13.1"
manifest = kept_or_new_manifest(sys.argv[1] + "/absent", Settings(said={"device": sys.argv[2]}))
manifest = with_model(manifest, locate_model("embedded"))
print(manifest.device, hardware.hardware_of(manifest.device), "torch" in sys.modules)
"""


@needs_gcc
@needs_cpu_build
def test_a_driver_older_than_torch_is_refused_with_both_versions(tmp_path: Path) -> None:
    said = run_with_gpus(tmp_path, RESOLVED, "13.0", **OLD_DRIVER).splitlines()
    assert said == 3 * [
        "driver 550.54.15 serves CUDA 12.4, but torch 2.13.0 is built for CUDA 13.0, which needs driver 580 or newer; "
        "install that, or torch's build for CUDA 12, or use --device cpu"
    ]


@needs_gcc
@needs_cpu_build
def test_a_cpu_build_of_torch_beside_a_gpu_is_refused(tmp_path: Path) -> None:
    for said in run_with_gpus(tmp_path, RESOLVED).splitlines():
        assert said.startswith(
            f"NVIDIA H100 PCIe is here, but torch {torch.__version__} is a CPU build; install torch's"
        )


@needs_gcc
@needs_cpu_build
def test_a_gpu_that_fits_but_fails_is_refused_by_the_worker(tmp_path: Path) -> None:
    driver, worker, _ = run_with_gpus(tmp_path, RESOLVED, "13.0").splitlines()
    assert driver == "True"
    assert "is here, but torch 2.13.0 (built for CUDA 13.0) can't use it; see what nvidia-smi says" in worker


@needs_gcc
@needs_cpu_build
@pytest.mark.parametrize("variables", [{"num_gpus": 0}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_a_machine_without_a_visible_gpu_is_a_cpu(tmp_path: Path, variables: dict[str, object]) -> None:
    assert run_with_gpus(tmp_path, RESOLVED, **variables, **OLD_DRIVER).splitlines()[:2] == ["False", "cpu"]


@needs_gcc
@needs_cpu_build
def test_a_run_on_cores_beside_a_gpu_is_what_device_cpu_says(tmp_path: Path) -> None:
    assert run_with_gpus(tmp_path, MANIFEST, str(tmp_path), "cpu", **OLD_DRIVER).startswith("cpu ")
    refused = process_with_gpus(tmp_path, MANIFEST, str(tmp_path), "auto", **OLD_DRIVER)
    assert refused.stderr.splitlines()[-1].startswith("swiftbatch.jobs.errors.ModelError: driver 550.54.15 serves")


@needs_gcc
def test_a_new_run_for_a_gpu_is_described_without_cuda(tmp_path: Path) -> None:
    """A driver's own context would take half a gigabyte of its workers' memory."""
    found = run_with_gpus(tmp_path, MANIFEST, str(tmp_path), "auto")
    assert found.startswith("cuda NVIDIA H100 PCIe with 114 SMs, driver ")
    assert found.endswith(", cuBLAS 13.1 False\n")


def test_torch_s_build_is_known_without_torch() -> None:
    assert hardware.torch_build() == (torch.__version__, torch.version.cuda)


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "own_gpu", lambda: None)
    with pytest.raises(ModelError, match=r"cuda: no CUDA device is visible to torch 2\S+ \(.*; use --device cpu"):
        hardware.resolve_device("cuda")
