from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import WorkerStatus
from swiftbatch.scheduler.driver.queue_loading import count_jobs
from swiftbatch.scheduler.driver.run_lease import current_progress
from tests.scheduler.commands.command_parts import finish, invoke, refusal
from tests.scheduler.commands.submit_parts import submit_file


def test_a_clock_that_went_back_makes_no_negative_time(run: Run) -> None:
    for record in run.jobs():
        finish(run, record.job.custom_id, "text")
    back = {"state": "finished", "updated": 5.0, "started": 90_000.0, "jobs": count_jobs(run)}
    run.write_progress(current_progress(run).model_copy(update=back))
    assert "took 0:00:00" in invoke("status", run.store.uri).stdout


def test_a_run_whose_progress_is_damaged_is_finished_when_all_results_are_there(run: Run) -> None:
    run.store.write("progress.json", b"{torn")
    assert json.loads(invoke("status", run.store.uri, "--json").stdout)["state"] == "interrupted"
    for record in run.jobs():
        finish(run, record.job.custom_id, "text")
    result = invoke("status", run.store.uri)
    assert "finished; jobs: 3 finished; 15 tokens" in result.stdout
    assert "swiftbatch resume" not in result.stdout
    assert "took" not in result.stdout
    told = f"progress.json in {run.store.uri} is damaged, found no heartbeat of a driver: it is written anew with: "
    assert result.stderr == f"{told}swiftbatch resume {run.store.uri}\n"


def test_a_run_whose_submit_ended_before_its_jobs_were_there_is_not_resumed_as_if_it_had_none(
    tmp_path: Path, tiny_model: Path, run: Run
) -> None:
    for name in ("jobs.parquet", "rejects.jsonl"):
        run.store.delete(name)
    told = f"the run at {run.store.uri} has no jobs, its submit was cut short; submit the job file again"
    result = invoke("resume", run.store.uri)
    assert (result.exit_code, result.stderr) == (2, f"swiftbatch: {told}\n")
    status = invoke("status", run.store.uri).stdout
    assert "no driver runs it, and its submit was cut short; submit the job file again" in status
    file = tmp_path / "bad.jsonl"
    file.write_text("no job\n")
    assert not submit_file(str(file), str(tmp_path / "rejects"), model=str(tiny_model)).run.lacks_its_jobs()


def test_status_json_has_the_promised_fields(run: Run) -> None:
    finish(run, "b", "text of b")
    result = invoke("status", run.store.uri, "--json")
    assert result.exit_code == 0
    status = json.loads(result.output)
    assert status["state"] == "interrupted"
    assert status["jobs"] == {"pending": 2, "running": 0, "finished": 1, "failed": 0, "cancelled": 0}
    assert {"num_generated_tokens", "tokens_per_second", "eta_seconds", "workers"} <= set(status)
    text = invoke("status", run.store.uri).output
    assert "swiftbatch resume" in text


def write_running(run: Run, *workers: WorkerStatus) -> None:
    beat = current_progress(run).model_copy(
        update={
            "state": "running",
            "updated": time.time(),
            "driver_host": socket.gethostname(),
            "driver_pid": os.getpid(),
            "workers": workers,
            "running": {"a": 12_345},
        }
    )
    run.write_progress(beat)


def test_status_shows_each_running_job_with_its_tokens(run: Run) -> None:
    write_running(run, WorkerStatus(id="w1", host="here", pid=7, jobs=("a", "c"), metrics_address="http://here:9"))
    text = invoke("status", run.store.uri).output
    assert "w1 on here, process 7: a (12,345 tokens), c, metrics at http://here:9" in text
    assert json.loads(invoke("status", run.store.uri, "--json").output)["running"] == {"a": 12_345}


def test_status_shows_what_decides_the_bits_once_or_for_each_kind_of_worker(run: Run) -> None:
    alike = [WorkerStatus(id=name, host="here", pid=7, numerics="cpu native f32 1, float32") for name in ("w1", "w2")]
    other = WorkerStatus(id="w3", host="there", pid=8, numerics="cuda")
    for workers, lines in (
        (alike, ["  numerics: cpu native f32 1, float32"]),
        ([*alike, other], ["  numerics of w1, w2: cpu native f32 1, float32", "  numerics of w3: cuda"]),
    ):
        write_running(run, *workers)
        seen = invoke("status", run.store.uri).output.splitlines()
        assert [line for line in seen if "numerics" in line] == lines
    [*_, last] = json.loads(invoke("status", run.store.uri, "--json").output)["workers"]
    assert last["numerics"] == "cuda"


def test_the_clock_of_a_run_is_shown(run: Run) -> None:
    clock = run.manifest.clock
    assert f"clock of chat templates: {clock}\n" in invoke("status", run.store.uri).stdout
    assert json.loads(invoke("status", run.store.uri, "--json").stdout)["clock"] == clock


RUN_COMMANDS = {
    "submit": (),
    "resume": ("--retry-failed",),
    "extend": ("--max-tokens", "99"),
    "prune": (),
    "cancel": (),
    "status": (),
    "tail": ("good",),
    "results": (),
    "report": (),
}


@pytest.mark.parametrize("version", [1, 3, None])
@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_every_command_refuses_the_folder_of_another_version_and_leaves_it_alone(
    run: Run, jobs_file: str, command: str, version: int | None
) -> None:
    folder = Path(run.store.uri)
    manifest = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**manifest, "version": version} if version else {"run_id": "r"}))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    where = (jobs_file, "--run", run.store.uri) if command == "submit" else (run.store.uri,)
    told = refusal(command, *where, *RUN_COMMANDS[command])
    found = f"found version {version or 'none'}, expected version 2"
    assert f"cannot use run.json in {folder}: {found}; use the version of swiftbatch that made it" in told
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
