from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.job_index import JobIndex
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Exactness, RunError
from swiftbatch.scheduler.runs import run_manifest as manifests
from swiftbatch.scheduler.runs.run_manifest import (
    computation_of,
    kept_or_new_manifest,
    with_linear,
    with_model,
    with_rows,
)
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.worker.config import Computation
from swiftbatch.worker.exactness.doctor import diagnose
from swiftbatch.worker.exactness.doctor_verdicts import keep_verdict, verdict_key
from swiftbatch.worker.forward.hardware import hardware_of, has_cuda
from swiftbatch.worker.kernels import gpu_kernel_choice
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.native_library import OVERRIDE, chosen_numerics
from swiftbatch.worker.model.model_files import locate_model
from tests import ROOT
from tests.jobs.run.run_parts import failed_line
from tests.worker.kernels.kernel_parts import VARIANTS, needs_kernels
from tests.worker.kv.memory.test_plan import LLAMA

PROGRAM = """
import sys
from swiftbatch.scheduler.runs.run_manifest import kept_or_new_manifest, with_model
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.worker.model.model_files import locate_model

manifest = kept_or_new_manifest(sys.argv[1] + "/absent", Settings(said={"device": "auto"}))
print(with_model(manifest, locate_model("embedded")).device, "torch" in sys.modules)
"""


@pytest.mark.skipif(has_cuda(), reason="a machine with a GPU needs torch to tell")
def test_a_new_run_is_described_without_torch(tmp_path: Path) -> None:
    """Without torch `submit` starts seconds sooner."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "cpu False\n"


def test_what_log_probabilities_are_of_belongs_to_the_run(tmp_path: Path) -> None:
    uri, mode = str(tmp_path / "run"), "processed_logprobs"
    Run.planned(uri, kept_or_new_manifest(uri, Settings(said={"logprobs_mode": mode}))).made()
    kept = kept_or_new_manifest(uri, Settings())
    assert (kept.logprobs_mode, computation_of(kept, Settings()).logprobs_mode) == (mode, mode)
    with pytest.raises(RunError, match=r"was made with logprobs_mode processed_logprobs, found raw_logprobs"):
        kept_or_new_manifest(uri, Settings(said={"logprobs_mode": "raw_logprobs"}))


def test_a_team_belongs_to_the_run_and_to_no_fingerprint(tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    manifest = kept_or_new_manifest(uri, Settings(team="red"))
    Run.planned(uri, manifest).made()
    assert kept_or_new_manifest(uri, Settings()).team == kept_or_new_manifest(uri, Settings(team="red")).team == "red"
    assert manifest.fingerprint == manifest.model_copy(update={"team": None}).fingerprint
    with pytest.raises(RunError, match=r"was made with team red, found blue; leave the option away"):
        kept_or_new_manifest(uri, Settings(team="blue"))


@pytest.mark.parametrize("name", ["lenient_schemas", "plain_content"])
def test_a_switch_that_decides_tokens_belongs_to_the_run_and_to_its_fingerprint(tmp_path: Path, name: str) -> None:
    without, switched = str(tmp_path / "without"), str(tmp_path / "switched")
    manifest = kept_or_new_manifest(switched, Settings(said={name: True}))
    Run.planned(switched, manifest).made()
    Run.planned(without, manifest.model_copy(update={name: False})).made()
    kept = kept_or_new_manifest(switched, Settings())
    assert getattr(kept, name) is getattr(computation_of(kept, Settings()), name) is True
    assert kept.fingerprint != kept_or_new_manifest(without, Settings()).fingerprint
    with pytest.raises(RunError, match=rf"was made without {name}, found True; leave the option away"):
        kept_or_new_manifest(without, Settings(said={name: True}))


def test_keys_and_values_in_8_bits_belong_to_the_run(tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    run = Run.planned(uri, kept_or_new_manifest(uri, Settings(said={"kv_dtype": "int8", "device": "cpu"}))).made()
    run.write_error("j1", failed_line("broken"))
    kept = kept_or_new_manifest(uri, Settings())
    assert (kept.kv_dtype, computation_of(kept, Settings()).kv_dtype) == ("int8", "int8")
    with pytest.raises(RunError, match=r"was made with kv_dtype int8, found fp8"):
        kept_or_new_manifest(uri, Settings(said={"kv_dtype": "fp8"}))


def test_keys_and_values_in_8_bits_are_refused_for_flash_attn_before_there_is_a_run(tmp_path: Path) -> None:
    settings = Settings(said={"kv_dtype": "fp8", "device": "cuda", "attention": "flash"}, address="ray://somewhere:1")
    with pytest.raises(ModelError, match=r"--kv-dtype fp8: flash-attn .*; use --attention triton, or leave it away"):
        kept_or_new_manifest(str(tmp_path / "run"), settings)


CLUSTER = Settings(said={"device": "cuda"}, address="head:6379")


def jobs_of(number: int, length: int) -> JobIndex:
    columns = {"num_prompt_tokens": np.full(number, length // 2), "max_tokens": np.full(number, length)}
    return JobIndex(columns, np.arange(number))


def test_a_new_run_has_the_rows_that_its_jobs_use_and_goes_on_with_them(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "read_sizes", lambda *_: LLAMA)
    uri, files = str(tmp_path / "run"), locate_model(str(tiny_model))
    new = kept_or_new_manifest(uri, replace(CLUSTER, said={"device": "cuda", "model": str(tiny_model)}))
    found = [
        with_rows(new, files, jobs_of(number, 6000), settings).num_rows
        for number, settings in (
            (200, CLUSTER),
            (5, CLUSTER),
            (200, replace(CLUSTER, num_workers=40)),
            (200, replace(CLUSTER, num_slots=8)),
        )
    ]
    assert found == [128, 64, 64, 64]  # 128, because a cluster's GPUs are unknown here
    monkeypatch.setattr(manifests, "own_gpu", lambda: SimpleNamespace(capability=(9, 0), free_bytes=80 * 10**9))
    wide = with_rows(new, files, jobs_of(200, 6000), replace(CLUSTER, address=None))
    assert wide.num_rows == 256
    Run.planned(uri, wide).made().write_error("j1", failed_line("broken"))
    assert computation_of(kept_or_new_manifest(uri, CLUSTER), CLUSTER).cuda_kernels.num_rows == 256
    asked = replace(CLUSTER, said={"num_rows": 128})
    with pytest.raises(RunError, match=r"was made with num_rows 256, found 128; leave the option away"):
        kept_or_new_manifest(uri, asked)
    assert with_rows(new.model_copy(update={"num_rows": 128}), files, jobs_of(5, 100), asked).num_rows == 128


def test_gpus_share_the_products_of_a_new_run_and_go_on_with_those_of_another(tmp_path: Path) -> None:
    """The number of GPUs is no setting of the run, so that its tokens are the same on any."""
    uri, shared, files = str(tmp_path / "run"), replace(CLUSTER, num_gpus_per_worker=4), locate_model("embedded")
    new = kept_or_new_manifest(uri, shared)
    of_cublas = replace(shared, said={"linear": "cublas", **CLUSTER.said})
    found = [with_linear(new, files, jobs_of(2, 100), each).linear for each in (shared, CLUSTER, of_cublas)]
    assert found == ["triton", "cublas", "cublas"]
    Run.planned(uri, new).made().write_error("j1", failed_line("broken"))
    assert kept_or_new_manifest(uri, CLUSTER) == kept_or_new_manifest(uri, shared) == Run.open(uri).manifest
    assert "gpus" not in (tmp_path / "run" / "run.json").read_text()


def test_on_a_cpu_forwards_have_the_rows_that_they_need(tmp_path: Path) -> None:
    said = {"device": "cpu"}
    manifest = kept_or_new_manifest(str(tmp_path / "run"), Settings(said=said))
    assert with_rows(manifest, locate_model("embedded"), jobs_of(200, 100), Settings(said=said)).num_rows == 64
    with pytest.raises(ModelError, match="--rows 128: a choice of kernels on a GPU, but the device is a CPU; leave it"):
        kept_or_new_manifest(str(tmp_path / "run"), Settings(said=said | {"num_rows": 128}))


def test_a_verdict_is_known_to_runs_with_the_chosen_kernels_of_a_gpu_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = locate_model(str(tiny_model))
    said = {"model": str(tiny_model), "device": "cuda", "num_threads": 1}

    def exactness(**choice: str) -> Exactness:
        return with_model(kept_or_new_manifest(str(tmp_path / "absent"), Settings(said=said | choice)), files).exactness

    key = verdict_key(
        files.fingerprint, "bfloat16", "cuda", 1, hardware_of("cuda"), importlib.metadata.version("torch"),
        chosen_numerics("cuda", "bfloat16", CudaKernels(linear="triton")),
    )  # fmt: skip
    keep_verdict(key, "exact")
    assert (exactness(linear="triton"), exactness()) == ("exact", "not probed")


def test_a_cluster_s_workers_say_themselves_whether_flash_attn_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernel_choice, "flash_version", lambda: None)
    said = {"device": "cuda", "attention": "flash"}
    settings = Settings(said=said, address="head:6379")
    assert kept_or_new_manifest(str(tmp_path / "absent"), settings).attention == "flash"
    with pytest.raises(ModelError, match="flash-attn is not installed here"):
        kept_or_new_manifest(str(tmp_path / "absent"), Settings(said=said))
    with pytest.raises(ModelError, match="found dtype float32, expected bfloat16"):
        kept_or_new_manifest(str(tmp_path / "absent"), replace(settings, said=said | {"dtype": "float32"}))


@needs_kernels
def test_a_verdict_is_known_to_runs_on_the_same_kernels_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(OVERRIDE, VARIANTS[0])
    said = {"model": str(tiny_model), "device": "cpu", "num_threads": 1}

    def exactness() -> Exactness:
        manifest = kept_or_new_manifest(str(tmp_path / "absent"), Settings(said=said))
        return with_model(manifest, locate_model(str(tiny_model))).exactness

    assert exactness() == "not probed"
    verdict = diagnose(Computation(**said), num_rows=64).verdict
    assert exactness() == verdict
    monkeypatch.setattr("swiftbatch.worker.kernels.native_library.NUMERICS_VERSION", 0)
    assert exactness() == "not probed"
