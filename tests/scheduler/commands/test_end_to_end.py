"""Through the real command, workers and drivers are killed, and every token is the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import WorkerStatus
from swiftbatch.scheduler.cli import main
from tests.jobs.checkpoints.checkpoint_parts import logged_jobs
from tests.scheduler.commands.command_parts import write_jobs
from tests.scheduler.commands.submit_parts import submit_file
from tests.scheduler.driving import bodies, is_alive, swiftbatch, wait_until
from tests.scheduler.runs.extension_parts import run_all
from tests.worker.session.session_parts import PLAINLY

pytestmark = pytest.mark.ray

NUM_TOKENS = 3000
JOBS: list[dict[str, Any]] = [
    {
        "custom_id": "greedy",
        "prompt": "the quick brown",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    },
    {"custom_id": "drawn", "prompt": "lazy dog", "max_tokens": NUM_TOKENS, "ignore_eos": True, "min_p": 0.02},
    {
        "custom_id": "chat",
        "messages": [{"role": "user", "content": "jumps over"}],
        "max_tokens": NUM_TOKENS,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
    },
    {"custom_id": "short", "prompt": "fox", "max_tokens": 40, "ignore_eos": True},
]
OFTEN = ["--checkpoint-seconds", "0.3"]  # so that a job of a few seconds has a checkpoint early
DEADLINE_SECONDS = 240


def run_command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(swiftbatch(*args), capture_output=True, text=True, timeout=DEADLINE_SECONDS)


@contextlib.contextmanager
def started(*args: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command in its own process group, and kill leftovers."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process: subprocess.Popen[str] = subprocess.Popen(swiftbatch(*args), start_new_session=True, **pipes)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def status(run: Path) -> dict[str, Any]:
    """Run `status` in this process, because another interpreter takes seconds to start."""
    return dict(json.loads(CliRunner().invoke(main, ["status", str(run), "--json"]).stdout))


def workers(run: Path) -> list[WorkerStatus]:
    """Return the newest heartbeat's workers from its file, because polling the command costs a core."""
    progress = Run.open(str(run)).progress()
    return [] if progress is None else list(progress.workers)


def hold(found: list[WorkerStatus]) -> None:
    for worker in found:
        os.kill(worker.pid, signal.SIGSTOP)


def outputs(run: Path) -> dict[str, tuple[str, str, int]]:
    return {
        custom_id: (
            json.dumps(body["choices"][0].get("text") or body["choices"][0].get("message")),
            body["choices"][0]["token_ids_sha256"],
            body["usage"]["completion_tokens"],
        )
        for custom_id, body in bodies(run).items()
    }


@pytest.fixture(scope="module")
def jobs_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_jobs(tmp_path_factory.mktemp("jobs") / "jobs.jsonl", *JOBS)


@pytest.fixture(scope="module")
def submit_args(jobs_file: str, tiny_model: Path) -> list[str]:
    # float32: layers this small are not row-exact in bf16, as `doctor` says of this model
    return ["submit", jobs_file, "--model", str(tiny_model), "--threads", "1", "--dtype", "float32", *OFTEN]


@pytest.fixture(scope="module")
def undisturbed(jobs_file: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results in one undisturbed session without Ray."""
    said = {"model": str(tiny_model), "dtype": "float32", "num_threads": 1}
    run = submit_file(jobs_file, str(tmp_path_factory.mktemp("undisturbed") / "run"), **said).run
    run_all(run, tiny_model, **PLAINLY)
    run.write_output()
    found = outputs(Path(run.store.uri))
    assert [entry[2] for entry in found.values()] == [NUM_TOKENS, NUM_TOKENS, NUM_TOKENS, 40]
    return found


@pytest.mark.slow  # test_many_nodes.py kills one with its node, test_driver.py one of an embedded Ray
def test_a_worker_killed_midway_changes_no_token(
    submit_args: list[str], undisturbed: dict[str, tuple[str, str, int]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with started(*submit_args, "--run", str(run), "--workers", "2", "--metrics-port", "0") as process:
        wait_until(lambda: logged_jobs(run) and len(workers(run)) == 2)
        held = workers(run)
        hold(held)
        job_id, *_ = logged_jobs(run)
        custom_id = job_id.rsplit("-", 1)[0]
        worker, *_ = wait_until(lambda: [worker for worker in workers(run) if custom_id in worker.jobs])
        assert status(run)["workers"][0]["metrics_address"].startswith("http://")
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        os.kill(worker.pid, signal.SIGKILL)
        for other in {each.pid for each in held} - {worker.pid}:
            os.kill(other, signal.SIGCONT)
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, output
    assert f"worker {worker.id} is lost: its process ended" in output
    assert "ray" not in output.lower()  # no chatter from below
    assert outputs(run) == undisturbed
    metrics = bodies(run)[custom_id]["metrics"]
    assert metrics["num_attempts"] == 2
    assert 0 < metrics["num_recovered_tokens"] < NUM_TOKENS


# test_signals.py ends a working run in good order each day
@pytest.mark.parametrize("is_interrupted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_driver_and_an_interrupted_one_lose_nothing(
    submit_args: list[str], undisturbed: dict[str, tuple[str, str, int]], tmp_path: Path, is_interrupted: bool
) -> None:
    run = tmp_path / "run"
    with started(*submit_args, "--run", str(run)) as process:
        wait_until(lambda: logged_jobs(run))
        pids = [worker.pid for worker in workers(run)]
        process.kill()
        process.wait()
        assert status(run)["state"] == "interrupted"
        wait_until(lambda: not any(map(is_alive, pids)))  # they must not outlive their driver
    if is_interrupted:
        interrupt_a_resume(run, pids)
    process_again = run_command("resume", str(run), "--json")
    assert process_again.returncode == 0, process_again.stdout + process_again.stderr
    events = [json.loads(line) for line in process_again.stdout.splitlines()]
    [seconds] = [event["seconds"] for event in events if event["event"] == "worker_ready"]
    assert {"imports", "session", "weights"} <= {name for name, value in seconds.items() if value > 0}
    assert outputs(run) == undisturbed
    assert max(body["metrics"]["num_recovered_tokens"] for body in bodies(run).values()) > 0


def interrupt_a_resume(run: Path, former: list[int]) -> None:
    """Interrupt the command once it has workers other than `former`."""
    with started("resume", str(run), *OFTEN) as process:
        wait_until(lambda: workers(run) and not set(former) & {worker.pid for worker in workers(run)})
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert f"swiftbatch resume {run}" in output
    assert status(run)["state"] == "interrupted"


@pytest.mark.slow
def test_limits_and_a_killed_driver_between_them_change_no_token(
    submit_args: list[str], undisturbed: dict[str, tuple[str, str, int]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = run_command(*submit_args, "--run", str(run), "--slots", "2", "--max-total-tokens", "100")
    assert first.returncode == 3, first.stdout + first.stderr
    assert f"to go on, with larger limits or none: swiftbatch resume {run}" in first.stdout
    before = Run.open(str(run)).progress()
    assert before.num_total_tokens == before.num_generated_tokens >= 100
    with started("resume", str(run), "--max-total-tokens", "100000", "--deadline", "1h", *OFTEN) as process:
        wait_until(lambda: workers(run) and status(run)["num_total_tokens"] > before.num_total_tokens)
        process.kill()
        process.wait()
    both = run_command("resume", str(run), "--max-total-tokens", "100", "--max-worker-hours", "0.000001")
    assert both.returncode == 3
    assert "stopping at --max-total-tokens 100 (" in both.stdout
    assert " and --max-worker-hours 1e-06 (" in both.stdout
    assert "starting workers" not in both.stdout
    last = run_command("resume", str(run), "--deadline", "1h")
    assert last.returncode == 0, last.stdout + last.stderr
    assert outputs(run) == undisturbed
    total = status(run)["num_total_tokens"]
    assert total >= sum(num_tokens for *_, num_tokens in undisturbed.values())


@pytest.mark.slow  # test_nightly.py submits the same file again, and a changed one
def test_the_same_file_again_runs_only_what_is_missing(submit_args: list[str], tmp_path: Path) -> None:
    run, jobs_file = tmp_path / "run", tmp_path / "jobs.jsonl"
    short = {"prompt": "fox", "max_tokens": 20}
    jobs_file.write_text(json.dumps({"custom_id": "a", **short}) + "\n")
    args = ["submit", str(jobs_file), *submit_args[2:], "--run", str(run)]
    assert run_command(*args).returncode == 0
    result = next((run / "results" / "segments").iterdir())
    written = result.stat().st_mtime_ns
    with jobs_file.open("a") as file:
        file.write(json.dumps({"custom_id": "b", **short}) + "\n" + '{"custom_id": "bad"}\n')
    process = run_command(*args)
    assert process.returncode == 1  # a rejected line
    assert "rejected line 3 (bad)" in process.stderr
    assert set(outputs(run)) == {"a", "b"}
    assert result.stat().st_mtime_ns == written
    third = run_command("resume", str(run))
    assert third.returncode == 1  # it is still rejected
    assert "run finished; jobs: 2 finished" in third.stdout


CLUSTER = """
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
print("address", cluster.address, flush=True)
input()
cluster.shutdown()
"""


@pytest.mark.slow  # test_many_nodes.py runs all of its jobs on one
def test_jobs_run_on_a_running_cluster(submit_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    jobs_file = tmp_path / "jobs.jsonl"
    jobs_file.write_text('{"custom_id": "a", "prompt": "fox", "max_tokens": 20}\n')
    # in its own process, because Ray reads its access mode once per process
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster:
        address = next(line.split()[1] for line in cluster.stdout if line.startswith("address"))
        args = [str(jobs_file), *submit_args[2:], "--run", str(tmp_path / "run"), "--address", address]
        process = run_command("submit", *args)
        cluster.communicate("\n", timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, process.stdout + process.stderr
    assert set(outputs(tmp_path / "run")) == {"a"}
