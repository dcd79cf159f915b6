"""A signal at any moment ends a command soon, in one line and with 130."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress, RunError
from swiftbatch.scheduler.driver.run_lease import current_progress
from tests.scheduler.commands.nightly_parts import held_elsewhere
from tests.scheduler.display.terminal_parts import Terminal
from tests.scheduler.driver.driver_parts import make_run
from tests.scheduler.driving import DEADLINE_SECONDS, swiftbatch, wait_until
from tests.scheduler.process.signal_parts import JOB, NO_HANDLER_YET, Submission, heard, submission

pytestmark = pytest.mark.ray

SOON_SECONDS = 60  # for a busy machine; waiting for Ray in vain takes as long


def check_end(command: Submission, exit_code: int) -> None:
    assert exit_code == 130, command.output()
    assert "Traceback" not in command.output()
    assert "SIGTERM received" not in command.output()  # what Ray's handler writes
    assert command.output().count("interrupted") >= 1
    assert command.state() in (None, "interrupted")
    assert command.left_behind() == []


def test_a_group_that_is_told_to_end_while_ray_starts_is_gone_soon(tmp_path: Path, tiny_model: Path) -> None:
    with submission(tmp_path, tiny_model) as command:
        command.wait_for(lambda: any(command.ray_folder.glob("*/session_*")))
        started = time.monotonic()
        check_end(command, command.end(signal.SIGTERM, to_group=True))
        assert time.monotonic() - started < SOON_SECONDS
        assert f"nothing is lost, go on with: swiftbatch resume {command.run}" in command.output()


def newest_beat(run: Path, pid: int) -> Progress | None:
    try:
        progress = Run.open(str(run)).progress()
    except RunError:
        return None
    return progress if progress is not None and progress.driver_pid == pid else None


NAMES = [f"job-{number}" for number in range(40)]  # more than run in a moment


def num_tokens(run: Path, pid: int) -> int:
    beat = newest_beat(run, pid)
    return 0 if beat is None else beat.num_generated_tokens


def is_in(mask: str, pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (bits,) = (int(line.split()[1], 16) for line in lines if line.startswith(f"{mask}:"))
    return bool(bits >> (number - 1) & 1)


def test_commands_that_wait_or_compute_end_in_a_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"a": 300})
    alive = {"state": "running", "updated": time.time(), "driver_host": "elsewhere", "driver_pid": 1}
    run.write_progress(current_progress(run).model_copy(update=alive))
    (tmp_path / "inbox").mkdir()
    commands = [
        ["status", run.store.uri, "--watch"],
        ["nightly", str(tmp_path / "inbox"), "--runs", str(tmp_path / "runs"), "--if-busy", "wait"],
        ["bench", "decode", "--positions", "100000"],
    ]
    with ExitStack() as stack:
        stack.enter_context(held_elsewhere(tmp_path / "runs"))
        started = [stack.enter_context(heard(swiftbatch(*command))) for command in commands]
        assert started[0].stdout.readline().startswith(run.store.uri)
        for process in started:
            wait_until(lambda pid=process.pid: is_in("SigCgt", pid, signal.SIGHUP))
            process.send_signal(signal.SIGHUP)
        for process in started:
            _, errors = process.communicate(timeout=DEADLINE_SECONDS)
            assert process.returncode == 130
            assert errors.strip().splitlines()[-1] == "interrupted"
            assert "Traceback" not in errors


def test_a_command_that_was_started_without_streams_does_its_work(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {})
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *swiftbatch("resume", run.store.uri)]
    assert subprocess.run(closed, check=False, timeout=DEADLINE_SECONDS).returncode == 0
    assert (tmp_path / "run/output.jsonl").exists()


FIRST_FREE = """
import os, sys, types
from swiftbatch.scheduler.__main__ import main
sys.modules["swiftbatch.scheduler.cli"] = types.SimpleNamespace(main=lambda: sys.exit(os.open(os.devnull, os.O_RDONLY)))
main()
"""


def test_nothing_that_a_command_opens_takes_the_place_of_a_closed_stream() -> None:
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", FIRST_FREE]
    assert subprocess.run(closed, check=False, timeout=DEADLINE_SECONDS).returncode > 2


def test_under_nohup_a_run_outlives_its_terminal_and_is_drained_without_one(tmp_path: Path, tiny_model: Path) -> None:
    run, jobs = tmp_path / "run", tmp_path / "jobs.jsonl"
    jobs.write_text("".join(json.dumps(JOB | {"custom_id": name}) + "\n" for name in NAMES))  # it takes a while
    command = swiftbatch("submit", str(jobs), "--run", str(run), "--model", str(tiny_model), "--threads", "1")
    nohup = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command, "--checkpoint-seconds", "600"]
    with Terminal(nohup, 100, 30) as terminal:
        pid = terminal.process.pid
        terminal.wait_for(lambda text: "worker w1 is ready" in text and num_tokens(run, pid))
        terminal.close()
        before = num_tokens(run, pid)
        os.kill(pid, signal.SIGHUP)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while num_tokens(run, pid) == before:  # it goes on
            assert time.monotonic() < deadline
            assert terminal.process.poll() is None
            time.sleep(0.05)
        assert is_in("SigIgn", pid, signal.SIGHUP)  # a drain takes a moment, too
        os.killpg(pid, signal.SIGTERM)  # only the driver tells workers
        assert terminal.process.wait(DEADLINE_SECONDS) == 130
    beat = newest_beat(run, pid)
    assert (beat.state, beat.running) == ("interrupted", {})  # nothing lacks a checkpoint
    opened = Run.open(str(run))
    checkpoints = CheckpointStore.of(opened)
    finished, _ = opened.ended()
    unfinished = [record.job_id for record in opened.jobs() if record.job_id not in finished]
    kept = sum(len(checkpoints.read_log(job_id).token_ids) for job_id in unfinished)
    assert kept + JOB["max_tokens"] * (len(NAMES) - len(unfinished)) == beat.num_generated_tokens > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("number", "to_group"),
    list(itertools.product([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], [False, True])),
)
def test_a_signal_every_half_second_after_the_start(
    number: signal.Signals, to_group: bool, tmp_path: Path, tiny_model: Path
) -> None:
    for moment in range(31):
        with submission(tmp_path, tiny_model) as command:
            time.sleep(moment / 2)
            started = time.monotonic()
            exit_code = command.end(number, to_group)
            seconds = time.monotonic() - started
            print(f"{number.name} after {moment / 2} s: exit code {exit_code} after {seconds:.1f} s")
            if moment == 0 and exit_code in NO_HANDLER_YET:
                continue  # Python itself was starting
            if "run finished" in command.output():
                continue  # it was too late
            check_end(command, exit_code)
            assert seconds < SOON_SECONDS
