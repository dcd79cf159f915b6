from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.sizing import MODELS, WINDOWED
from swiftbatch.worker.forward.cuda import cuda_loading as loading
from swiftbatch.worker.forward.cuda.cuda_loading import planned_forwards
from swiftbatch.worker.forward.target_model import TargetModel, load_forwards
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels, triton_version
from swiftbatch.worker.kernels.native_library import NO_KERNELS, OVERRIDE, KernelError, chosen_library
from swiftbatch.worker.kv import kv_capacity
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory, MemoryPlan, SlotsWanted, plan_pages
from swiftbatch.worker.kv.kv_capacity import KVRoomError, held_in_windows
from swiftbatch.worker.kv.model_sizes import ModelSizes, read_sizes
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from tests.worker.kernels.cuda import flash_stub


@pytest.fixture
def files(one_layer_model: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFiles:
    flash_stub.install(monkeypatch)
    return locate_model(str(one_layer_model))


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        (CudaKernels(linear="triton"), "splits of 8 blocks, triton"),
        (CudaKernels("flash", "triton"), "flash 2.8.3 prefixes in splits of 256, triton"),
    ],
)
def test_a_gpu_runs_the_kernels_that_the_run_chose(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, kernels: CudaKernels, words: str
) -> None:
    planned: list[GPUMemory] = []

    def plan(sizes: ModelSizes, gpu: GPUMemory, *_: object) -> MemoryPlan:
        planned.append(gpu)
        return plan_pages(sizes, gpu, 64, 1)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(loading, "CudaLane", lambda device: None)
    monkeypatch.setattr(loading, "Staging", lambda *args: None)
    monkeypatch.setattr(loading, "hold_gemms_steady", lambda: None)
    monkeypatch.setattr(loading, "plan_pages", plan)
    forwards = load_forwards(files, torch.bfloat16, torch.device("cpu"), SlotsWanted(64), kernels)
    assert forwards.numerics.endswith(f", triton {triton_version()}, triton kernels 2, {words}")
    assert ", workspaces :4096:8, " in forwards.numerics
    assert planned[0].attention == kernels.attention


def test_a_gpu_is_refused_without_the_compiled_kernels(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, NO_KERNELS)
    chosen_library.cache_clear()
    with pytest.raises(KernelError, match=r"^device cuda: a GPU's forwards need the kernels in C, and SWIFTBATCH_ISA"):
        load_forwards(files, torch.bfloat16, torch.device("cpu"), SlotsWanted(64))
    chosen_library.cache_clear()


def test_a_model_of_more_heads_than_the_kernels_take_is_left_to_others(one_layer_model: Path, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(one_layer_model)
    config.update({"num_attention_heads": 32, "num_key_value_heads": 1})
    folder = shutil.copytree(one_layer_model, tmp_path / "many-heads")
    LlamaForCausalLM(config).save_pretrained(folder)
    files = locate_model(str(folder))
    sizes = read_sizes(files, "float32")
    assert sizes is not None
    plan = plan_pages(sizes, GPUMemory(10**9), 64, 1)
    assert planned_forwards(files, torch.float32, torch.device("cpu"), plan, frozenset(), None) is None


def test_a_dense_model_has_the_slots_of_its_plan(one_layer_model: Path) -> None:
    files = locate_model(str(one_layer_model))
    sizes = read_sizes(files, "float32")
    assert sizes is not None
    plan = plan_pages(sizes, GPUMemory(10**9), 64, 3)
    forwards = planned_forwards(files, torch.float32, torch.device("cpu"), plan, frozenset(), None)
    assert forwards is not None
    assert forwards.arena.num_slots == 3
    assert forwards.arena.longest_job >= 64


def test_a_gpu_s_caches_are_kept_in_no_folder(one_layer_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftbatch.worker.forward.target_model.resolve_device", lambda _: torch.device("cuda"))
    with pytest.raises(KVRoomError, match=r"^--kv-offload /anywhere: caches of a GPU stay in its memory, .* --kv-dt"):
        TargetModel.load(locate_model(str(one_layer_model)), "float32", "auto", "/anywhere", SlotsWanted(64))


@pytest.mark.parametrize(
    ("free", "found", "seconds"),
    [([98], 98, 0.0), ([10, 40, 70, 90], 90, 2.3), ([50, 45], 45, 2.0), (range(10, 1000), 310, 30.0)],
    ids=["an empty GPU", "one whose worker was killed", "one that another worker fills", "one that never settles"],
)
def test_memory_is_planned_for_once_a_killed_worker_has_given_it_back(
    monkeypatch: pytest.MonkeyPatch, free: Iterable[int], found: int, seconds: float
) -> None:
    left, now, answer = iter(free), [0.0], [0]

    def mem_get_info(device: object) -> tuple[int, int]:
        answer[0] = next(left, answer[0])
        return answer[0], 100 if max(free) <= 100 else 10_000

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(kv_capacity.time, "monotonic", lambda: round(now[0], 1))
    monkeypatch.setattr(kv_capacity.time, "sleep", lambda wait: now.__setitem__(0, now[0] + wait))
    assert kv_capacity.settled_free_bytes(torch.device("cuda")) == found
    assert round(now[0], 1) == seconds


def test_layers_with_a_window_forget_where_nobody_reads_what_they_forget_and_caches_lie_in_pages() -> None:
    sizes = WINDOWED["gpt-oss-20b"]
    wanted = SlotsWanted(1000, num_unwritten=512)
    assert loading._held(sizes, wanted) == held_in_windows(sizes.windows, 512) is not None
    for other in (SlotsWanted(1000), replace(wanted, partial_budget=64)):
        assert loading._held(sizes, other) is None
    assert loading._held(MODELS["Llama 3.1 8B"], wanted) is None
