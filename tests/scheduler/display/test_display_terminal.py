"""`submit` and `status --watch` on pseudo-terminals, with a killed worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress
from tests.scheduler.display.terminal_parts import Terminal
from tests.scheduler.driving import DEADLINE_SECONDS, swiftbatch

pytestmark = pytest.mark.ray

NUM_TOKENS = 4000  # of several seconds
NUM_LINES = 40


@dataclass(frozen=True)
class Seen:
    run: Path
    narrow: list[str]  # 80 columns, both jobs running
    wide: list[str]  # 140 columns, a moment later
    last: list[str]  # after the command's end
    exit_code: int
    is_cursor_hidden: bool  # while it draws, because a killed process could not show it again
    watched: list[str]  # `status --watch` in 80 columns after the end
    watch_code: int
    watch_json: list[str]


@pytest.fixture(scope="module")
def seen(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("t")
    run, jobs_file = folder / "run", folder / "jobs.jsonl"
    job = {"prompt": "the quick brown", "max_tokens": NUM_TOKENS, "ignore_eos": True, "min_p": 0.02}
    jobs = [job | {"custom_id": "first"}, job | {"custom_id": "the\x1b[2Jsecond\nwith a name that is long" + 40 * "."}]
    jobs_file.write_text("".join(json.dumps(line) + "\n" for line in [*jobs, {"custom_id": "bad"}]))
    model = ["--model", str(tiny_model), "--threads", "1", "--dtype", "float32"]
    often = ["--slots", "2", "--checkpoint-seconds", "0.3"]
    with ExitStack() as stack:
        command = swiftbatch("submit", str(jobs_file), "--run", str(run), *model, *often)
        terminal = stack.enter_context(Terminal(command, 80, NUM_LINES))
        terminal.wait_for(lambda text: "2 jobs in" in text)
        watch = swiftbatch("status", str(run), "--watch")
        watcher = stack.enter_context(Terminal(watch, 80, NUM_LINES))
        json_watch = stack.enter_context(subprocess.Popen([*watch, "--json"], stdout=subprocess.PIPE, text=True))
        return _watch_a_worker_die(run, terminal, watcher, json_watch)


def _watch_a_worker_die(run: Path, terminal: Terminal, watcher: Terminal, json_watch: subprocess.Popen[str]) -> Seen:
    narrow = terminal.wait_for(lambda text: "2 jobs, " in text and "tokens/step" in text)
    terminal.resize(140, NUM_LINES)
    wide = terminal.wait_for(lambda text: ", process " in text)
    is_hidden = terminal.screen.cursor.hidden
    os.kill(Run.open(str(run)).progress().workers[0].pid, signal.SIGKILL)
    exit_code = terminal.wait()
    watch_code = watcher.wait()
    watch_json, _ = json_watch.communicate(timeout=DEADLINE_SECONDS)
    print("\n".join([*filter(None, narrow), *filter(None, wide)]))
    last, watched = terminal.lines(), watcher.lines()
    return Seen(run, narrow, wide, last, exit_code, is_hidden, watched, watch_code, watch_json.splitlines())


def test_80_columns_show_the_run_its_workers_and_their_jobs(seen: Seen) -> None:
    figures = seen.narrow[_row(seen.narrow, "run ") :]
    assert figures[0].startswith("run    running for 0:")
    assert figures[1].startswith("tokens ")
    assert figures[1].endswith("of up to 8,000")
    assert figures[2] == "jobs   2 running; 1 line rejected"
    assert " tokens/step" in figures[3]  # with the share of chains, if any
    assert figures[4].startswith("safety checkpoint ")
    assert figures[5].startswith("w1 on ")
    assert "2 jobs, " in figures[5]
    assert figures[6].startswith("  first ")
    assert figures[7].startswith("  the\\x1b[2Jsecond\\n")
    assert "…" in figures[7]
    assert all(line.endswith("of up to 4,000") for line in figures[6:8])
    assert not any(figures[8:])


def test_140_columns_use_the_room(seen: Seen) -> None:
    wide, narrow = (lines[_row(lines, "w1 on ") :] for lines in (seen.wide, seen.narrow))
    assert len(wide[0]) == 140
    assert len(narrow[0]) == 80
    assert ", process " in wide[0]
    assert len(wide[1]) == 140
    assert len(wide[2].split("…")[0]) > len(narrow[2].split("…")[0])


def test_what_happened_stays_above_the_picture(seen: Seen) -> None:
    assert seen.exit_code == 1  # a line was rejected
    text = "\n".join(seen.last)
    told = ["rejected line 3 (bad)", "2 jobs in ", "worker w1 is ready", "worker w1 is lost", "worker w2 is ready"]
    places = [text.index(line) for line in [*told, "run    finished after", "run finished; jobs: 2 finished"]]
    assert places == sorted(places)
    assert text.count("goes back, to resume from its checkpoint") == 2
    assert text.count("run    ") == 1  # one picture, in place
    assert "jobs   2 finished; 1 line rejected" in text
    assert "2 preemptions, 2 resumes" in text
    assert not seen.is_cursor_hidden


def test_a_watcher_sees_the_run_from_before_its_driver_to_its_end(seen: Seen) -> None:
    assert seen.watch_code == 0
    text = "\n".join(seen.watched)
    assert text.count("run    ") == 1
    assert "run    finished after" in text
    assert "2 preemptions, 2 resumes" in text
    assert "since the last start" in text


def test_a_watching_program_gets_objects(seen: Seen) -> None:
    beats = [json.loads(line) for line in seen.watch_json]
    assert {beat.pop("event") for beat in beats} == {"progress"}
    assert all(time.time() - 600 < beat.pop("time") < time.time() for beat in beats)
    states = [Progress.model_validate(beat).state for beat in beats]
    assert states == ["running"] * (len(beats) - 1) + ["finished"]
    assert beats[-1]["num_generated_tokens"] == 2 * NUM_TOKENS


def _row(lines: list[str], start: str) -> int:
    return next(i for i, line in enumerate(lines) if line.startswith(start))
