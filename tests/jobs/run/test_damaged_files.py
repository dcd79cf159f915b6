"""A damaged file of a run is reported and kept, and costs only its own job."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.json_records import sealed
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.driver.queue_loading import load_queue
from swiftbatch.scheduler.driver.run_lease import LeaseEpoch, RunLease, RunTakenError, claims, current_progress
from tests.jobs.run.run_parts import FINISHED, MANIFEST, PROGRESS, failed_line, make_record, write_result

SHAPES = {
    "other-shape": b'{"custom_id": "b"}',
    "neither": b'{"custom_id": "b", "response": null, "error": null}',
    "no-choice": json.dumps(FINISHED).replace('{"text": "once", "finish_reason": "length"}', "").encode(),
    "no-text": json.dumps(FINISHED).replace('"text": "once", ', "").encode(),
    "text-of-a-number": json.dumps(FINISHED).replace('"once"', "1").encode(),
    "null-message": json.dumps(FINISHED).replace('"text"', '"message": null, "text"').encode(),
    "of-another-job": json.dumps(FINISHED | {"id": "batch_req_a-1"}).encode(),
    "deep-inside": json.dumps(FINISHED).replace('"metrics": {}', f'"metrics": {"[" * 99_999}').encode(),
}
CONTENTS = {
    "empty": b"",
    "zeros": bytes(900),
    "torn": b'{"custom_id": "b", "resp',
    "null": b"null",
    "list": b"[]",
    "wrong-type": b'{"line_number": "x", "custom_id": null, "reason": "x"}\n',
    "no-checksum": json.dumps(failed_line("cancelled")).encode(),
    "deep": b"[" * 200_000,
    "not-utf-8": b"\xff\xfe\x00",
    **{name: sealed(text) for name, text in SHAPES.items()},
}


def make_socket(path: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)  # the path of a socket must be short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


SHORT = ("empty", "zeros", "torn", "list", "no-checksum", "neither")  # what separates one kind of line from the other
OTHER_KINDS: dict[str, Callable[[Path], None]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": make_socket,
    "link-to-itself": lambda path: path.symlink_to(path.name),
    "link-to-nothing": lambda path: path.symlink_to("nowhere"),
}
DAMAGES: dict[str, Callable[[Path], None]] = OTHER_KINDS | {
    name: lambda path, data=data: path.write_bytes(data) and None for name, data in CONTENTS.items()
}


@pytest.fixture
def records() -> list[JobRecord]:
    return [make_record(name) for name in "abc"]


@pytest.fixture
def run(tmp_path: Path, records: list[JobRecord]) -> Run:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    run.add_jobs(records)
    for record in records[:2]:
        write_result(run, record.job_id, FINISHED | {"custom_id": record.job.custom_id})
    run.write_error(records[2].job_id, failed_line("cancelled"))
    return run


def invoke(*args: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, list(args))
    assert result.exit_code == exit_code, result.output
    return result


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "damage", [pytest.param(n, marks=() if n in (*OTHER_KINDS, *SHORT) else pytest.mark.slow) for n in DAMAGES]
)
def test_a_damaged_line_is_named_and_kept_and_its_job_alone_runs_again(
    run: Run, records: list[JobRecord], damage: str, tmp_path: Path
) -> None:
    record = records[2]
    path = Path(run.store.uri) / "errors" / f"{record.job_id}.json"
    path.unlink()
    DAMAGES[damage](path)
    found = path.read_bytes() if damage in CONTENTS else None
    told = f"errors/{record.job_id}.json in {run.store.uri} is damaged, "
    results = invoke("results", run.store.uri, exit_code=1)
    assert len(results.stdout.splitlines()) == 2
    assert results.stderr.count("\n") == 1
    assert told in results.stderr
    assert f"job {record.job.custom_id} runs again with: swiftbatch resume" in results.stderr
    assert told in invoke("report", run.store.uri, "--output", str(tmp_path / "report.html")).stderr
    status = invoke("status", run.store.uri)
    assert "no driver runs it" in status.stdout
    if damage in OTHER_KINDS or damage == "empty":  # finding the others needs reading, perhaps thousands
        assert told in status.stderr
        assert "1 pending" in status.stdout
    again = Run.open(run.store.uri)
    queue = load_queue(again, 5)
    assert queue.unfinished() == [record.job_id]
    [(old, problem, kept)] = again.set_damaged_aside(queue.unfinished())
    assert (old, kept) == (f"errors/{record.job_id}.json", f"damaged/errors/{record.job_id}.1.json")
    assert problem.startswith(("found", "field"))
    assert "\n" not in problem
    assert not os.path.lexists(path)
    assert os.path.lexists(Path(run.store.uri) / kept)
    assert found is None or (Path(run.store.uri) / kept).read_bytes() == found
    assert write_result(again, record.job_id, FINISHED)
    assert again.set_damaged_aside([record.job_id]) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_job_whose_line_is_damaged_can_be_cancelled(run: Run, records: list[JobRecord], damage: str) -> None:
    path = Path(run.store.uri) / f"errors/{records[2].job_id}.json"
    path.unlink()
    DAMAGES[damage](path)
    ended = run.ended()[1]
    assert invoke("cancel", run.store.uri).stdout.endswith("ended already\n" if ended else "cancelled 1 jobs\n")
    assert (run.error(records[2].job_id) is None) == bool(ended)


@pytest.mark.sample(3)
@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in ("empty", "neither")])
def test_damaged_rejects_are_told_of_and_refuse_no_command(run: Run, damage: str, tmp_path: Path) -> None:
    folder = Path(run.store.uri)
    DAMAGES[damage](folder / "rejects.jsonl")
    told = f"rejects.jsonl in {folder} is damaged, found no list of rejected lines: submit the job file again\n"
    for command in (["status", run.store.uri], ["report", run.store.uri, "--output", str(tmp_path / "report.html")]):
        assert ("" if damage in OTHER_KINDS else told) in invoke(*command).stderr
    RunLease(run).end("interrupted")
    if damage in CONTENTS:
        run.write_rejects([Reject(1, "x", "odd")])
        assert Run.open(run.store.uri).rejects() == [Reject(1, "x", "odd")]


def test_an_error_of_another_job_says_whose_it_is(run: Run, records: list[JobRecord]) -> None:
    run.write_error(records[2].job_id, failed_line("cancelled") | {"id": "batch_req_a-1"})
    assert run.error(records[2].job_id) is None
    [told] = run.damaged.values()
    assert told == f"found a file of job a-1, expected one of job {records[2].job_id}"


def test_a_line_that_is_damaged_again_keeps_the_first_one_too(run: Run, records: list[JobRecord]) -> None:
    for text in ("one", "two"):
        run.store.write(f"errors/{records[2].job_id}.json", text.encode())
        run.set_damaged_aside([records[2].job_id])
    names = run.store.list("damaged/errors")
    assert [run.store.read(f"damaged/errors/{name}") for name in names] == [b"one", b"two"]


def test_a_damaged_line_in_an_object_store_is_kept_too(s3_uri: str, records: list[JobRecord]) -> None:
    run = Run.planned(s3_uri, MANIFEST).made()
    run.add_jobs(records)
    run.store.write(f"errors/{records[0].job_id}.json", b"")
    run.store.write(f"errors/{records[1].job_id}.json", b"{torn")
    queue = load_queue(run, 5)
    assert len(queue.unfinished()) == 3
    assert len(run.set_damaged_aside(queue.unfinished())) == 2
    assert run.store.read(f"damaged/errors/{records[1].job_id}.1.json") == b"{torn"
    assert run.ended()[1] == set()


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "neither"])
def test_a_damaged_heartbeat_or_claim_holds_nothing_up(run: Run, damage: str) -> None:
    folder = Path(run.store.uri)
    for name in ("progress.json", "drivers/0001.json", "cancel/run.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        DAMAGES[damage](folder / name)
    assert current_progress(run).jobs["finished"] == 2
    assert run.cancel_requests()[1] == set()
    assert claims(run) == []
    (folder / "drivers/0001.json").rename(folder / "drivers/old")
    epoch = LeaseEpoch.begin(run)
    epoch.check()
    if damage in CONTENTS:
        run.write_progress(PROGRESS)
        assert run.progress() == PROGRESS


def test_where_both_claim_and_heartbeat_are_damaged_only_the_user_can_say_that_nobody_is_at_work(run: Run) -> None:
    run.store.write("drivers/0003.json", b"")
    result = CliRunner().invoke(main, ["resume", run.store.uri])
    assert result.exit_code == 2
    assert LeaseEpoch.begin(run, may_take_over=True).number == 4
    run.store.delete("drivers/0004.json")
    with pytest.raises(RunTakenError, match=r"nothing is known but the damaged drivers/0003\.json; if that driver"):
        LeaseEpoch.begin(run)


def test_a_driver_whose_successor_s_claim_is_damaged_stops(run: Run) -> None:
    epoch = LeaseEpoch.begin(run)
    run.store.write("drivers/0001.json", b"")
    epoch.check()  # nobody else can have written that number
    run.store.write("drivers/0002.json", b"{torn")
    with pytest.raises(RunTakenError, match="taken over by another driver"):
        epoch.check()


@pytest.mark.parametrize("moment", [-1e18, -1.0, 1e12, 1e300, float("nan")])
def test_a_time_that_no_clock_shows_is_damage(run: Run, moment: float, tmp_path: Path) -> None:
    beat = json.loads(PROGRESS.model_dump_json())
    claim = {"host": "h", "pid": 1, "driver_id": "d", "started": moment}
    run.store.write("drivers/0001.json", json.dumps(claim).encode())
    assert claims(run) == []
    for name in ("updated", "started"):
        run.store.write("progress.json", json.dumps(beat | {"state": "finished", name: moment}).encode())
        invoke("status", run.store.uri)
        invoke("report", run.store.uri, "--output", str(tmp_path / "report.html"))
