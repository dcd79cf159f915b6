from __future__ import annotations

import importlib.metadata

import pytest
import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.forward.cuda import cuda_loading
from swiftbatch.worker.forward.target_model import TargetModel, load_forwards
from swiftbatch.worker.kernels import gpu_kernel_choice
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.model.model_files import ModelFiles
from tests.worker.kernels.cuda import flash_stub

FLASH = CudaKernels(attention="flash")
CPU = torch.device("cpu")


def test_what_is_not_at_its_default_is_named_by_its_options() -> None:
    assert CudaKernels().options == ""
    assert CudaKernels("flash", "triton").options == "--attention flash --linear triton"
    assert EngineConfig(linear="triton").cuda_kernels == CudaKernels(linear="triton")


def test_a_verdict_is_known_under_the_versions_of_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"flash-attn": "2.8.3.post2", "triton": "3.6.0"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    assert CudaKernels().words == "triton prefixes, cublas products, triton 3.6.0"
    assert CudaKernels("flash", "triton").words == "flash 2.8.3.post2 prefixes, triton products, triton 3.6.0"


def test_without_triton_verdicts_are_those_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert FLASH.words == "flash absent prefixes, cublas products, triton absent"


def test_without_flash_attn_it_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernel_choice, "flash_version", lambda: None)
    with pytest.raises(ModelError, match=r"^--attention flash: flash-attn is not installed here; "):
        FLASH.refuse_absent()
    CudaKernels().refuse_absent()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "words"),
    [
        ("float32", 128, "found dtype float32, expected bfloat16; or use --attention triton"),
        ("bfloat16", 320, "found heads of 320 dimensions, expected a multiple of 8 up to 256; use --attention triton"),
        ("bfloat16", 68, "found heads of 68 dimensions"),
    ],
)
def test_what_flash_attn_does_not_take_is_refused(dtype: str, head_dim: int, words: str) -> None:
    with pytest.raises(ModelError, match=f"^--attention flash: {words}"):
        FLASH.refuse_unfit(dtype, head_dim)
    CudaKernels().refuse_unfit(dtype, head_dim)
    FLASH.refuse_unfit("bfloat16", 256)


@pytest.mark.parametrize(("kernels", "named"), [(FLASH, "--attention flash"), (CudaKernels(linear="triton"), "--lin")])
def test_a_cpu_refuses_a_choice_that_nothing_there_takes(
    embedded_files: ModelFiles, kernels: CudaKernels, named: str
) -> None:
    with pytest.raises(ModelError, match=f"^{named}.*: a choice of .* on a GPU, but the device is a CPU"):
        TargetModel.load(embedded_files, "float32", "cpu", kernels=kernels)


def test_rows_of_8_bits_are_refused_on_a_gpu(embedded_files: ModelFiles) -> None:
    kernels = CudaKernels(linear="int8")
    kernels.refuse_unused("the device is a CPU")
    with pytest.raises(ModelError, match=r"^--linear int8: .*, but the device is a GPU; leave it away$"):
        load_forwards(embedded_files, torch.float32, torch.device("cuda"), None, kernels)


def test_a_model_that_the_kernels_do_not_know_is_refused_with_a_choice(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_loading, "load_cuda_forwards", lambda *args, **_: None)
    with pytest.raises(ModelError, match=r"^--attention flash: .* but they do not know the model embedded; leave it"):
        load_forwards(embedded_files, torch.float32, CPU, SlotsWanted(9), FLASH)
    load_forwards(embedded_files, torch.float32, CPU, SlotsWanted(9))
    with pytest.raises(ModelError, match=r"^--gpus-per-worker 2: .*, but they do not know the model embedded; leave"):
        load_forwards(embedded_files, torch.float32, CPU, SlotsWanted(9), num_ranks=2)
    with pytest.raises(ModelError, match=r"^--gpus-per-worker 2: .*, but the device is a CPU; leave it away"):
        TargetModel.load(embedded_files, "float32", "cpu", num_ranks=2)


def test_a_gpu_is_asked_for_nothing_before_a_choice_is_refused(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_stub.install(monkeypatch)
    with pytest.raises(ModelError, match="found dtype float32"):
        cuda_loading.load_cuda_forwards(embedded_files, torch.float32, CPU, SlotsWanted(9), frozenset(), FLASH)
