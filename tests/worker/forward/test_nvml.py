from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.worker.forward.nvml import own_gpus
from tests.worker.fake_gpus import UUIDS, needs_gcc, run_with_gpus

UUIDS_OF_ALL = """
from swiftbatch.worker.forward import nvml
print(*(gpu.uuid for gpu in nvml.own_gpus()))
"""
DESCRIPTION = """
from swiftbatch.worker.forward import nvml
gpu = nvml.own_gpus()[0]
print(gpu.name, gpu.capability, gpu.num_multiprocessors, gpu.free_bytes, nvml.driver_here())
"""
METRICS = """
import urllib.request
from swiftbatch.metrics.counters import EngineCounters
from swiftbatch.metrics.exporter import Labels, engine_families, registry_of, serve
from swiftbatch.worker.forward import nvml

labels, gpus = Labels("model", "auto", "w1"), nvml.own_gpus()
registry = registry_of(lambda: engine_families(EngineCounters(), labels, [gpu.figures() for gpu in gpus]))
address, stop = serve(registry, 0, host="127.0.0.1")
lines = urllib.request.urlopen(address).read().decode().splitlines()
print(*(line for line in lines if "swiftbatch_gpu" in line), sep="\\n")
stop()
"""


@needs_gcc
def test_a_worker_s_endpoint_has_its_gpu_by_uuid(tmp_path: Path) -> None:
    told = run_with_gpus(tmp_path, METRICS, FAKE_ECC="3", FAKE_REASONS=str(0x40 | 0x4), FAKE_LACKS_RATES="1")
    lines = "\n".join(line for line in told.splitlines() if not line.startswith("#"))
    labels = f'drafter="auto",gpu="{UUIDS[0]}",model_name="model",'
    found = dict(line.rsplit(" ", 1) for line in lines.replace(labels, "").splitlines())
    assert {name: float(value) for name, value in found.items()} == {
        'swiftbatch_gpu_ecc_uncorrected_errors_total{worker="w1"}': 3,
        'swiftbatch_gpu_throttled{reason="hw_slowdown",worker="w1"}': 0,
        'swiftbatch_gpu_throttled{reason="hw_thermal",worker="w1"}': 1,
        'swiftbatch_gpu_throttled{reason="hw_power_brake",worker="w1"}': 0,
        'swiftbatch_gpu_throttled{reason="sw_thermal",worker="w1"}': 0,
        'swiftbatch_gpu_throttled{reason="sw_power_cap",worker="w1"}': 1,
        'swiftbatch_gpu_temperature_celsius{worker="w1"}': 61,
        'swiftbatch_gpu_memory_used_bytes{worker="w1"}': 5e9,
        'swiftbatch_gpu_memory_total_bytes{worker="w1"}': 85e9,
    }, "a figure that the GPU does not tell is absent"


@needs_gcc
def test_gpus_of_a_worker_share_each_metric(tmp_path: Path) -> None:
    lines = run_with_gpus(tmp_path, METRICS, num_gpus=2).splitlines()
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    of_each = [{line.partition("{")[0] for line in lines if uuid in line} for uuid in UUIDS[:2]]
    assert of_each[0] == of_each[1] == {line.split()[2] for line in heads}


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
    assert found == list(expected)


@needs_gcc
def test_a_gpu_is_described_without_cuda(tmp_path: Path) -> None:
    found = run_with_gpus(tmp_path, DESCRIPTION)
    assert found == "NVIDIA H100 PCIe (9, 0) 114 80000000000 NvidiaDriver(version='580.65.06', cuda=(13, 0))\n"


def test_without_nvml_a_process_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftbatch.worker.forward.nvml.has_nvml", lambda: False)
    assert own_gpus() == ()
