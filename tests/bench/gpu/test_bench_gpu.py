from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import steps
from bench.gpu.gpu import run
from bench.gpu.steps import Stopwatch, fitting_lengths, measured, read_records, resume_record, step_bytes, step_records
from bench.options import GPUOptions as Options
from bench.sizing import MODELS
from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.forward import step_costs
from swiftbatch.worker.kernels import gpu_kernel_choice
from swiftbatch.worker.kernels.cuda.gemm import LINEAR_KERNELS
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory
from swiftbatch.worker.model.model_files import locate_model
from tests import ROOT
from tests.worker.exactness.gpu_doctor.small_parts import SMALL, row_by_row

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


@pytest.fixture
def parts(one_layer_model: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setitem(LINEAR_KERNELS, "triton", row_by_row)
    made = Parts.of(locate_model(str(one_layer_model)), "float32", CPU, CudaKernels(linear="triton"))
    made.extent = SMALL
    return made


def options(model: Path, **changes: object) -> Options:
    fields = {"model": str(model), "dtype": "float32", "engines": ("autoregressive",), "lengths": (9, 3)}
    counts = {"slots": (1,), "rows": (2,), "num_read": 2, "num_tokens": 5}
    return Options.model_validate(fields | counts | changes)


def test_all_of_it_comes_out_record_by_record(
    parts: Parts, one_layer_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_costs, "seconds_of", lambda target, forward: 0.001)
    text = tmp_path / "text.txt"
    text.write_text("the lazy fox jumps over the quick brown dog")
    changes = {"text": text, "lengths": (3, 4), "draft_model": tmp_path}
    records = list(measured(parts, options(one_layer_model, engines=("autoregressive", "griffin"), **changes)))
    places = [(each["length"], each["num_slots"], each["num_rows"]) for each in records if "num_slots" in each]
    assert places == [(3, 1, 2), (4, 1, 2)]
    assert [each["behind"] for each in records if "behind" in each] == [0, 4]
    [resumed] = [each for each in records if "resumed_length" in each]
    assert resumed["same_bits"]
    engines = [(each["engine"], each["position"], each["same_tokens"]) for each in records if "engine" in each]
    assert engines == [("autoregressive", 3, True), ("autoregressive", 4, True)]
    [left_out] = [each["words"] for each in records if "words" in each]
    assert "griffin" in left_out
    assert [each["memory of"] for each in records if "memory of" in each] == ["weights", "steps", "engines"]


def test_a_step_is_held_against_what_has_to_be_read(parts: Parts) -> None:
    [step] = step_records(parts, {2: [70]}, [2], bandwidth=1e9)
    shape, weights = parts.cache_shape(), parts.weights
    sizes = parts.sizes
    query, key = sizes.num_heads * sizes.head_dim, 2 * sizes.num_kv_heads * sizes.head_dim
    numbers = sizes.num_layers * (sizes.hidden * (2 * query + key) + 3 * sizes.hidden * sizes.intermediate)
    numbers += weights.head.weight.numel()
    num_bytes = 4 * numbers + 2 * 70 * shape.bytes_per_position()
    assert num_bytes == step_bytes(parts, 70, 2)
    assert (step["length"], step["num_slots"], step["num_rows"], step["GB"]) == (70, 2, 2, num_bytes / 1e9)
    assert step["roofline_ms"] == pytest.approx(num_bytes / 1e6)
    assert step["of_roofline"] == pytest.approx(step["roofline_ms"] / step["busy_ms"])
    assert step["host_ms"] > 0


def test_a_stopwatch_takes_the_time_of_replays_alone() -> None:
    class Three:
        def seconds(self, call: object) -> float:
            assert callable(call)
            call()
            return 3.0

    done: list[int] = []
    stopwatch = Stopwatch(Three())
    graph = stopwatch(lambda: done.append(1), CPU)
    assert (stopwatch.seconds, done) == (0.0, [])
    graph.replay()
    assert (stopwatch.seconds, done) == (3.0, [1])


def test_prompts_are_read_behind_each_length(parts: Parts) -> None:
    found = list(read_records(parts, [0, 70], 3))
    assert [(read["behind"], read["num_read"]) for read in found] == [(0, 3), (70, 3)]
    assert all(read["tokens/s"] == 3 / read["seconds"] for read in found)


def test_a_resumed_cache_with_other_bits_is_told(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "PIECE", 30)
    resume = resume_record(parts, 70)
    assert resume["same_bits"]
    assert resume["GB"] == 70 * parts.cache_shape().bytes_per_position() / 1e9
    load = FullKVCache.load

    def one_bit_off(self: FullKVCache, kv: object) -> None:
        load(self, kv)  # type: ignore[arg-type]
        self.rows.buffer[0, 0, 0, self.length - 1, 0] += 1

    monkeypatch.setattr(FullKVCache, "load", one_bit_off)
    assert not resume_record(parts, 70)["same_bits"]


def test_lengths_that_have_no_room_are_left_out() -> None:
    sizes, gpu = MODELS["Llama 3.1 8B"], GPUMemory(83_400_000_000)
    lengths = [1000, 20_000, 50_000, 100_000]
    assert fitting_lengths(sizes, gpu, lengths, 4096, 1) == lengths
    assert fitting_lengths(sizes, gpu, lengths, 4096, 4) == lengths
    assert fitting_lengths(sizes, gpu, lengths, 4096, 8) == lengths[:3]
    assert fitting_lengths(MODELS["Qwen2.5 32B"], gpu, lengths, 4096, 2) == lengths[:2]


def test_a_model_without_room_for_two_caches_is_refused_with_the_numbers(parts: Parts, one_layer_model: Path) -> None:
    with pytest.raises(BenchError, match=r"2 caches of 4,095 \+ 5 positions: the model has 4,096 positions"):
        list(measured(parts, options(one_layer_model, lengths=(4095,))))


def test_kernels_are_measured_that_were_asked_for(one_layer_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processors = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    monkeypatch.setattr(steps, "measured", lambda parts, *args: [parts.kernels])
    assert list(run(options(one_layer_model, linear="triton"))) == [CudaKernels(linear="triton")]  # type: ignore[comparison-overlap]
    monkeypatch.setattr(gpu_kernel_choice, "flash_version", lambda: "2.8.3")
    with pytest.raises(ModelError, match="--attention flash: found dtype float32"):
        list(run(options(one_layer_model, attention="flash")))


def test_a_machine_without_a_gpu_is_refused_in_one_line_also_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None; sys.argv = ['bench', 'gpu']; from bench.__main__ import main; main()"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    said = f"no CUDA device is visible to torch {torch.__version__}; `python -m bench kernels` measures CPUs"
    assert (ran.returncode, ran.stderr) == (2, f"swiftbatch: no GPU to measure: {said}\n")
