"""`swiftbatch nightly` runs only what is new, and two at once do no harm."""

from __future__ import annotations

import gzip
import json
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyarrow import parquet

from swiftbatch.jobs.input.reader import job_files_in
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.commands import nightly as nightly_command
from swiftbatch.scheduler.runs.folder_lock import file_of
from tests.jobs.run import run_parts
from tests.scheduler.commands.nightly_parts import held_elsewhere
from tests.scheduler.commands.submit_parts import submit_file
from tests.scheduler.driver.dispatch_parts import idle_workers

pytestmark = pytest.mark.long

DEADLINE_SECONDS = 120


def lines(*custom_ids: str, max_tokens: int = 8) -> str:
    jobs = [{"custom_id": name, "prompt": "the quick brown fox", "max_tokens": max_tokens} for name in custom_ids]
    return "".join(json.dumps(job) + "\n" for job in jobs)


def put(folder: Path, **files: str) -> Path:
    """Write `NAME.jsonl`; '__' in a name stands for '/'."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def nightly(inbox: Path | str, runs: Path | str, model: Path, *args: str) -> Result:
    command = ["nightly", str(inbox), "--runs", str(runs), "--model", str(model), *args]
    return CliRunner().invoke(main, command)


def finish(inbox: str, runs: str, path: str, model: Path) -> Run:
    run = submit_file(f"{inbox}/{path}", f"{runs}/{path}", model=str(model)).run
    for record in run.jobs():
        run_parts.finish(run, record, f"text of {record.job.custom_id}", 3)
    return run


def traces(runs: Path) -> dict[str, tuple[int, int]]:
    """Return every file's inode and time of change."""
    files = [path for path in runs.rglob("*") if path.is_file() and path.name != file_of("nightly")]
    return {str(path.relative_to(runs)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def test_the_same_command_again_runs_nothing_again(tmp_path: Path, tiny_model: Path) -> None:
    inbox, runs = put(tmp_path / "inbox", below__a=lines("x", "y")), tmp_path / "runs"
    first = nightly(inbox, runs, tiny_model, "--slots", "2")
    assert first.exit_code == 0, first.output
    assert "1 job file in " in first.stderr
    assert "1 of them to run" in first.stderr
    assert len(Run.open(str(runs / "below/a.jsonl")).ended()[0]) == 2
    assert (runs / "below/a.jsonl/output.jsonl").exists()
    before = traces(runs)
    second = nightly(inbox, runs, tiny_model, "--slots", "2")
    assert second.exit_code == 0
    assert "1 job file in " in second.stderr
    assert "0 of them to run" in second.stderr
    assert traces(runs) == before


@pytest.mark.parametrize("place", ["disk", "s3"])
def test_a_new_file_is_run_and_of_a_changed_one_what_is_missing(
    place: str, tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    root = str(tmp_path) if place == "disk" else request.getfixturevalue("s3_uri")
    inbox, runs, files = f"{root}/inbox", f"{root}/runs", Store(f"{root}/inbox")
    files.write("a.jsonl", lines("x", "y").encode())
    files.write("notes.txt", b"no job file")
    finish(inbox, runs, "a.jsonl", tiny_model)
    assert "1 of them to run" in nightly(inbox, runs, tiny_model).stderr
    files.write("b/c.jsonl", lines("x").encode())
    files.write("a.jsonl", lines("x", "y", "z").encode())
    for path in ("a.jsonl", "b/c.jsonl"):
        finish(inbox, runs, path, tiny_model)
    again = nightly(inbox, runs, tiny_model)
    assert again.exit_code == 0, again.output
    assert "2 job files" in again.stderr
    assert "2 of them to run" in again.stderr
    assert "3 jobs in" in again.stdout
    assert len(Run.open(f"{runs}/a.jsonl").ended()[0]) == 3
    assert "0 of them to run" in nightly(inbox, runs, tiny_model).stderr


def test_a_file_that_can_t_be_run_stops_no_other_and_is_tried_again(tmp_path: Path, tiny_model: Path) -> None:
    inbox, runs = put(tmp_path / "inbox", a=lines(), b=lines("x"), c=lines("x")), tmp_path / "runs"
    for name in ("b.jsonl", "c.jsonl"):
        finish(str(inbox), str(runs), name, tiny_model)
    (runs / "b.jsonl" / "run.json").write_text("{torn")
    for num_to_run in (3, 2):
        result = nightly(inbox, runs, tiny_model)
        assert result.exit_code == 1
        assert f"{num_to_run} of them to run" in result.stderr
        assert "a.jsonl was not run" in result.stderr
        assert "holds no jobs" in result.stderr
        assert "b.jsonl was not run" in result.stderr
        assert "run.json" in result.stderr


def test_a_file_of_another_kind_is_named_and_stops_no_other(tmp_path: Path, tiny_model: Path) -> None:
    inbox, runs = put(tmp_path / "inbox", a=lines("x"), b=lines("x")), tmp_path / "runs"
    (inbox / "b.jsonl").write_text(lines("x"), encoding="utf-16")
    (inbox / "c.jsonl").write_text(f"[{','.join(lines('x', 'y').splitlines())}]")
    (inbox / "d.jsonl.gz").write_bytes(gzip.compress(gzip.compress(lines("x").encode())))
    finish(str(inbox), str(runs), "a.jsonl", tiny_model)
    result = nightly(inbox, runs, tiny_model)
    assert result.exit_code == 1
    for found in ("UTF-16 text", "a JSON array", "gzip data in its gzip data"):
        assert sum(f": found {found}; expected" in line for line in result.stderr.splitlines()) == 1
    assert not list(runs.glob("[bcd]*/jobs*"))
    assert len(Run.open(f"{runs}/a.jsonl").ended()[0]) == 1


def test_a_file_with_bad_lines_is_told_of_once(tmp_path: Path, tiny_model: Path) -> None:
    inbox, runs = put(tmp_path / "inbox", a=lines("x") + "{broken\n"), tmp_path / "runs"
    finish(str(inbox), str(runs), "a.jsonl", tiny_model)
    first, second = nightly(inbox, runs, tiny_model), nightly(inbox, runs, tiny_model)
    assert (first.exit_code, second.exit_code) == (1, 0)
    assert "rejected line 2" in first.stderr


def test_what_is_no_file_in_the_inbox_is_skipped_and_told_and_the_others_are_run(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, runs = put(tmp_path / "inbox", a=lines("x"), b__c=lines("x")), tmp_path / "runs"
    os.mkfifo(inbox / "pipe.jsonl")
    (inbox / "gone.jsonl").symlink_to("nowhere")
    (inbox / "self.jsonl").symlink_to("self.jsonl")
    (inbox / "b" / "up").symlink_to("..")
    (inbox / "b" / "device.jsonl").symlink_to("/dev/zero")
    (inbox / "bad.jsonl").symlink_to("/proc/self/mem")  # nobody can read its first byte
    (inbox / "lost+found").symlink_to("nowhere")
    monkeypatch.chdir(inbox)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.jsonl")
        for path in ("a.jsonl", "b/c.jsonl"):
            finish(str(inbox), str(runs), path, tiny_model)
        result = nightly(inbox, runs, tiny_model)
    assert result.exit_code == 1
    assert "3 job files" in result.stderr
    assert "2 of them to run" in result.stderr
    assert [line for line in result.stderr.splitlines() if "was not read" in line] == [
        "b/device.jsonl was not read: a device, no file",
        "b/up was not read: a link to a folder that it is in",
        f"bad.jsonl was not read: cannot read 'bad.jsonl' in {inbox}: Input/output error, tried for 5 s; "
        "check that the folder can be read and written, or use another one",
        "gone.jsonl was not read: a link that leads nowhere",
        "pipe.jsonl was not read: a named pipe, no file",
        "self.jsonl was not read: Too many levels of symbolic links",
        "socket.jsonl was not read: a socket, no file",
    ]
    assert (runs / "a.jsonl" / "job-file.json").exists()
    assert (runs / "b/c.jsonl" / "job-file.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not look")
def test_a_folder_that_may_not_be_read_stops_no_other(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        inbox = put(Path(name), a=lines("x"), below__b=lines("x"))
        inbox.chmod(0o755)
        (inbox / "below").chmod(0)
        os.seteuid(65534)
        try:
            assert job_files_in(Store(name)) == (["a.jsonl"], {"below": "Permission denied"})
        finally:
            os.seteuid(0)


def test_compressed_files_are_run_and_a_damaged_mark_is_no_end(tmp_path: Path, tiny_model: Path) -> None:
    inbox, runs = put(tmp_path / "inbox", a=lines("x")), tmp_path / "runs"
    (inbox / "b.jsonl.gz").write_bytes(gzip.compress(lines("x", "y").encode()))
    (inbox / "c.jsonl.zst").write_bytes(pa.compress(lines("x").encode(), codec="zstd", asbytes=True))
    (inbox / "d.jsonl.gz").write_bytes(gzip.compress(lines("x").encode())[:-9])
    for path in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        finish(str(inbox), str(runs), path, tiny_model)
        (runs / path / "job-file.json").write_text("{torn")
    result = nightly(inbox, runs, tiny_model)
    assert result.exit_code == 1
    assert "4 of them to run" in result.stderr
    assert "d.jsonl.gz was not run: cannot read the job file" in result.stderr
    assert "gzip data is damaged or cut off: Truncated compressed stream" in result.stderr
    assert "1 of them to run" in nightly(inbox, runs, tiny_model).stderr


def test_job_files_of_any_name_are_run_and_named_in_a_line(tmp_path: Path, tiny_model: Path) -> None:
    inbox, runs, names = tmp_path / "inbox", tmp_path / "runs", ("a\n\x1b[2J\udcff.jsonl", "-.jsonl", "c?[b]%s{}.jsonl")
    inbox.mkdir()
    for name in names:
        (inbox / name).write_text(lines("x"))
        finish(str(inbox), str(runs), name, tiny_model)
    result = nightly(inbox, runs, tiny_model)
    assert result.exit_code == 0, result.output
    assert r"job file a\n\x1b[2J\udcff.jsonl" in result.stderr
    assert all(line.isprintable() for line in result.output.splitlines())
    assert "0 of them to run" in nightly(inbox, runs, tiny_model).stderr


def test_the_folders_are_refused_in_one_line_where_one_is_in_the_other_or_absent(
    tmp_path: Path, tiny_model: Path
) -> None:
    inbox = put(tmp_path / "inbox", a=lines("x"))
    for runs in (inbox / "runs", inbox, tmp_path):
        result = nightly(inbox, runs, tiny_model)
        assert result.exit_code == 2
        assert "expected two beside each other" in result.stderr
        assert result.stderr.count("\n") == 1
    assert [path.name for path in inbox.iterdir()] == ["a.jsonl"]
    result = nightly(tmp_path / "absent", tmp_path / "runs", tiny_model)
    assert result.exit_code == 2
    assert "no folder at" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_second_one_at_the_same_time_is_refused_and_runs_nothing(tmp_path: Path, tiny_model: Path) -> None:
    inbox, runs = put(tmp_path / "inbox", a=lines("x")), tmp_path / "runs"
    with held_elsewhere(runs) as other:
        result = nightly(inbox, runs, tiny_model)
        assert result.exit_code == 2
        assert f"process {other.pid} on {os.uname().nodename}, since" in result.stderr
        assert "--if-busy wait" in result.stderr
        assert result.stderr.count("\n") == 1
    assert [path.name for path in runs.iterdir()] == [file_of("nightly")]


def test_one_that_was_overtaken_leaves_the_other_files_to_its_successor(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, runs = put(tmp_path / "inbox", a=lines("x"), b=lines("x")), tmp_path / "runs"
    for name in ("a.jsonl", "b.jsonl"):
        finish(str(inbox), str(runs), name, tiny_model)
    run_file = nightly_command._run_file

    def and_meanwhile(*args: Any) -> int:
        code = run_file(*args)
        holder = json.loads((runs / file_of("nightly")).read_text())
        (runs / file_of("nightly")).write_text(json.dumps(holder | {"holder_id": "another"}))
        return code

    monkeypatch.setattr(nightly_command, "_run_file", and_meanwhile)
    result = nightly(inbox, runs, tiny_model)
    assert result.exit_code == 2
    assert "has taken over" in result.stderr
    assert (runs / "a.jsonl" / "job-file.json").exists()
    assert not (runs / "b.jsonl" / "job-file.json").exists()
    assert (runs / file_of("nightly")).exists()  # the successor's


def test_a_second_one_that_waits_goes_on_when_the_first_has_ended(tmp_path: Path, tiny_model: Path) -> None:
    inbox, runs = put(tmp_path / "inbox", a=lines("x")), tmp_path / "runs"
    finish(str(inbox), str(runs), "a.jsonl", tiny_model)
    results: list[Result] = []
    with held_elsewhere(runs) as other:
        waiting = threading.Thread(
            target=lambda: results.append(nightly(inbox, runs, tiny_model, "--if-busy", "wait")), daemon=True
        )
        waiting.start()
        time.sleep(1)
        assert not (runs / "a.jsonl" / "job-file.json").exists()
        assert results == []
        other.communicate("")
        waiting.join(DEADLINE_SECONDS)
    (result,) = results
    assert result.exit_code == 0, result.output
    assert result.stderr.count("waiting for it to end") == 1
    assert "1 of them to run" in result.stderr
    assert (runs / "a.jsonl" / "job-file.json").exists()
    assert not (runs / file_of("nightly")).exists()


def test_tables_are_job_files_too_with_the_columns_that_are_said(tmp_path: Path, tiny_model: Path) -> None:
    inbox, runs = tmp_path / "inbox", tmp_path / "runs"
    inbox.mkdir()
    parquet.write_table(pa.table({"text": ["Once", "Twice"]}), inbox / "[a].parquet")
    with idle_workers():
        done = nightly(inbox, runs, tiny_model, "--max-tokens", "4", "--column", "prompt=text")
    assert done.exit_code == 0, done.output
    names = [record.job.custom_id for record in Run.open(str(runs / "[a].parquet")).jobs()]
    assert names == ["[a].parquet:1", "[a].parquet:2"]


def test_runs_of_a_night_have_the_switches_that_decide_tokens(tmp_path: Path, tiny_model: Path) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    job = {"custom_id": "a", "prompt": "the quick", "max_tokens": 4, "structured_outputs": {"json": schema}}
    inbox, runs = put(tmp_path / "inbox", a=json.dumps(job)), tmp_path / "runs"
    with idle_workers():
        done = nightly(inbox, runs, tiny_model, "--lenient-schemas", "--plain-content")
    assert done.exit_code == 0, done.output
    run = Run.open(str(runs / "a.jsonl"))
    assert [record.job.custom_id for record in run.jobs()] == ["a"]
    assert (run.manifest.lenient_schemas, run.manifest.plain_content) == (True, True)
