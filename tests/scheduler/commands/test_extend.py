"""`extend` and `prune`: what they do, refuse and leave on disk."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.checkpoints.token_log import TokenLog
from swiftbatch.jobs.run.output_line import error_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.run_lease import RunLease
from swiftbatch.scheduler.runs import launch
from tests.jobs.checkpoints.checkpoint_parts import claim
from tests.scheduler.commands.command_parts import invoke, job, refusal, write_jobs
from tests.scheduler.commands.submit_parts import submit_file
from tests.scheduler.runs.extension_parts import finish

POSITIONS = 4096  # of the tiny model


@pytest.fixture(autouse=True)
def _without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends all unfinished jobs at their `max_tokens`."""

    def finish_all(run: Run, hold: RunLease, queue: JobQueue, *_: object) -> tuple[str, None]:
        records = {record.job_id: record for record in run.jobs()}
        for job_id in queue.unfinished():
            finish(run, records[job_id])
            CheckpointStore.of(run).clear(job_id)
        run.write_output(hold.epoch.check)
        hold.end("finished")
        return "finished", None

    monkeypatch.setattr(launch, "_drive", finish_all)
    monkeypatch.setattr(launch, "connect", lambda *_: contextlib.nullcontext())


@pytest.fixture
def finished(run: Run) -> Run:
    for record in run.jobs():
        finish(run, record)
    return run


def extend(run: Run, *args: str, code: int = 0) -> str:
    result = invoke("extend", run.store.uri, *args)
    assert result.exit_code == code, result.output
    return result.output


def lines(run: Run) -> dict[str, int]:
    found = [json.loads(line) for line in run.store.read("output.jsonl").splitlines()]
    responses = {line["custom_id"]: line["response"] for line in found}
    return {name: response["body"]["usage"]["completion_tokens"] for name, response in responses.items() if response}


def test_all_or_the_named_jobs_go_on_and_their_lines_are_replaced_in_place(finished: Run) -> None:
    assert "1 job to go on, 20 tokens are there; each has 30 tokens at most" in extend(
        finished, "--max-tokens", "30", "b"
    )
    assert list(lines(finished).items()) == [("a", 20), ("b", 30), ("c", 20)]
    assert "3 jobs to go on, 70 tokens are there" in extend(finished, "--max-tokens", "40")
    assert list(lines(finished).items()) == [("a", 40), ("b", 40), ("c", 40)]
    results = [json.loads(line) for line in invoke("results", finished.store.uri).stdout.splitlines()]
    assert [line["response"]["body"]["choices"][0]["text"] for line in results][:1] == ["40 tokens of a"]
    assert invoke("tail", finished.store.uri, "b").output == "40 tokens of b\n"
    assert "nothing new to extend" in extend(finished, "--max-tokens", "40")  # the same again


def test_the_same_job_file_again_is_the_same_jobs_and_a_changed_line_is_refused(
    finished: Run, jobs_file: str, tmp_path: Path
) -> None:
    extend(finished, "--max-tokens", "30", "b")
    before = finished.jobs()
    longer = write_jobs(tmp_path / "longer.jsonl", job("a"), job("b", 30))
    for path in (jobs_file, longer):
        again = submit_file(path, finished.store.uri)
        assert (again.rejects, again.run.jobs()) == ([], before)
    changed = submit_file(write_jobs(tmp_path / "changed.jsonl", job("b", 25)), finished.store.uri)
    assert [reject.custom_id for reject in changed.rejects] == ["b"]
    assert changed.run.jobs() == before


def test_each_job_that_can_t_go_on_is_told_of_with_its_reason_and_the_others_do(run: Run) -> None:
    a, b, c = run.jobs()
    finish(run, a, "stop", 7)
    finish(run, b)
    run.write_error(c.job_id, error_line(c, "cancelled", "cancelled by its user"))
    told = extend(run, "--max-tokens", "30", "a", "b", "c", code=1)
    assert "not extended: job a: it ended with finish_reason 'stop', expected 'length'" in told
    assert "not extended: job c: it has no result (cancelled)" in told
    assert lines(run) == {"a": 7, "b": 30}
    run.clear_errors()
    told = extend(run, "--max-tokens", "25", "b", code=1)
    assert "not extended: job b: --max-tokens: found 25, expected more than the 30 that it may have" in told
    assert "may have 30 tokens already: b\nnothing new to extend" in extend(run, "--max-tokens", "30", "b")
    told = extend(run, "--max-tokens", "25")  # jobs that ended by themselves are no error
    assert "1 job to go on" in told
    assert lines(run) == {"a": 7, "b": 30, "c": 25}


@pytest.mark.parametrize("words", [("extend", "--max-tokens", "30", "b"), ("fork", "b", "--at", "10", "--seeds", "2")])
def test_what_workers_cannot_have_is_refused_before_a_job_is_noted(finished: Run, words: tuple[str, ...]) -> None:
    before, (command, *rest) = finished.jobs(), words
    said = refusal(command, finished.store.uri, *rest, "--gpus-per-worker", "2")
    assert "--gpus-per-worker 2: " in said
    assert said.endswith("but the device is a CPU; leave it away")
    assert finished.jobs() == before


def test_a_run_with_nothing_to_do_needs_no_gpus(finished: Run) -> None:
    assert "3 jobs to go on" in extend(finished, "--max-tokens", "25")
    assert "nothing new to extend" in extend(finished, "--max-tokens", "25", "--gpus-per-worker", "2")
    manifest = finished.store.uri + "/run.json"
    Path(manifest).write_text(Path(manifest).read_text().replace('"device": "cpu"', '"device": "cuda"'))
    assert "nothing new to extend" in extend(finished, "--max-tokens", "25")
    assert "the run was made for cuda" in refusal("extend", finished.store.uri, "--max-tokens", "30")


def test_more_tokens_than_the_model_has_positions_are_refused_for_that_job_alone(
    tmp_path: Path, tiny_model: Path
) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", job("short", prompt=[5]), job("long", prompt=[5, 6, 7]))
    run = submit_file(path, str(tmp_path / "run"), model=str(tiny_model)).run
    for record in run.jobs():
        finish(run, record)
    told = extend(run, "--max-tokens", str(POSITIONS - 1), code=1)
    assert told.count("not extended") == 1
    assert (
        "job long: prompt (3 tokens) and --max-tokens (4095) need 4098 positions, expected at most the model's" in told
    )
    assert lines(run) == {"short": POSITIONS - 1, "long": 20}


def test_a_job_that_has_not_ended_is_told_of_and_runs_to_its_own_limit(run: Run) -> None:
    told = "not extended: job a: it has not ended: it runs to its 20 tokens now, then give this command again"
    assert told in extend(run, "--max-tokens", "30", "a", code=1)
    assert lines(run) == {"a": 20, "b": 20, "c": 20}
    assert "1 job to go on, 20 tokens are there" in extend(run, "--max-tokens", "30", "a")
    assert lines(run) == {"a": 30, "b": 20, "c": 20}
    assert "no job 'd'" in refusal("extend", run.store.uri, "--max-tokens", "30", "d")


def test_a_damaged_or_foreign_log_is_never_gone_on_from(finished: Run) -> None:
    a, b, _ = finished.jobs()
    path = f"tokens/{a.job_id}.bin"
    data = finished.store.read(path) or b""
    finished.store.write(path, data[:-1])
    kept = KeptLogs.of(finished)
    kept.write(b.job_id, TokenLog(kept.read(b.job_id).token_ids[:-1]))
    told = extend(finished, "--max-tokens", "30", code=1)
    assert "job a: its tokens are not kept: found " in told
    assert "bytes that do not match their checksum" in told
    assert "job b: the kept token log is not that of its result" in told
    assert lines(finished) == {"a": 20, "b": 20, "c": 30}


def test_the_kept_log_of_another_job_is_named(finished: Run) -> None:
    a, b, _ = finished.jobs()
    finished.store.write(f"tokens/{a.job_id}.bin", finished.store.read(f"tokens/{b.job_id}.bin") or b"")
    told = extend(finished, "--max-tokens", "30", code=1)
    expected = f"found a file of job {b.job_id}, expected one of job {a.job_id}"
    assert f"not extended: job a: its tokens are not kept: {expected}" in told
    assert lines(finished) == {"a": 20, "b": 30, "c": 30}


def test_while_the_run_is_worked_on_both_commands_are_refused_and_change_nothing(finished: Run) -> None:
    with RunLease(finished):
        before = {
            path: path.read_bytes() for path in Path(finished.store.uri).rglob("*.*") if "progress" not in path.name
        }
        for args in (["extend", finished.store.uri, "--max-tokens", "30"], ["prune", finished.store.uri]):
            assert "driver" in refusal(*args)
        assert before == {path: path.read_bytes() for path in before}
    assert "3 jobs to go on" in extend(finished, "--max-tokens", "30")


def test_a_longer_job_that_is_cancelled_leaves_the_shorter_result_and_goes_on_when_retried(
    finished: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(launch, "load_queue", lambda *_: JobQueue(1))  # as if it were killed here
        extend(finished, "--max-tokens", "30", "b", code=1)
    assert lines(finished) == {"a": 20, "b": 20, "c": 20}
    assert "cancelled job b" in invoke("cancel", finished.store.uri, "b").output
    assert lines(finished) == {"a": 20, "b": 20, "c": 20}
    counts = json.loads(invoke("status", finished.store.uri, "--json").output)["jobs"]
    assert (counts["finished"], counts["cancelled"]) == (2, 1)
    assert invoke("resume", finished.store.uri, "--retry-failed").exit_code == 0
    assert lines(finished) == {"a": 20, "b": 30, "c": 20}


def test_status_says_what_is_kept_and_prune_drops_it(finished: Run) -> None:
    checkpoints = CheckpointStore.of(finished)
    a, *_ = finished.jobs()
    claim(checkpoints, a.job_id, "w1")
    uri, num_bytes = finished.store.uri, sum(KeptLogs.of(finished).sizes().values())
    kept = f"3 token logs ({num_bytes} bytes), 1 job state ("
    assert f"kept for `swiftbatch extend`: {kept}" in invoke("status", uri).output
    assert "freed " in (told := invoke("prune", uri, "--state").output)
    assert "1 job state" in told
    assert "token log" not in told
    assert checkpoints.attempts(a.job_id) == []
    assert invoke("prune", uri).output == f"freed {num_bytes} bytes: 3 token logs ({num_bytes} bytes)\n"
    assert invoke("prune", uri).output == "nothing to drop: 0 bytes freed\n"
    assert "kept for" not in invoke("status", uri).output
    told = extend(finished, "--max-tokens", "30", "b", code=1)
    assert "job b: its tokens are not kept: found no token log; a run keeps them unless `swiftbatch prune`" in told
    assert lines(finished) == {"a": 20, "b": 20, "c": 20}


def test_prune_leaves_the_checkpoints_of_jobs_that_may_still_go_on(run: Run) -> None:
    a, b, c = run.jobs()
    finish(run, a)
    run.write_error(b.job_id, error_line(b, "attempts_failed", "given up"))
    checkpoints = CheckpointStore.of(run)
    for record in (a, b, c):
        claim(checkpoints, record.job_id, "w1")
    assert "1 job state" in invoke("prune", run.store.uri, "--state").output
    assert [len(checkpoints.attempts(record.job_id)) for record in (a, b, c)] == [0, 1, 1]
    assert "go on with: swiftbatch resume" in invoke("status", run.store.uri).output
    assert "1 token log" in invoke("status", run.store.uri).output
