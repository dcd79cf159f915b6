"""A command that is told to end does so at any moment: soon, in one line, with code 130, and leaves nothing behind."""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path

import pytest
from signal_parts import NO_HANDLER_YET, Submission, submission

SOON_SECONDS = 60  # for a machine with other things to do; a Ray that is waited for in vain takes as long


def check_end(command: Submission, exit_code: int) -> None:
    assert exit_code == 130, command.output()
    assert "Traceback" not in command.output()
    assert "SIGTERM received" not in command.output()  # what Ray's handler writes
    assert command.output().count("interrupted") >= 1
    assert command.state() in (None, "interrupted")
    assert command.left_behind() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_group_that_is_told_to_end_while_ray_starts_is_gone_soon(
    number: signal.Signals, tmp_path: Path, tiny_model: Path
) -> None:
    with submission(tmp_path, tiny_model) as command:
        command.wait_for(lambda: any(command.ray_folder.glob("*/session_*")))
        started = time.monotonic()
        check_end(command, command.end(number, to_group=True))
        assert time.monotonic() - started < SOON_SECONDS
        assert command.state() is None  # no driver ever had it


def test_a_group_that_is_told_to_end_while_workers_start_is_gone_soon(tmp_path: Path, tiny_model: Path) -> None:
    with submission(tmp_path, tiny_model) as command:
        command.wait_for(lambda: "starting workers" in command.output())
        started = time.monotonic()
        check_end(command, command.end(signal.SIGTERM, to_group=True))
        assert time.monotonic() - started < SOON_SECONDS
        assert "nothing is lost" in command.output()


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
            if command.output().endswith("run finished; jobs: 2 finished\n"):
                continue
            check_end(command, exit_code)
            assert seconds < SOON_SECONDS
