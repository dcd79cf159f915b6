"""Rules for devices that this machine may lack."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swiftbatch.jobs.python_processes import environment_of_code
from swiftbatch.worker.exactness.doctor_verdicts import verdict_key
from swiftbatch.worker.exactness.forward_comparisons import probe_rows
from swiftbatch.worker.forward import hardware, step_costs, transformers_attention
from swiftbatch.worker.forward import transformers_attention as torch_attention
from swiftbatch.worker.forward.step_costs import PROBE_LENGTHS, measure_step_costs
from swiftbatch.worker.forward.target_model import DTYPES, TargetModel, load_transformers
from swiftbatch.worker.forward.tile_packing import needs_whole_tiles
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, TILE_ROWS
from swiftbatch.worker.kernels.native_library import cpu_flags
from swiftbatch.worker.model.model_files import locate_model

GPU = SimpleNamespace(name="NVIDIA H100 80GB HBM3", num_multiprocessors=132)
VERSION_FILE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan  9 2025\nGCC version: 12.2.0\n"


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> dict[str, TargetModel]:
    files, cpu = locate_model(str(tiny_model)), torch.device("cpu")
    return {name: TargetModel(load_transformers(files, dtype, cpu), files) for name, dtype in DTYPES.items()}


def test_off_the_cpu_every_forward_has_the_same_number_of_rows_in_any_dtype() -> None:
    assert not needs_whole_tiles("cpu", torch.bfloat16)
    assert needs_whole_tiles("cpu", torch.bfloat16, num_columns=32)
    assert needs_whole_tiles("cpu", torch.float32)
    assert all(needs_whole_tiles("cuda", dtype) for dtype in (torch.bfloat16, torch.float32))


def test_the_host_s_cpu_decides_nothing_about_rows_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        assert torch_attention.attention_kernel("cuda", torch.bfloat16) == "attention by definition"
        assert torch_attention.query_row_quantum("cuda", torch.bfloat16, group=3) == 3 * TILE_ROWS


@pytest.fixture
def no_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's kernel raises, as with AMX and without AVX-512."""

    def refuse(*_: object) -> None:
        raise RuntimeError("pack_vnni2 is only supported when avx512 is supported")

    for module in (transformers_attention, torch_attention):
        monkeypatch.setattr(module, "flash_attention", refuse)
    torch_attention.attention_kernel.cache_clear()
    yield
    torch_attention.attention_kernel.cache_clear()
    torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.usefixtures("no_flash_kernel")
def test_where_the_flash_kernel_raises_attention_by_definition_is_row_exact(
    tiny: dict[str, TargetModel], dtype: str
) -> None:
    target = tiny[dtype]
    assert target.forwards.numerics.endswith(", attention by definition")
    assert probe_rows(target, num_rows=120, seed=2).num_differing == 0


class EventOfAGPU:
    """Completes when the device gets there, and records queries."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def record(self) -> None:
        self._calls.append("record")

    def synchronize(self) -> None:
        self._calls.append("wait for it")

    def elapsed_time(self, end: EventOfAGPU) -> float:
        assert end is not self
        return 1500.0  # milliseconds


def test_steps_are_timed_by_the_device_and_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: calls.append("wait for all"))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: EventOfAGPU(calls))
    target = SimpleNamespace(device=torch.device("cuda"))
    assert step_costs.seconds_of(target, lambda: calls.append("verify")) == 1.5  # type: ignore[arg-type]
    assert calls == ["wait for all", "record", "verify", "record", "wait for it"]


def test_large_caches_are_timed_at_all_lengths_in_the_memory_of_one_layer(
    tiny: dict[str, TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny["float32"]
    layer_bytes = target.cache_shape.bytes_per_position() // target.cache_shape.num_layers
    monkeypatch.setattr(step_costs, "PROBE_LENGTHS", (64, 1024, 49_152))
    monkeypatch.setattr(step_costs, "PROBE_BYTES", layer_bytes * (1024 + TILE_ROWS))
    monkeypatch.setattr(target, "new_cache", lambda _length: pytest.fail("too large"))
    costs = measure_step_costs(target)
    assert (costs.lengths, PROBE_LENGTHS[0]) == ((64, 1024), 64)
    assert (costs.seconds > 0).all()


def test_where_forwards_are_slow_two_lengths_are_timed_and_longer_ones_follow_from_them(
    tiny: dict[str, TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_costs, "PROBE_LENGTHS", (64, 512, 1024))
    monkeypatch.setattr(step_costs, "MOST_SECONDS", 0.0)
    monkeypatch.setattr(step_costs, "seconds_of", lambda *_: 0.5)
    costs = measure_step_costs(tiny["float32"])
    assert (costs.lengths, costs.at(4, 1024)) == ((64, 512), 0.5)


def test_where_the_memory_is_short_costs_are_timed_in_the_memory_of_one_layer(
    tiny: dict[str, TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny["float32"]
    monkeypatch.setattr(step_costs, "PROBE_LENGTHS", (64, 1024))
    monkeypatch.setattr(TargetModel, "num_free_positions", lambda _target: 100)
    monkeypatch.setattr(target, "new_cache", lambda _length: pytest.fail("too large"))
    assert (measure_step_costs(target).seconds > 0).all()


def test_a_verdict_belongs_to_the_gpu_s_name_and_size_its_driver_and_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "driver_version", lambda: "570.86.15")
    monkeypatch.setattr(hardware, "cublas_version", lambda: "12.8.4.1")
    keys = set()
    for gpu in (GPU, SimpleNamespace(name=GPU.name, num_multiprocessors=114)):
        monkeypatch.setattr(hardware, "own_gpu", lambda gpu=gpu: gpu)
        found = hardware.hardware_of.__wrapped__("cuda")
        assert found == f"{GPU.name} with {gpu.num_multiprocessors} SMs, driver 570.86.15, cuBLAS 12.8.4.1"
        keys.add(verdict_key("f", "bfloat16", "cuda", 1, found, "2.13.0", ""))
    assert len(keys) == 2


def test_torch_s_words_for_this_machine_are_known_without_torch() -> None:
    assert hardware.cpu_capability() == torch.backends.cpu.get_cpu_capability()
    assert ("avx512_bf16" in hardware.hardware_of("cpu")) == torch.cpu._is_avx512_bf16_supported()
    assert (" amx" in hardware.hardware_of("cpu")) == torch.cpu._is_amx_tile_supported()
    assert hardware.has_cuda() == torch.cuda.is_available()


def test_what_a_shell_says_of_torch_s_instructions_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert hardware.cpu_capability() == torch.backends.cpu.get_cpu_capability()


def test_what_a_shell_says_to_torch_s_libraries_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hardware.LIBRARY_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    found = {hardware.hardware_of.__wrapped__("cpu")}
    for name, value in {"ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}.items():
        monkeypatch.setenv(name, value)
        found.add(words := hardware.hardware_of.__wrapped__("cpu"))
        assert f"{name}={value}" in words.split()
    assert len(found) == 4


def test_products_have_another_name_where_one_dnn_takes_other_instructions() -> None:
    """The library checks once per process."""
    code = "import torch; from swiftbatch.worker.forward.hardware import torch_gemms as name"
    command = [sys.executable, "-c", f"{code}; torch.set_num_threads({torch.get_num_threads()}); print(name())"]
    found = []
    for settings in ({}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}):
        ran = subprocess.run(command, env=environment_of_code() | settings, capture_output=True, text=True, check=True)
        found.append(ran.stdout.strip())
    assert found[0] == hardware.torch_gemms()
    assert (found[1] != found[0]) == ("avx512_bf16" in cpu_flags())


def test_the_driver_s_version_is_read_where_the_kernel_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").write_text(VERSION_FILE, encoding="utf-8")
    for name, version in (("version", "570.86.15"), ("absent", "unknown")):
        monkeypatch.setattr(hardware, "DRIVER", tmp_path / name)
        assert hardware.driver_version() == version


def test_costs_are_measured_at_the_longest_length_too(tiny: dict[str, TargetModel]) -> None:
    """At one length alone, attention would seem free for any length."""
    target = tiny["float32"]
    longest = (target.files.max_positions - TILE_ROWS) // BLOCK * BLOCK
    assert BLOCK < longest < PROBE_LENGTHS[1]
    assert measure_step_costs(target).lengths == (BLOCK, longest)
