"""Makes the pages' pictures from real runs: `python -m tests.pictures`, or with names such as `submit report serve`.

`report` and `serve` need chromium and chromedriver.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from swiftbatch.jobs.python_processes import environment_of_code
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress, RunError
from swiftbatch.scheduler.demo.__main__ import SAMPLING, prepare
from swiftbatch.scheduler.demo.prompts import PROMPTS
from tests import ROOT
from tests.pictures.screen_picture import draw
from tests.scheduler.display.terminal_parts import Terminal
from tests.scheduler.driving import swiftbatch, wait_until
from tests.scheduler.serve.pages.browser_parts import IS_INSTALLED, Browser, browsing
from tests.scheduler.serve.server_parts import Server, request, serving

METRICS, DOCS = ROOT / "metrics" / "pictures", ROOT / "docs" / "pictures"
COLUMNS, LINES = 104, 22
LONGER = 6000  # tokens per demo job, so that none ends before the new worker begins
WIDE, PHONE = (1200, 900), (390, 700)
REPORT = (1200, 1600)
NUM_REPORTED = 24  # jobs of the reported run
UNDER_WAY = re.compile(r"[1-9],\d{3} of at most")  # tokens of a batch


def submit_picture() -> None:
    """Draw the demo's terminal with longer texts, after a worker was killed and replaced."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        jobs_file = prepare(Path("demo-run"))
        jobs = [json.loads(line) | {"max_tokens": LONGER} for line in jobs_file.read_text().splitlines()]
        jobs_file.write_text("".join(json.dumps(job) + "\n" for job in jobs))
        command = ["submit", str(jobs_file), "--run", "demo-run", "--workers", "2", "--slots", "2"]
        with Terminal([*swiftbatch(*command), "--checkpoint-seconds", "2"], COLUMNS, LINES) as terminal:
            kill_at(terminal, Path("demo-run"), LONGER)
            terminal.wait_for(lambda text: "2 resumes" in text and text.count(" 2 jobs, ") == 2)
            draw(terminal.screen, f"$ swiftbatch {' '.join(command)}", METRICS / "submit.png")
            terminal.wait()


def kill_at(terminal: Terminal, run: Path, num_tokens: int) -> None:
    terminal.wait_for(lambda _: tokens_of(run) >= num_tokens and busy(run))
    os.kill(busy(run)[0], signal.SIGKILL)


def progress_of(run: Path) -> Progress | None:
    try:
        return Run.open(str(run)).progress()
    except RunError:
        return None


def tokens_of(run: Path) -> int:
    progress = progress_of(run)
    return progress.num_generated_tokens if progress else 0


def busy(run: Path) -> list[int]:
    progress = progress_of(run)
    return [worker.pid for worker in progress.workers if worker.jobs] if progress else []


def report_picture() -> None:
    """Draw the top of the report of a run that lost two workers."""
    names = [f"{name}-{number}" for number in range(1, 1 + NUM_REPORTED // len(PROMPTS)) for name in PROMPTS]
    counts = {name: 600 + 300 * (number % 7) for number, name in enumerate(names)}
    jobs = [
        {"custom_id": name, "prompt": PROMPTS[name.rpartition("-")[0]], "max_tokens": count, **SAMPLING}
        for name, count in counts.items()
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
        command = swiftbatch("submit", "jobs.jsonl", "--run", "night-batch", "--workers", "2", "--slots", "2")
        with Terminal([*command, "--checkpoint-seconds", "1"], COLUMNS, LINES) as terminal:
            for share in (4, 2):
                kill_at(terminal, Path("night-batch"), sum(counts.values()) // share)
            terminal.wait()
        with Terminal(swiftbatch("report", "night-batch", "--output", "report.html"), COLUMNS, LINES) as terminal:
            terminal.wait()
        with browsing() as browser:
            photograph(browser, Path("report.html").resolve().as_uri(), REPORT, METRICS / "report.png")


def serve_pictures() -> None:
    options = ("--slots", "4", "--max-running", "2")
    with tempfile.TemporaryDirectory() as folder, serving(folder, Path("embedded"), *options) as server:
        for name, num_jobs in (("Essays of the spring", 6), ("Poems", 12)):
            server.ended(batch(server, name, num_jobs, 100))
        batch(server, "Essays of the summer", 7, 4000)
        second = batch(server, "Second book", 4, 9000)
        with browsing() as browser:
            page = f"{server.url}/batches/{second}"
            browser.open(page)
            wait_until(lambda: UNDER_WAY.search(browser.run("return document.body.textContent")))
            photograph(browser, page, PHONE, DOCS / "serve-batch-phone.png")
            photograph(browser, f"{server.url}/", WIDE, DOCS / "serve-list-wide.png")


def batch(server: Server, name: str, num_jobs: int, max_tokens: int) -> str:
    prompts = list(PROMPTS.values())
    lines = [
        request(f"{name[:4]}-{number}", max_tokens, prompt=prompts[number % len(prompts)], temperature=0.8, min_p=0.05)
        for number in range(num_jobs)
    ]
    file_id = server.upload(*lines, name=f"{name.lower().replace(' ', '-')}.jsonl")
    made = server.client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h", metadata={"name": name}
    )
    return made.id


def photograph(browser: Browser, url: str, size: tuple[int, int], path: Path) -> None:
    browser.show(*size)
    browser.open(url)
    time.sleep(0.5)  # until the layout has this width
    path.write_bytes(browser.picture())


MAKERS: dict[str, Callable[[], None]] = {
    "submit": submit_picture,
    "report": report_picture,
    "serve": serve_pictures,
}
IN_A_BROWSER = ("report", "serve")


def main(names: list[str]) -> None:
    os.environ.update(environment_of_code())  # commands run this code in any folder
    for name in names or MAKERS:
        if name in IN_A_BROWSER and not IS_INSTALLED:
            print(f"{name}: left out: it needs chromium and chromedriver, which are not installed")
            continue
        MAKERS[name]()
        print(f"{name}: made")


if __name__ == "__main__":
    main(sys.argv[1:])
