"""A run has as few GPUs for each worker as hold its model and its longest job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftbatch.scheduler.runs import gpu_sharing
from swiftbatch.scheduler.runs.gpu_sharing import gpus_per_worker
from swiftbatch.scheduler.runs.run_manifest import kept_or_new_manifest, with_linear
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.worker.model.decoder_config import kernel_config
from swiftbatch.worker.model.model_files import locate_model
from tests.scheduler.runs.test_fixed_settings import CLUSTER, LLAMA, jobs_of
from tests.worker.model.test_rank_faults import LLAMA as CONFIG_OF_70B

OF_70B = replace(LLAMA, num_parameters=70_600_000_000, num_on_every_gpu=0)  # with the caches of 8B
SAID = {"device": "cuda", "linear": "triton"}


@pytest.fixture(autouse=True)
def _large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the embedded model pass for a large one."""
    monkeypatch.setattr(gpu_sharing, "read_sizes", lambda *_: OF_70B)
    monkeypatch.setattr(gpu_sharing, "kernel_config", lambda _: kernel_config(CONFIG_OF_70B))


def chosen(folder: Path, length: int, settings: Settings = CLUSTER, **said: Any) -> int:
    manifest = kept_or_new_manifest(str(folder / "run"), replace(settings, said=SAID | said))
    return gpus_per_worker(manifest, length, settings)


def test_the_fewest_gpus_hold_the_model_and_the_longest_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [chosen(tmp_path, length) for length in (8_192, 32_768, 250_000)] == [2, 2, 4]
    assert chosen(tmp_path, 10**8) == 1, "not even eight: the worker says what is missing"
    monkeypatch.setattr(gpu_sharing, "read_sizes", lambda *_: LLAMA)
    assert chosen(tmp_path, 8_192) == 1


def test_a_machine_s_own_gpus_bound_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(CLUSTER, address=None)

    def with_gpus(*free_bytes: int) -> int:
        monkeypatch.setattr(gpu_sharing, "own_gpus", lambda: [SimpleNamespace(free_bytes=each) for each in free_bytes])
        return chosen(tmp_path, 8_192, here)

    assert with_gpus(*[80 * 10**9] * 8) == 2
    assert with_gpus(80 * 10**9, 60 * 10**9, 80 * 10**9, 80 * 10**9) == 4, "the fullest of them counts"
    assert with_gpus(200 * 10**9) == 1
    assert with_gpus(80 * 10**9) == 1, "more are not here, and the worker says what is missing"


@pytest.mark.parametrize(
    "said",
    [
        {"device": "cpu"},
        {"linear": "cublas"},
        {"attention": "flash"},
        {"engine": "triforce"},
        {"lora": ("one=folder",)},
        {"device": "auto"},
    ],
    ids=lambda said: "-".join(said),
)
def test_what_gpus_cannot_share_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]) -> None:
    monkeypatch.setattr("swiftbatch.scheduler.runs.run_manifest.refuse_kernels", lambda *_: None)
    manifest = kept_or_new_manifest(str(tmp_path / "run"), CLUSTER)
    manifest = manifest.model_copy(update=SAID | said)
    assert gpus_per_worker(manifest, 8_192, CLUSTER) == 1
    assert gpus_per_worker(manifest, 8_192, replace(CLUSTER, num_gpus_per_worker=4)) == 4, "as asked"


def test_a_new_run_that_gpus_will_share_multiplies_in_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, new = locate_model("embedded"), kept_or_new_manifest(str(tmp_path / "run"), CLUSTER)
    assert with_linear(new, files, jobs_of(2, 8_192), CLUSTER).linear == "triton"
    assert with_linear(new, files, jobs_of(2, 8_192), replace(CLUSTER, said={"linear": "cublas"})).linear == "cublas"
    monkeypatch.setattr(gpu_sharing, "read_sizes", lambda *_: LLAMA)
    assert with_linear(new, files, jobs_of(2, 8_192), CLUSTER).linear == "cublas"
