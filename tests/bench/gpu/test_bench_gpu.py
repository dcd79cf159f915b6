"""The benchmark of a GPU: every stage runs, in the interpreter, and its figures are what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from bench.gpu import gpu_steps
from bench.gpu.gpu import run_gpu_bench
from bench.gpu.gpu_figures import GPUBenchOptions, GPUBenchResult, GPUResumeRecord, GPUStepRecord, render
from bench.gpu.gpu_steps import Stopwatch, read_records, resume_record, step_bytes, step_records
from bench.gpu.measuring import fitting_lengths, measured
from bench.sizing import MODELS
from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.bench_texts import BenchError
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.forward import step_costs
from swiftbatch.worker.kernels import gpu_kernel_choice
from swiftbatch.worker.kernels.cuda.gemm import LINEAR_KERNELS
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory
from swiftbatch.worker.model.model_files import locate_model
from tests import ROOT
from tests.bench.bench_parts import words
from tests.worker.exactness.gpu_doctor.small_parts import SMALL, row_by_row

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


@pytest.fixture
def parts(one_layer_model: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setitem(LINEAR_KERNELS, "triton", row_by_row)
    made = Parts.of(locate_model(str(one_layer_model)), "float32", CPU, CudaKernels(linear="triton"))
    made.extent = SMALL
    return made


def options(model: Path, **changes: object) -> GPUBenchOptions:
    fields = {"model": str(model), "dtype": "float32", "engines": ("autoregressive",), "lengths": (9, 3)}
    counts = {"slot_counts": (1,), "row_counts": (2,), "num_read": 2, "num_tokens": 5}
    return GPUBenchOptions.model_validate(fields | counts | changes)


STAGES = {  # by the first word of a line that is said: what the file holds then, where a run may be cut off
    "loading": set(),
    "steps": {"bytes_per_second"},
    "prompts": {"bytes_per_second", "steps"},
    "text": {"bytes_per_second", "steps", "reads", "resume"},
    "position": {"bytes_per_second", "steps", "reads", "resume", "engines"},
}


def test_all_of_it_comes_out_as_tables_and_json_stage_by_stage(
    parts: Parts, one_layer_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_costs, "seconds_of", lambda target, forward: 0.001)
    text = tmp_path / "text.txt"
    text.write_text("the lazy fox jumps over the quick brown dog")
    file, found = tmp_path / "gpu.json", dict[str, dict[str, object]]()

    def look(line: str) -> None:
        """Look at what the file holds; of two positions, when the second one's turn has come."""
        found[line.split()[0].strip(",")] = json.loads(file.read_text()) if file.exists() else {}

    changes = {"text": text, "json_path": file, "lengths": (3, 4), "draft_model": tmp_path}
    given = options(one_layer_model, engines=("autoregressive", "griffin"), **changes)
    result = measured(parts, given, look)
    assert [(step.length, step.num_slots, step.num_rows) for step in result.steps] == [(3, 1, 2), (4, 1, 2)]
    assert [read.start for read in result.reads] == [0, 4]
    assert result.resume.same_bits
    engines = [(record.engine, record.position, record.num_tokens) for record in result.engines]
    assert engines == [("autoregressive", 3, 5), ("autoregressive", 4, 5)]
    assert len(result.left_out) == 1
    assert "griffin" in result.left_out[0]
    assert list(result.memory) == ["weights, at most", "steps, at most", "engines, at most"]
    written = json.loads(file.read_text())
    for stage, names in STAGES.items():
        assert found[stage].keys() - {"machine", "settings", "memory"} == names, stage
        assert all(found[stage][name] == written[name] for name in names - {"engines"}), stage
    assert found["position"]["engines"] == written["engines"][:1]
    settings, machine = written.pop("settings"), written.pop("machine")
    assert settings["lengths"] == [3, 4]
    assert "3 splits, triton" in machine["numerics"]
    assert machine["triton"] == result.machine["triton"], "what the GPU is stands there as well"
    assert GPUBenchResult.model_validate(written | {"machine": result.machine}) == result


def test_a_step_is_held_against_what_has_to_be_read(parts: Parts) -> None:
    [step] = step_records(parts, {2: [70]}, [2], bandwidth=1e9)
    shape, weights = parts.cache_shape(), parts.weights
    sizes = parts.sizes
    query, key = sizes.num_heads * sizes.head_dim, 2 * sizes.num_kv_heads * sizes.head_dim
    numbers = sizes.num_layers * (sizes.hidden * (2 * query + key) + 3 * sizes.hidden * sizes.intermediate)
    numbers += weights.head.weight.numel()
    assert step.num_bytes == 4 * numbers + 2 * 70 * shape.bytes_per_position() == step_bytes(parts, 70, 2)
    assert (step.length, step.num_slots, step.num_rows) == (70, 2, 2)
    assert step.roofline_ms == pytest.approx(step.num_bytes / 1e6)
    assert step.roofline_share == step.roofline_ms / step.busy_ms
    assert step.busy_ms > 0
    assert step.host_ms > 0


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
    assert [(read.start, read.num_tokens) for read in found] == [(0, 3), (70, 3)]
    assert all(read.tokens_per_second == 3 / read.seconds for read in found)


def test_a_resumed_cache_with_other_bits_is_told(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_steps, "PIECE", 30)
    resume = resume_record(parts, 70)
    assert resume.same_bits
    assert resume.num_bytes == 70 * parts.cache_shape().bytes_per_position()
    load = FullKVCache.load

    def one_bit_off(self: FullKVCache, kv: object) -> None:
        load(self, kv)  # type: ignore[arg-type]
        self.rows.buffer[0, 0, 0, self.length - 1, 0] += 1

    monkeypatch.setattr(FullKVCache, "load", one_bit_off)
    assert not resume_record(parts, 70).same_bits


def test_lengths_that_have_no_room_are_left_out() -> None:
    sizes, gpu = MODELS["Llama 3.1 8B"], GPUMemory(83_400_000_000, num_splits=54)
    lengths = [1000, 20_000, 50_000, 100_000]
    assert fitting_lengths(sizes, gpu, lengths, 4096, 1) == lengths
    assert fitting_lengths(sizes, gpu, lengths, 4096, 4) == lengths
    assert fitting_lengths(sizes, gpu, lengths, 4096, 8) == lengths[:3]
    assert fitting_lengths(MODELS["Qwen2.5 32B"], gpu, lengths, 4096, 2) == lengths[:2]


def test_a_model_without_room_for_two_caches_is_refused_with_the_numbers(parts: Parts, one_layer_model: Path) -> None:
    with pytest.raises(BenchError, match=r"2 caches of 4,095 \+ 5 positions: the model has 4,096 positions"):
        measured(parts, options(one_layer_model, lengths=(4095,)), lambda line: None)


def test_wrong_options_are_named(one_layer_model: Path) -> None:
    for changes in (
        {"engines": ("warp",)},
        {"slot_counts": (0,)},
        {"row_counts": (65,)},
        {"linear": "mine"},
        {"attention": "mine"},
    ):
        with pytest.raises(ValidationError):
            options(one_layer_model, **changes)


def test_figures_stand_in_their_tables() -> None:
    step = GPUStepRecord(
        length=20_000, num_slots=4, num_rows=16, busy_ms=12.5, host_ms=0.75, num_bytes=10**10, roofline_ms=5.0
    )
    resume = GPUResumeRecord(length=1000, num_bytes=10**9, out_seconds=0.5, in_seconds=0.25, same_bits=False)
    result = GPUBenchResult(
        machine={"device": "NVIDIA Test"}, bytes_per_second=2e12, steps=[step], reads=[], resume=resume, engines=[],
        left_out=["engine griffin: no file"], memory={"weights, at most": 16 * 10**9},
    )  # fmt: skip
    lines = words(render(result))
    assert ["Steps", "on", "NVIDIA", "Test,", "which", "reads", "2,000.0", "GB/s"] in lines
    assert ["20,000", "4", "16", "12.50", "0.75", "10.00", "5.00", "40%"] in lines
    assert ["1,000", "1.00", "0.50", "2.00", "0.25", "4.00", "NO"] in lines
    assert ["weights,", "at", "most", "16.00"] in lines


def test_kernels_are_measured_that_were_asked_for(one_layer_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processors = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    monkeypatch.setattr("bench.gpu.measuring.measured", lambda parts, *args: parts.kernels)
    assert run_gpu_bench(options(one_layer_model, linear="triton")) == CudaKernels(linear="triton")  # type: ignore[comparison-overlap]
    monkeypatch.setattr(gpu_kernel_choice, "flash_version", lambda: "2.8.3")
    with pytest.raises(ModelError, match="--attention flash: found dtype float32"):
        run_gpu_bench(options(one_layer_model, attention="flash"))


def test_a_machine_without_a_gpu_is_refused_in_one_line_also_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None; sys.argv = ['bench', 'gpu']; from bench.commands import main; main()"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    said = f"no CUDA device is visible to torch {torch.__version__}; `python -m bench kernels` measures CPUs"
    assert (ran.returncode, ran.stderr) == (2, f"swiftbatch: no GPU to measure: {said}\n")
