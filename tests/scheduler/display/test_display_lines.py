"""`submit` without a terminal: plain lines, `--quiet`, `--json`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.display import event_reference
from tests.scheduler.driver.dispatch_parts import idle_workers
from tests.scheduler.driving import DEADLINE_SECONDS, swiftbatch

pytestmark = pytest.mark.ray

HOSTILE = "the\x1b[2Jsecond\nrun finished; jobs: all"


@dataclass(frozen=True)
class Written:
    exit_code: int
    stdout: str
    stderr: str


@contextmanager
def started(*args: str) -> Iterator[subprocess.Popen[str]]:
    # as on some build servers; colours are still for terminals only
    environment = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    pipe = subprocess.PIPE
    with subprocess.Popen(swiftbatch(*args), stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[str]) -> Written:
    stdout, stderr = process.communicate(timeout=DEADLINE_SECONDS)
    return Written(process.returncode, stdout, stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    job = {"prompt": "the quick brown", "max_tokens": 40, "ignore_eos": True}
    jobs = [
        job | {"custom_id": "first"},
        job | {"custom_id": HOSTILE},
        {"custom_id": "bad", "max_tokens": 0, "prompt": "x"},
    ]
    (folder / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in jobs))
    return folder


@pytest.fixture(scope="module")
def written(tiny_model: Path, folder: Path) -> dict[str, Written]:
    """The output of three submissions: to a pipe, to a program, and a quiet one."""
    model = ["--model", str(tiny_model), "--threads", "1", "--dtype", "float32"]
    command = ["submit", str(folder / "jobs.jsonl"), *model, "--run"]
    found = {"json": without_ray(*command, str(folder / "json"), "--json")}
    for name, options in {"plain": [], "quiet": ["--quiet"]}.items():
        with started(*command, str(folder / "plain"), *options) as process:
            found[name] = end(process)
    return found


def without_ray(*args: str) -> Written:
    """Run commands with workers that only write results, so that the driver makes all events."""
    with idle_workers():
        ended = CliRunner().invoke(main, args)
    return Written(ended.exit_code, ended.stdout, ended.stderr)


def test_a_pipe_gets_plain_lines(written: dict[str, Written], folder: Path) -> None:
    plain = written["plain"]
    assert plain.exit_code == 1
    assert (
        plain.stderr
        == "rejected line 3 (bad): field 'max_tokens': found 0, expected a value greater than or equal to 1, or echo\n"
    )
    assert all(line.isprintable() for line in plain.stdout.splitlines())
    lines = plain.stdout.splitlines()
    run = folder / "plain"
    assert lines[0] == f"2 jobs in {run}"
    assert lines[1].startswith("running; jobs: 2 pending; 0 tokens, 0.0 tokens/s")
    assert "worker w1 is ready" in lines
    assert lines[-3:] == [
        "finished; jobs: 2 finished; 80 tokens",
        "run finished; jobs: 2 finished",
        f"results: {run}/output.jsonl and {run}/output.parquet",
    ]


def test_quiet_leaves_errors_and_one_line(written: dict[str, Written], folder: Path) -> None:
    quiet, run = written["quiet"], folder / "plain"
    assert quiet.exit_code == 1
    assert quiet.stderr == written["plain"].stderr
    assert quiet.stdout == (f"run finished; jobs: 2 finished; results: {run}/output.jsonl and {run}/output.parquet\n")


def test_json_is_one_documented_object_a_line(written: dict[str, Written], folder: Path) -> None:
    assert written["json"].exit_code == 1
    assert written["json"].stderr == ""
    events = [json.loads(line) for line in written["json"].stdout.splitlines()]
    known = {kind.kind(): {field.name for field in fields(kind)} for kind in event_reference.kinds()}
    known["progress"] = set(Progress.model_fields)
    for event in events:
        assert set(event) == known[event["event"]] | {"event", "time"}
    kinds = [event["event"] for event in events]
    assert kinds[:2] == ["line_rejected", "run_opened"]
    assert kinds[-2:] == ["progress", "run_ended"]
    assert {"driver_started", "worker_ready", "progress"} <= set(kinds)
    assert sorted(e["custom_id"] for e in events if e["event"] == "job_started") == ["first", HOSTILE]
    finished = {event["custom_id"]: event["num_tokens"] for event in events if event["event"] == "job_finished"}
    assert finished == {"first": 40, HOSTILE: 40}
    run = folder / "json"
    last = {name: events[-1][name] for name in ("state", "run", "outputs")}
    assert last == {
        "state": "finished",
        "run": str(run),
        "outputs": [f"{run}/output.jsonl", f"{run}/output.parquet"],
    }


def test_a_reader_that_goes_away_does_not_end_the_run(written: dict[str, Written], folder: Path) -> None:
    with started("resume", str(folder / "plain")) as process:
        process.stdout.close()
        assert process.wait(DEADLINE_SECONDS) == 1  # a line of the job file was rejected
        assert process.stderr.read() == ""


def test_quiet_and_json_exclude_each_other(folder: Path) -> None:
    for command in (["submit", str(folder / "jobs.jsonl"), "--run"], ["resume"]):
        refused = CliRunner().invoke(main, [*command, str(folder / "plain"), "--quiet", "--json"])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr == "swiftbatch: --quiet and --json: expected at most one of them\n"
