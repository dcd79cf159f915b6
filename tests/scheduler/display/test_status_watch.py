from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.driver.run_lease import current_progress
from swiftbatch.scheduler.runs import run_watch as watch_display
from swiftbatch.scheduler.runs.run_watch import watch
from tests.scheduler.display.terminal_parts import Terminal
from tests.scheduler.driver.driver_parts import RecordingDisplay, make_run
from tests.scheduler.driving import swiftbatch


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_display, "beat_seconds", lambda _: 0.05)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run", {"a": 300, "b": 300})


def beat(run: Run, **changes: object) -> Progress:
    alive = {"state": "running", "updated": time.time(), "driver_host": socket.gethostname(), "driver_pid": os.getpid()}
    progress = current_progress(run).model_copy(update=alive | changes)
    run.write_progress(progress)
    return progress


def watched(run: Run, acts: list[Callable[[], object]]) -> tuple[Progress, RecordingDisplay]:
    """Watch a run while `acts` happen, each after a shown heartbeat."""
    display, remaining = RecordingDisplay(), iter(acts)
    display.on_update = lambda progress: next(remaining, lambda: None)()
    return watch(run, display), display


def test_a_run_is_watched_to_its_end(run: Run) -> None:
    beat(run, num_generated_tokens=10)
    acts = [
        lambda: beat(run, num_generated_tokens=20),
        lambda: beat(run, num_generated_tokens=30),
        lambda: beat(run, num_generated_tokens=40, state="finished"),
    ]
    last, display = watched(run, acts)
    assert [(shown.state, shown.num_generated_tokens) for shown in display.updates] == [
        ("running", 10),
        ("running", 20),
        ("running", 30),
        ("finished", 40),
    ]
    assert last == display.updates[-1]
    assert display.notes == []


def test_a_run_that_is_about_to_start_is_waited_for(run: Run) -> None:
    timer = threading.Timer(0.3, lambda: beat(run))
    timer.start()
    last, display = watched(run, [lambda: beat(run, state="cancelled")])
    timer.join()
    assert last.state == "cancelled"
    assert len(display.notes) == 1
    assert "waiting for a driver" in display.notes[0]
    assert [shown.state for shown in display.updates] == ["running", "cancelled"]


def test_a_run_without_a_driver_is_shown_once_and_how_to_go_on(run: Run) -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    beat(run, driver_pid=pid)
    result = CliRunner().invoke(main, ["status", run.store.uri, "--watch"])
    assert result.exit_code == 0
    head, *_, state, hint = result.output.splitlines()
    assert "model counting" in head
    assert state == "interrupted; jobs: 2 pending; 0 tokens"
    assert hint == f"no driver runs it; go on with: swiftbatch resume {run.store.uri}"


def test_a_run_with_nothing_to_do_is_not_waited_for(tmp_path: Path) -> None:
    last, display = watched(make_run(tmp_path / "run", {}), [])
    assert last.state == "interrupted"
    assert display.notes == []


def test_a_silent_driver_elsewhere_is_told_once_and_waited_for(run: Run) -> None:
    elsewhere = {"driver_host": "elsewhere", "updated": time.time() - 100}
    beat(run, **elsewhere)
    acts = [
        lambda: None,
        lambda: None,
        lambda: beat(run),
        lambda: beat(run, **elsewhere),
        lambda: beat(run, state="finished"),
    ]
    last, display = watched(run, acts)
    assert last.state == "finished"
    assert [note[:32] for note in display.notes] == ["no word from the driver, process"] * 2
    assert display.notes[0].endswith("on elsewhere, for 100 s")


def test_each_look_reads_one_small_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    beat(run)
    read: list[str] = []
    plain_read, plain_list = run.store.read, run.store.list
    monkeypatch.setattr(run.store, "read", lambda path: read.append(path) or plain_read(path))
    monkeypatch.setattr(run.store, "list", lambda path: read.append(path) or plain_list(path))
    _, display = watched(run, [lambda: None] * 5 + [lambda: beat(run, state="finished")])
    assert len(display.updates) == 7
    beats = [path for path in read if path == "progress.json"]
    assert len(beats) < len(display.updates) + 4  # a few more at the beginning and end
    assert len(read) - len(beats) < 5  # once, when no driver works any more


def test_a_terminal_that_can_not_redraw_gets_lines(run: Run) -> None:
    beat(run, state="finished")
    with Terminal(swiftbatch("status", run.store.uri, "--watch"), 80, 24, kind="dumb") as terminal:
        assert terminal.wait() == 0
        lines = terminal.lines()
    assert "finished; jobs: 2 pending; 0 tokens" in lines
    assert not any(line.startswith("run ") for line in lines)


@pytest.mark.parametrize("data", [b"", b"{torn", b"[" * 100_000, b"[]", b'{"state": "running"}'])
def test_a_damaged_beat_is_no_truth_and_what_the_folder_says_is_shown(run: Run, data: bytes) -> None:
    run.store.write("progress.json", data)
    result = CliRunner().invoke(main, ["status", run.store.uri, "--watch"])
    assert result.exit_code == 0
    assert "interrupted; jobs: 2 pending" in result.stdout
