from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.driver.run_lease import current_progress
from tests.scheduler.commands.command_parts import finish, invoke, job, write_jobs
from tests.scheduler.commands.submit_parts import submit_file

PAST = "2020-01-01T00:00"


def use_up(run: Run, num_tokens: int, worker_seconds: float = 0.0) -> None:
    used = {"num_total_tokens": num_tokens, "worker_seconds": worker_seconds, "reached_limit": "an older one"}
    run.write_progress(current_progress(run).model_copy(update=used))


def test_a_used_up_limit_starts_nothing_and_says_how_to_go_on(run: Run) -> None:
    use_up(run, 5012, 1800.0)
    result = invoke("resume", run.store.uri, "--max-total-tokens", "5000", "--max-worker-hours", "0.5")
    assert result.exit_code == 3
    reached = "--max-total-tokens 5,000 (5,012 were generated) and --max-worker-hours 0.5 (0.5 were used)"
    assert result.output.splitlines()[1:] == [
        f"stopping at {reached}: nothing is lost",
        "run interrupted; jobs: 3 pending",
        f"stopped at {reached}; to go on, with larger limits or none: swiftbatch resume {run.store.uri}",
    ]
    status = invoke("status", run.store.uri)
    assert f"stopped at {reached}\nno driver runs it; go on with: swiftbatch resume {run.store.uri}\n" in status.output
    progress = run.progress()
    assert (progress.num_total_tokens, progress.worker_seconds) == (5012, 1800.0)


def test_programs_and_log_files_are_told_of_a_limit(run: Run) -> None:
    use_up(run, 9)
    arguments = ["resume", run.store.uri, "--max-total-tokens", "9"]
    events = [json.loads(line) for line in invoke(*arguments, "--json").stdout.splitlines()]
    limit = "--max-total-tokens 9 (9 were generated)"
    assert [(event["event"], event.get("limit"), event.get("exit_code")) for event in events[1:]] == [
        ("limit_reached", limit, None),
        ("run_ended", limit, 3),
    ]
    (line,) = invoke(*arguments, "--quiet").stdout.splitlines()
    assert line.endswith(f"swiftbatch resume {run.store.uri}")


def test_a_limit_holds_back_nothing_where_all_jobs_have_ended(run: Run) -> None:
    for name in "abc":
        finish(run, name, "text")
    use_up(run, 10**6)
    result = invoke("resume", run.store.uri, "--max-total-tokens", "1", "--deadline", PAST)
    assert result.exit_code == 0, result.output
    assert "run finished; jobs: 3 finished" in result.output
    assert current_progress(run).reached_limit is None


@pytest.mark.parametrize("limits", [["--deadline", PAST], ["--max-total-tokens", "50"]])
def test_a_night_leaves_what_reaches_a_limit_to_the_next_one(
    limits: list[str], tmp_path: Path, tiny_model: Path
) -> None:
    inbox, runs = tmp_path / "inbox", tmp_path / "runs"
    inbox.mkdir()
    for name in ("a", "b"):
        path = write_jobs(inbox / f"{name}.jsonl", job("x"))
        run = submit_file(path, str(runs / f"{name}.jsonl"), model=str(tiny_model)).run
        use_up(run, 100 if name == "a" else 0)
        if name == "b":
            finish(run, "x", "text")
    command = ["nightly", str(inbox), "--runs", str(runs), "--model", str(tiny_model)]
    result = CliRunner().invoke(main, [*command, *limits])
    assert result.exit_code == 3
    is_over = "--deadline" in limits
    assert ("the deadline has passed; job files left: 2" in result.stderr) == is_over
    assert ("stopping at --max-total-tokens 50" in result.stdout) == (not is_over)
    assert (runs / "b.jsonl" / "job-file.json").exists() == (not is_over)  # the limit is per run
    assert not (runs / "a.jsonl" / "job-file.json").exists()
