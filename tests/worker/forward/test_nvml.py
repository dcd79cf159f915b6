from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.worker.forward.nvml import own_gpu_uuid
from tests.worker.fake_gpus import UUIDS, needs_gcc, run_with_gpus

UUIDS_OF_ALL = """
from swiftbatch.worker.forward import nvml
print(*(gpu.uuid for gpu in nvml.own_gpus()), nvml.own_gpu_uuid())
"""
DESCRIPTION = """
from swiftbatch.worker.forward import nvml
gpu = nvml.own_gpus()[0]
print(gpu.name, gpu.capability, gpu.num_multiprocessors, gpu.free_bytes, nvml.driver_here())
"""


@needs_gcc
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, UUIDS[:3]),
        ("", ()),
        ("-1", ()),
        ("2,0", (UUIDS[2], UUIDS[0])),
        (f" {UUIDS[1]}, 0", (UUIDS[1], UUIDS[0])),
        ("GPU-2", (UUIDS[2],)),
        ("1,7,0", (UUIDS[1],)),
        ("MIG-slice", ("MIG-slice",)),
    ],
)
def test_a_process_has_the_gpus_that_cuda_would_show_it(
    tmp_path: Path, said: str | None, expected: tuple[str, ...]
) -> None:
    variables = {} if said is None else {"CUDA_VISIBLE_DEVICES": said}
    found = run_with_gpus(tmp_path, UUIDS_OF_ALL, num_gpus=3, **variables).split()
    assert found == [*expected, expected[0] if expected else "None"]


@needs_gcc
def test_a_gpu_is_described_without_cuda(tmp_path: Path) -> None:
    found = run_with_gpus(tmp_path, DESCRIPTION)
    assert found == "NVIDIA H100 PCIe (9, 0) 114 80000000000 Driver(version='580.65.06', cuda=(13, 0))\n"


def test_without_nvml_a_process_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftbatch.worker.forward.nvml.has_nvml", lambda: False)
    assert own_gpu_uuid() is None
