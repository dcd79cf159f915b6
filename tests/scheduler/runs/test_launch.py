from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.scheduler.cluster.ray_cluster import Cluster, ClusterError, ClusterLostError
from swiftbatch.scheduler.commands.options.launch_options import make_settings
from swiftbatch.scheduler.display.events import Event, FewGpus, GpusShareModel, SlowOnGpu
from swiftbatch.scheduler.driver.driver import DriverError
from swiftbatch.scheduler.runs import launch
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.worker.config import EngineConfig, NumGPUs
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from tests.jobs.run.run_parts import MANIFEST
from tests.scheduler.commands.command_parts import pretend_to_run
from tests.scheduler.driver.driver_parts import make_run
from tests.worker.fake_gpus import needs_gcc, run_with_gpus
from tests.worker.kv.test_kv_budget import invoke
from tests.worker.model.expert_configs import write_experts
from tests.worker.model.gemma4_configs import GEMMA4
from tests.worker.model.latent_configs import WITH_LATENTS

NEW_RUN = """
import sys
from swiftbatch.jobs.errors import UserError
from swiftbatch.scheduler.runs import launch
from swiftbatch.scheduler.runs.run_settings import Settings

launch.has_cuda = lambda: True  # torch may be a build for CPUs
place, device, num_gpus = sys.argv[1:]
try:
    launch.refuse_start(place, Settings({"device": device}, num_gpus_per_worker=int(num_gpus)))
    print("begins")
except UserError as error:
    print(error)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Has no jobs, so it ends at once without Ray."""
    return make_run(tmp_path / "run", {})


def test_a_run_goes_on_with_its_own_engine_unless_another_one_is_asked_for(run: Run) -> None:
    assert launch._engine_config(run.manifest, 0, Settings()).engine == "autoregressive"
    config = launch._engine_config(run.manifest, 0, Settings({"engine": "suffix"}))
    assert config.engine == "suffix"
    assert (config.model, config.dtype, config.num_threads) == ("counting", "float32", 1)


def test_the_options_reach_the_workers(run: Run) -> None:
    names = {"checkpoint": "tokens", "checkpoint_tokens": 7, "checkpoint_seconds": 0.5, "keep_state": True}
    names["num_gpus_per_worker"] = 4
    settings = make_settings(num_workers=2, num_slots=3, grace_seconds=4.0, store_retry_seconds=9.0, **names)
    assert (settings.num_workers, settings.num_slots) == (2, 3)
    config = launch._engine_config(run.manifest, 0, settings)
    assert (config.grace_seconds, config.store_retry_seconds) == (4.0, 9.0)
    assert {name: getattr(config, name) for name in names} == names


def test_a_store_that_is_away_is_told_within_ten_seconds_and_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    display = SimpleNamespace(note=told.append)
    counted: list[None] = []
    watch = launch.StoreWatch("s3://bucket/run", 120.0, lambda: counted.append(None), display)

    def retry(moment: float) -> int:
        monkeypatch.setattr(launch.time, "monotonic", lambda: moment)
        watch.note_retry()
        return len(told)

    assert [retry(moment) for moment in (0.0, 30.0, 60.0)] == [0, 0, 0]  # single failures
    assert [retry(moment) for moment in (100.0, 101.0, 105.0, 110.0, 150.0, 159.0, 166.0)] == [0, 0, 1, 1, 1, 1, 2]
    assert len(counted) == 10
    assert str(told[0]) == "s3://bucket/run does not answer; trying again for up to 120 s, tokens wait in memory"


def test_a_run_whose_driver_is_silent_goes_on_with_takeover(run: Run) -> None:
    pretend_to_run(run, 100)
    code, text = invoke("resume", run.store.uri)
    assert code == 2
    assert "--takeover" in text
    code, text = invoke("resume", run.store.uri, "--takeover", "--engine", "suffix")
    assert code == 0, text
    assert "run finished" in text
    assert Run.open(run.store.uri).manifest.engine == "autoregressive"  # as the run was made


@pytest.mark.parametrize("error", [StoreError("no answer for 120 s"), ClusterLostError("no head"), DriverError("none")])
def test_what_stops_a_run_is_told_with_how_to_go_on(run: Run, error: Exception) -> None:
    with pytest.raises(DriverError) as caught, launch._told_how_to_go_on(run):
        raise error
    assert str(caught.value) == f"{error}; nothing is lost, go on with: swiftbatch resume {run.store.shown_uri}"


def test_an_interruption_before_the_driver_is_at_work_tells_how_to_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "load_queue", interrupted)
    code, text = invoke("resume", run.store.uri)
    assert code == 130
    hint = f"interrupted; nothing is lost, go on with: swiftbatch resume {run.store.shown_uri}"
    assert hint in text.splitlines()


def test_a_model_that_no_kernels_compute_on_a_gpu_is_told_of_before_workers_start(tmp_path: Path) -> None:
    sizes = {"max_position_embeddings": 1024, "vocab_size": 97, "num_experts": 4, "expert_shift": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **sizes}))
    told = launch.slow_on_gpu(str(tmp_path), num_gpus_per_worker=1)
    assert str(told) == (
        "the model runs through the layers of transformers on a GPU, which is slow: its hidden_act is left to a "
        "default; "
        "`swiftbatch inspect` shows it beforehand"
    )
    assert launch.slow_on_gpu("embedded", num_gpus_per_worker=1) is None
    refusal = r"^--gpus-per-worker 2: GPUs share a model in our kernels for CUDA alone, but they do not know the model "
    with pytest.raises(ModelError, match=refusal + r".*: its hidden_act is left to a default; leave it away$"):
        launch.slow_on_gpu(str(tmp_path), num_gpus_per_worker=2)


def test_a_model_that_does_not_run_on_a_gpu_is_refused_before_workers_start(tmp_path: Path) -> None:
    config = GEMMA4["Gemma 4 31B"] | {"global_head_dim": 192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"heads that our kernels for GPUs do not know: .*; use --device cpu"):
        launch.slow_on_gpu(str(tmp_path), num_gpus_per_worker=1)
    config = {"model_type": "glm_moe_dsa", "max_position_embeddings": 1024, "vocab_size": 97}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"it does not run on a GPU: its \w+ is left to a default\Z"):
        launch.slow_on_gpu(str(tmp_path), num_gpus_per_worker=1)


def test_caches_that_a_model_cannot_have_are_refused_before_workers_start(run: Run, tmp_path: Path) -> None:
    write_experts(WITH_LATENTS["GLM 4.7 Flash"], tmp_path)
    manifest = run.manifest.model_copy(update={"model": str(tmp_path)})
    launch._engine_config(manifest, 0, Settings())
    with pytest.raises(ModelError, match=r"\A--kv-dtype int8: caches of .* hold a latent vector per position"):
        launch._engine_config(manifest.model_copy(update={"kv_dtype": "int8"}), 0, Settings())


@pytest.mark.parametrize(("num_gpus", "expected"), [(1, [SlowOnGpu]), (0, [])])
def test_it_is_told_in_the_run_unless_it_is_on_cpus(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_gpus: int, expected: list[type]
) -> None:
    """The driver ends at once, because there may be no GPU."""
    sizes = {"max_position_embeddings": 1024, "vocab_size": 97}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **sizes}))
    told = events_of_a_drive(run, monkeypatch, str(tmp_path), Cluster(False, num_gpus, watch=None), Settings())
    assert [type(each) for each in told] == expected


def test_memory_that_was_asked_for_holds_so_many_positions_and_is_no_question_on_a_gpu() -> None:
    """0.02 GB, of which a position of the embedded model takes 4,096 bytes."""
    on_cpus, on_a_gpu = (Cluster(True, num_gpus=number, watch=None) for number in (0, 1))
    assert launch._most_positions(MANIFEST, Settings(kv_memory=0.02), on_cpus) == 4882
    assert launch._most_positions(MANIFEST, Settings(), on_cpus) is None
    with pytest.raises(KVRoomError, match=r"^--kv-memory 1: found workers on GPUs"):
        launch._most_positions(MANIFEST.model_copy(update={"device": "cuda"}), Settings(kv_memory=1), on_a_gpu)


@pytest.mark.parametrize(
    ("num_workers", "num_each", "is_told"), [(8, 1, False), (9, 1, True), (4, 2, False), (5, 2, True)]
)
def test_more_workers_than_gpus_are_told_of(
    run: Run, monkeypatch: pytest.MonkeyPatch, num_workers: int, num_each: NumGPUs, is_told: bool
) -> None:
    cluster, settings = (
        Cluster(True, num_gpus=8, watch=None),
        Settings({"linear": "triton"}, num_workers=num_workers, num_gpus_per_worker=num_each),
    )
    told = events_of_a_drive(run, monkeypatch, "embedded", cluster, settings)
    assert told == ([FewGpus(num_workers, 8, num_each)] if is_told else [])


def test_gpus_that_nobody_asked_for_are_told_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, parts = Cluster(True, num_gpus=8, watch=None), {"num_gpus_per_worker": 2, "linear": "triton"}
    told = events_of_a_drive(run, monkeypatch, "embedded", cluster, Settings(), **parts)
    assert told == [GpusShareModel(2)]


def test_a_worker_s_gpus_are_more_than_a_machine_has_or_a_cpu_and_nothing_starts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings({"linear": "triton"}, num_gpus_per_worker=2)
    with pytest.raises(ClusterError, match=r"^--gpus-per-worker 2: this machine has 1; use fewer, or --address of a"):
        events_of_a_drive(run, monkeypatch, "embedded", Cluster(True, num_gpus=1, watch=None), settings)
    on_cpus = r"^--gpus-per-worker 2: .*, but the device is a CPU; leave it away$"
    with pytest.raises(ModelError, match=on_cpus):
        events_of_a_drive(run, monkeypatch, "embedded", Cluster(False, num_gpus=0, watch=None), settings)
    cluster = Cluster(False, num_gpus=1, watch=None)  # which may get more
    assert events_of_a_drive(run, monkeypatch, "embedded", cluster, settings) == []


def test_what_gpus_cannot_share_is_refused_before_workers_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(True, num_gpus=8, watch=None)
    with pytest.raises(ModelError, match=r"^--gpus-per-worker 2: this run multiplies with cuBLAS, .* --linear triton$"):
        events_of_a_drive(run, monkeypatch, "embedded", cluster, Settings(num_gpus_per_worker=2))
    in_triton = Settings({"linear": "triton"}, num_gpus_per_worker=8)
    with pytest.raises(ModelError, match=r"^--gpus-per-worker 8: the GPUs cannot share the model embedded: it has 4 h"):
        events_of_a_drive(run, monkeypatch, "embedded", cluster, in_triton)


@needs_gcc
@pytest.mark.parametrize(
    ("device", "num_each", "said"),
    [
        ("auto", 2, "begins"),
        ("auto", 4, "--gpus-per-worker 4: this machine has 2; use fewer, or --address of a cluster"),
        (
            "cpu",
            2,
            "--gpus-per-worker 2: GPUs share a model in our kernels for CUDA alone, but the device is a CPU; leave it "
            "away",
        ),
    ],
)
def test_a_new_run_is_refused_before_its_model_is_read(tmp_path: Path, device: str, num_each: int, said: str) -> None:
    assert run_with_gpus(tmp_path, NEW_RUN, str(tmp_path / "run"), device, str(num_each), num_gpus=2) == f"{said}\n"


def events_of_a_drive(
    run: Run, monkeypatch: pytest.MonkeyPatch, model: str, cluster: Cluster, settings: Settings, **computed: Any
) -> list[object]:
    told: list[object] = []
    driver = SimpleNamespace(run=lambda: "finished", reached_limit=None, request_stop=lambda: None)
    monkeypatch.setattr(launch, "Driver", lambda *_: driver)
    computed = {"num_gpus_per_worker": settings.num_gpus_per_worker or 1, **settings.said, **computed}
    config = EngineConfig(model=model, engine="autoregressive", **computed)
    monkeypatch.setattr(run, "manifest", run.manifest.model_copy(update={"model": model}))
    display, spent, counters = SimpleNamespace(note=told.append), SimpleNamespace(), SimpleNamespace()
    parts: list[Any] = [run, None, None, None, spent, config, settings, cluster, display, counters]
    assert launch._drive(*parts) == ("finished", None)
    return told
