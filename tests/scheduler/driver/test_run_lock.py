"""A command holds a run from before its first change to after its last; whoever is refused has changed nothing."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.scheduler.driver.run_lease import LeaseEpoch, RunLease, RunTakenError, current_progress
from swiftbatch.scheduler.runs import submission
from swiftbatch.scheduler.runs.cancellation import cancel_jobs
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.jobs.run.run_parts import MANIFEST, PROGRESS, failed_line, make_record
from tests.jobs.storage.fault_proxy import FaultProxy
from tests.scheduler.driving import wait_until

NUM_COMMANDS = 6


@pytest.fixture(params=["local", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else str(request.getfixturevalue("s3_uri"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def claims_at_once(uri: str) -> list[LeaseEpoch | str]:
    """The hold or the refusal of each of many commands that want the same run."""
    barrier = threading.Barrier(NUM_COMMANDS)

    def claim(_: int) -> LeaseEpoch | str:
        run = Run.planned(uri, MANIFEST)
        barrier.wait()
        try:
            return LeaseEpoch.begin(run)
        except RunTakenError as error:
            return str(error)

    with ThreadPoolExecutor(NUM_COMMANDS) as pool:
        return list(pool.map(claim, range(NUM_COMMANDS)))


def test_of_many_claims_at_once_one_holds_the_run(uri: str) -> None:
    ends = claims_at_once(uri)
    held = [epoch for epoch in ends if isinstance(epoch, LeaseEpoch)]
    assert len(held) == 1
    assert all("held by another driver, process" in end for end in ends if isinstance(end, str))
    held[0].check()
    assert Run.planned(uri, MANIFEST).store.list("drivers") == [f"{held[0].number:04d}.json"]


def test_nobody_holds_a_run_whose_server_knows_no_conditions(s3_uri: str, s3_proxy: FaultProxy) -> None:
    s3_proxy.hidden_headers = {"if-none-match"}
    run = Run.planned(s3_uri, MANIFEST)
    with pytest.raises(StoreError, match="the server ignores"):
        LeaseEpoch.begin(run)
    assert run.store.list("drivers") == []


def test_of_two_submits_to_a_new_run_at_once_one_is_taken_in_whole_and_the_other_changes_nothing(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TextCodec(locate_model("embedded"))  # the first import of its library is not for two threads at once
    both_ready, both_done = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    make_records = submission.make_records

    def made(*args: Any) -> Any:
        records = list(make_records(*args))
        both_ready.wait()
        return records

    def submit(name: str) -> str:
        jobs = tmp_path / f"{name}.jsonl"
        jobs.write_text(f'{{"custom_id": "{name}", "prompt": "x", "max_tokens": 5}}\n{name}\n')
        try:
            with submission.submission(str(jobs), uri, Settings({"num_threads": 1})):
                both_done.wait()
            return name
        except RunTakenError:
            both_done.wait()
            return ""

    monkeypatch.setattr(submission, "make_records", made)
    with ThreadPoolExecutor(2) as pool:
        taken = sorted(pool.map(submit, ["a", "b"]))
    run = Run.open(uri)
    assert taken == ["", *(record.job.custom_id for record in run.jobs())]
    assert len(run.rejects()) == 1
    assert run.store.list("drivers") == ["0001.json"]


def test_jobs_that_two_add_at_once_are_all_there(uri: str) -> None:
    for number in range(20 if uri.startswith("/") else 3):
        run = Run.planned(f"{uri}/{number}", MANIFEST).made()
        if not uri.startswith("/"):
            run.add_jobs([make_record("first")])  # an object store does not keep two from writing one file
        barrier, names = threading.Barrier(2), ("a", "b")

        def add(name: str, place: str = run.store.uri, barrier: threading.Barrier = barrier) -> None:
            other = Run.open(place)
            barrier.wait()
            other.add_jobs([make_record(name), make_record("both")])

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(add, names))
        found = [record.job.custom_id for record in run.jobs()]
        assert sorted(found) == sorted([*names, "both", *(["first"] if not uri.startswith("/") else [])])
        assert run.job_ids() == [record.job_id for record in run.jobs()]


def test_a_run_with_one_table_of_jobs_takes_more_and_keeps_their_order(uri: str) -> None:
    run = Run.planned(uri, MANIFEST).made()
    for names in ("ab", "bc", "d"):
        run.add_jobs([make_record(name) for name in names])
    assert [record.job.custom_id for record in Run.open(uri).jobs()] == ["a", "b", "c", "d"]
    assert run.store.list("jobs")[0].startswith("000002-")
    run.store.delete_folder("jobs")
    assert [record.job.custom_id for record in Run.open(uri).jobs()] == ["a", "b"]


def test_a_held_run_is_seen_at_work_from_the_claim_on(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path), MANIFEST).made()
    run.add_jobs([make_record("a")])
    with RunLease(run) as hold:
        first = current_progress(run)
        assert (first.state, first.epoch, first.jobs["pending"]) == ("running", 1, 1)
        wait_until(lambda: current_progress(run).updated != first.updated)
        with pytest.raises(RunTakenError):
            RunLease(run, may_take_over=True)
        hold.epoch.check()
    last = run.progress()
    assert (last.state, last.jobs["pending"]) == ("interrupted", 1)
    RunLease(run).end("finished")


def test_a_job_is_cancelled_by_who_holds_the_run_also_while_that_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.planned(str(tmp_path), MANIFEST).made()
    run.add_jobs([make_record("a"), make_record("b")])
    run.request_cancel(None)
    at_first_beat: list[tuple[bool, set[str]]] = []
    beat = run.write_progress
    monkeypatch.setattr(
        run, "write_progress", lambda beaten: (at_first_beat.append(run.cancel_requests()), beat(beaten))
    )
    with RunLease(run, forgets_cancel=True):
        assert at_first_beat[0] == (False, set())  # who sees the beat may ask, and is not forgotten
        assert cancel_jobs(run, None) == "asked the driver to cancel 2 jobs"
        assert not run.ended()[1]
    assert run.cancel_requests() == (True, set())
    assert cancel_jobs(run, "a") == "cancelled job a"
    assert current_progress(run).jobs["cancelled"] == 1


def test_a_driver_is_asked_to_cancel_once_it_will_listen(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path), MANIFEST).made()
    run.add_jobs([make_record("a")])
    epoch = LeaseEpoch.begin(run)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(cancel_jobs, run, None)
        time.sleep(0.3)
        assert run.cancel_requests() == (False, set())
        starting = {"updated": time.time(), "epoch": epoch.number, "driver_host": epoch.claim.host}
        starting |= {"driver_pid": epoch.claim.pid, "driver_process": epoch.claim.process}
        run.write_progress(PROGRESS.model_copy(update=starting))
        assert answer.result(60) == "asked the driver to cancel 1 jobs"
    assert run.cancel_requests() == (True, set())


def test_what_was_asked_of_a_driver_that_ended_meanwhile_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.planned(str(tmp_path), MANIFEST).made()
    run.add_jobs([make_record("a")])
    hold = RunLease(run)
    ask = run.request_cancel
    monkeypatch.setattr(run, "request_cancel", lambda job_id: (hold.end("interrupted"), ask(job_id)))
    assert cancel_jobs(run, "a") == "cancelled job a"
    assert current_progress(run).jobs["cancelled"] == 1


def test_what_killed_writers_left_goes_with_the_next_hold(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path), MANIFEST).made()
    left = [f".output.jsonl.{'a' * 32}", f"results/.x.json.{'0' * 32}", f"errors/.x.json.{'1' * 32}"]
    mine = [".notes", ".output.jsonl.mine", "results/.x"]
    for name in (*left, *mine):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("half")
    RunLease(run).end("interrupted")
    assert not [name for name in left if (tmp_path / name).exists()]
    assert all((tmp_path / name).exists() for name in mine)


def test_a_command_that_is_refused_has_changed_nothing(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    run.add_jobs([make_record("a")])
    run.write_rejects([Reject(1, "x", "odd")])
    run.write_error("a", failed_line("cancelled"))
    run.request_cancel("a")
    LeaseEpoch.begin(run)
    before = contents(tmp_path)
    with pytest.raises(RunTakenError, match="held by another driver"):
        RunLease(run, may_take_over=True, forgets_cancel=True)
    assert contents(tmp_path) == before


def test_output_is_not_replaced_by_one_who_was_overtaken(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path), MANIFEST).made()
    run.store.write("output.jsonl", b"the other's")
    first = LeaseEpoch.begin(run)
    run.store.write("drivers/0002.json", first.claim.model_copy(update={"driver_id": "x"}).model_dump_json().encode())
    with pytest.raises(RunTakenError, match=f"taken over by process {os.getpid()}"):
        run.write_output(first.check)
    assert run.store.read("output.jsonl") == b"the other's"
