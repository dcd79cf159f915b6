"""A job whose cache does not fit the host is refused alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.runs import launch
from swiftbatch.scheduler.runs.run_manifest import computation_of
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.scheduler.runs.submission import Submission, submission
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv import kv_capacity
from swiftbatch.worker.kv.kv_capacity import (
    MEMORY,
    KVRoom,
    KVRoomError,
    bytes_per_position,
    check_folder,
    place_of_caches,
)
from swiftbatch.worker.model.model_files import locate_model, read_config
from tests.worker.session.session_parts import body, claimed, make_run, record, session, to_the_end

HUGE = 2**31 - 1  # tokens


@pytest.fixture
def endless_model(tiny_model: Path, tmp_path: Path) -> Path:
    """Has more positions than any host can hold."""
    folder = shutil.copytree(tiny_model, tmp_path / "endless-model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**40}))
    return folder


@pytest.fixture
def jobs_file(tmp_path: Path) -> str:
    lines = [{"custom_id": name, "prompt": "the fox", "max_tokens": n} for name, n in (("huge", HUGE), ("good", 5))]
    path = tmp_path / "jobs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def submitted(jobs_file: str, tmp_path: Path, address: str | None = None, **said: object) -> Submission:
    with submission(
        jobs_file, str(tmp_path / "run"), Settings({"num_threads": 1, **said}, address=address)
    ) as taken_in:
        return taken_in


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(args))
    return result.exit_code, result.output


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", None), ("float32", None), ("bfloat16", "int8")])
def test_the_driver_knows_what_a_position_takes_on_a_worker(
    tiny_model: Path, dtype: str, kv_dtype: KVDtype | None
) -> None:
    for model in ("embedded", str(tiny_model)):
        files = locate_model(model)
        target = TargetModel.load(files, dtype, "cpu", kv_dtype=kv_dtype)
        found = bytes_per_position(read_config(model, files.path), dtype, kv_dtype)
        assert found == target.cache_shape.bytes_per_position()


def test_a_config_that_does_not_say_it_refuses_nothing() -> None:
    assert bytes_per_position({"num_hidden_layers": 3}, "bfloat16") is None


def test_where_caches_lie_follows_from_device_and_option() -> None:
    assert place_of_caches("cpu", None) == MEMORY
    assert place_of_caches("cpu", "/kv") == "/kv"
    assert place_of_caches("cuda", None) is None


def test_the_refusal_names_what_is_needed_and_what_is_left(tmp_path: Path) -> None:
    for place in (MEMORY, str(tmp_path)):
        room = KVRoom(place, 4096)
        num_fitting = room.free_bytes() // 4096
        room.refuse_too_long(num_fitting // 2)
        with pytest.raises(KVRoomError, match=rf"10,000,000,000 positions need 40,960\.00 GB, {place} has .* GB left"):
            room.refuse_too_long(10**10)


def test_what_is_left_is_what_programs_may_take(tmp_path: Path) -> None:
    assert KVRoom(str(tmp_path), 1).free_bytes() == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    assert 2**28 < KVRoom(MEMORY, 1).free_bytes() < 2**46


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_submission_refuses_it_and_takes_the_others(
    jobs_file: str, tmp_path: Path, endless_model: Path, has_folder: bool
) -> None:
    kv_offload = str(tmp_path) if has_folder else None
    submission = submitted(jobs_file, tmp_path, model=str(endless_model), device="cpu", kv_offload=kv_offload)
    assert list(submission.jobs.custom_ids()) == ["good"]
    [reject] = submission.rejects
    assert (reject.line_number, reject.custom_id) == (1, "huge")
    assert reject.reason.startswith("max_tokens: cannot allocate")
    assert f"{kv_offload or MEMORY} has " in reject.reason


def test_a_cluster_s_workers_are_not_judged_by_this_machine(
    jobs_file: str, tmp_path: Path, endless_model: Path
) -> None:
    elsewhere = {"address": "head:6379", "device": "cpu", "kv_offload": "/no/such/folder"}
    assert submitted(jobs_file, tmp_path, model=str(endless_model), **elsewhere).rejects == []


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_worker_fails_that_job_alone(tmp_path: Path, tiny_model: Path, has_folder: bool) -> None:
    run, good = make_run(tmp_path / "run"), record("fox")
    sampling = SamplingParams(max_tokens=HUGE, seed=1)
    huge = JobRecord("huge-1", record("dog").job.model_copy(update={"sampling": sampling}), 2, 5)
    kv_offload = str(tmp_path) if has_folder else None
    worker = session(run, tiny_model, kv_offload=kv_offload)
    report = to_the_end(worker, claimed(run, huge), claimed(run, good))
    assert [outcome.job_id for outcome in report.of("finished")] == [good.job_id]
    assert body(run, good)["usage"]["completion_tokens"] == 240
    [(job_id, reason)] = [(each.job_id, each.reason) for each in report.of("failed")]
    assert job_id == "huge-1"
    assert reason.startswith("KVRoomError: max_tokens: cannot allocate")
    assert f"{kv_offload or MEMORY} has " in reason
    assert "\n" not in reason


@pytest.mark.parametrize("folder", ["missing", "file", "/proc"])
def test_a_folder_that_can_t_be_written_ends_the_command_before_anything_starts(
    jobs_file: str, tmp_path: Path, tiny_model: Path, folder: str
) -> None:
    (tmp_path / "file").write_text("")
    place = str(tmp_path / folder)
    run = str(tmp_path / "run")
    code, text = invoke("submit", jobs_file, "--run", run, "--model", str(tiny_model), "--kv-offload", place)
    assert code == 2
    [line] = text.splitlines()
    assert line.startswith(f"swiftbatch: --kv-offload {place}: ")
    assert line.endswith("expected a folder that can be written")
    assert not Path(run).exists()


def test_a_gpu_s_caches_in_a_folder_are_refused_before_anything_starts(
    jobs_file: str, tmp_path: Path, tiny_model: Path
) -> None:
    """Also for workers elsewhere; a run of an earlier version goes on without its folder."""
    for address in (None, "head:6379"):
        with pytest.raises(KVRoomError, match=r"^--kv-offload kv: caches of a GPU stay in its memory, .* --kv-dt"):
            submitted(jobs_file, tmp_path, model=str(tiny_model), device="cuda", kv_offload="kv", address=address)
    assert list(tmp_path.glob("*/run.json")) == []
    earlier = make_run(tmp_path / "run").manifest.model_copy(update={"device": "cuda", "kv_offload": "kv"})
    assert computation_of(earlier, Settings()).kv_offload is None


def test_a_worker_without_the_folder_says_so(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(KVRoomError, match=r"--kv-offload .*/missing: No such file"):
        session(make_run(tmp_path / "run"), tiny_model, kv_offload=str(tmp_path / "missing"))


def test_the_run_keeps_its_folder_and_a_resume_may_name_another(
    jobs_file: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kv", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    manifest = submitted(jobs_file, tmp_path, model=str(tiny_model), kv_offload="kv").run.manifest
    assert manifest.kv_offload == str(tmp_path / "kv")
    assert launch._engine_config(manifest, 0, Settings()).kv_offload == str(tmp_path / "kv")
    assert launch._engine_config(manifest, 0, Settings({"kv_offload": "other"})).kv_offload == str(tmp_path / "other")
    (tmp_path / "kv").rmdir()
    with pytest.raises(KVRoomError, match="kv: No such file"):
        launch._engine_config(manifest, 0, Settings())
    assert launch._engine_config(manifest, 0, Settings(address="head:6379")).kv_offload == manifest.kv_offload


def test_runs_made_before_have_no_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    text = json.loads((tmp_path / "run" / "run.json").read_text())
    del text["kv_offload"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(text))
    assert Run.open(run.store.uri).manifest.kv_offload is None
    check_folder(None)


def test_a_container_has_what_its_own_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's memory is not the container's."""
    monkeypatch.setattr(kv_capacity, "OWN_GROUP", tmp_path)
    unlimited = KVRoom(MEMORY, 4096).free_bytes()
    assert unlimited > 1_000_000
    for name, text in (("memory.max", "900000"), ("memory.current", "500000"), ("memory.stat", "inactive_file 100000")):
        (tmp_path / name).write_text(text)
    assert KVRoom(MEMORY, 4096).free_bytes() == 500_000
    (tmp_path / "memory.max").write_text("max")
    assert KVRoom(MEMORY, 4096).free_bytes() > 1_000_000
