from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.scheduler.display.display import Frame, LiveDisplay
from swiftbatch.scheduler.display.events import JobCancelled, JobGivenUp, WorkerLost, WorkerReady
from swiftbatch.scheduler.display.progress_line import printable
from swiftbatch.scheduler.process.streams import Lines
from tests.scheduler.display.progress_parts import NOW, make_progress, make_worker


def drawn(progress: Progress, width: int, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, color_system=None, force_terminal=True)
    with console.capture() as capture:
        console.print(Frame(progress))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 140])
def test_a_picture_has_figures_workers_and_jobs(width: int) -> None:
    workers = (make_worker(1, "story-1", "story-2", last_checkpoint=NOW - 4), make_worker(2))
    progress = make_progress(workers=workers, num_rejects=3, num_starting_workers=1, mean_acceptance_length=2.0)
    rows = [line.split() for line in drawn(progress, width)]
    assert " ".join(rows[0]) == "run running for 0:01:40, at most 0:01:05 left"
    assert " ".join(rows[1][-4:]) == "of up to 6,000"
    assert " ".join(rows[2]) == "jobs 1 pending, 2 running; 3 lines rejected"
    assert " ".join(rows[3]) == "speed 100.0 tokens/s, 2.00 tokens/step"
    assert " ".join(rows[4]) == "safety checkpoint 4 s ago"
    place = "w1 on h, process 4701" if width == 140 else "w1 on h"
    assert " ".join(rows[5]) == f"{place} 2 jobs, 50.0 tokens/s, checkpoint 4 s ago"
    assert rows[6][0] == "story-1"
    assert " ".join(rows[6][-5:]) == "500 of up to 2,000"
    assert rows[7][0] == "story-2"
    assert " ".join(rows[8][-4:]) == "0 jobs, 50.0 tokens/s"
    assert " ".join(rows[9]) == "1 worker starting"
    quarter, whole = (sum(map("━╸".count, row)) for row in ("".join(rows[6]), "".join(rows[7])))
    assert quarter == pytest.approx(whole / 4, abs=1)


@pytest.mark.parametrize("size", [(30, 8), (80, 5), (80, 9), (80, 10), (80, 24), (140, 40), (400, 100)])
@pytest.mark.parametrize("num_workers", [0, 1, 8, 60])
def test_a_picture_fits_the_terminal(size: tuple[int, int], num_workers: int) -> None:
    width, height = size
    jobs = [[f"上海-{'x' * 90}-{n}-{slot}" for slot in range(3)] for n in range(num_workers)]
    workers = tuple(make_worker(n, *names, host="node-" + "y" * 60) for n, names in enumerate(jobs))
    lines = drawn(make_progress(workers=workers, num_starting_workers=2, num_rejects=1), width, height)
    assert all(cell_len(line) <= width for line in lines)
    assert len(lines) < max(height, 6)
    shown = sum("node-" in line for line in lines)
    more = next((int(line.split()[1]) for line in lines if line.startswith("and ")), 0)
    if height > 8:
        assert shown + more == num_workers
        has_jobs = any("上海" in line for line in lines)
        assert has_jobs == (0 < num_workers * 4 <= height - 6)


def test_a_terminal_keeps_notes_above_one_picture() -> None:
    output, errors = io.StringIO(), io.StringIO()
    with LiveDisplay(output, Lines(errors)) as shown:
        shown.note(WorkerReady("w1", "h", 1))
        shown.update(make_progress())
        shown.note(WorkerLost("w1", "worker_died", "[bold]its process ended" + " again" * 40))
        shown.note(JobGivenUp("a", "given up"))
        shown.note(JobCancelled("b"))
    shown.note(WorkerReady("w2", "h", 1))
    text = output.getvalue()
    assert "[bold]its process ended" + " again" * 40 + "\n" in text  # a line to copy is not wrapped
    assert text.index("w1 is ready") < text.index("tokens/s") < text.rindex("w2 is ready")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert errors.getvalue() == "job a is given up\n"


def test_a_name_can_not_steer_the_terminal() -> None:
    hostile = "\x1b[2J\r\nworker\u202e\x07"
    lines = drawn(make_progress(workers=(make_worker(1, hostile),)), 80)
    assert all(line.isprintable() for line in lines)
    assert printable(hostile)[:20] in lines[-1]
