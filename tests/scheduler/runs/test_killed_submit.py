"""A `submit` that is killed between any two of its changes to a run has lost nothing, and is in nobody's way."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from swiftbatch.jobs.run.run import MANIFEST, Run
from swiftbatch.jobs.storage.object_store import PROBE, ObjectFolder
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.driver import run_lease
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.run_lease import RunLease
from swiftbatch.scheduler.process.process_id import own_key
from swiftbatch.scheduler.runs import launch, submission
from swiftbatch.scheduler.runs.run_settings import Settings
from tests.jobs.run.run_parts import FINISHED, write_result

pytestmark = pytest.mark.long

Files = dict[str, bytes]
CHANGES = ("mkdir", "replace", "link", "unlink", "fsync")
RANDOM = re.compile(r"[0-9a-f]{8,}")


class States:
    """The contents that a run went through, each kind once: what a kill at that moment would have left."""

    def __init__(self) -> None:
        self.seen: dict[object, Files] = {}

    def add(self, files: Files) -> None:
        self.seen.setdefault(frozenset((RANDOM.sub("", path), len(data)) for path, data in files.items()), files)

    def watch_disk(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        """Look at the folder before every operation that changes it, and amid the writing of each file."""

        def watched(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                files = {
                    str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
                }
                self.add(files)
                for path, data in files.items():
                    if name == "fsync" and "/." in f"/{path}":  # a file that has yet to get its name
                        self.add({**files, path: b""})
                        self.add({**files, path: data[: len(data) // 2]})
                return change(*args, **options)

            return call

        for name in CHANGES:
            patch.setattr(os, name, watched(name, getattr(os, name)))

    def watch_objects(self, files: Files, patch: pytest.MonkeyPatch) -> None:
        """Follow every change to objects, `files` at first."""
        delete, delete_folder = ObjectFolder.delete, ObjectFolder.delete_folder

        def noted(put: Callable[..., bool | None]) -> Callable[..., bool | None]:
            def call(objects: ObjectFolder, path: str, data: memoryview) -> bool | None:
                is_put = put(objects, path, data)
                if is_put is not False and path != PROBE:
                    files[path] = bytes(data)
                    self.add(dict(files))
                return is_put

            return call

        def forgotten(objects: ObjectFolder, path: str) -> None:
            delete(objects, path)
            files.pop(path, None)
            self.add(dict(files))

        def all_forgotten(objects: ObjectFolder, folder: str) -> None:
            delete_folder(objects, folder)
            for path in [path for path in files if path.startswith(f"{folder}/")]:
                del files[path]
            self.add(dict(files))

        for name in ("_put", "_create"):
            patch.setattr(ObjectFolder, name, noted(getattr(ObjectFolder, name)))
        patch.setattr(ObjectFolder, "delete", forgotten)
        patch.setattr(ObjectFolder, "delete_folder", all_forgotten)


LINE = {"prompt": "x", "max_tokens": 5}
NUM_CHOICES = {"a": 1, "b": 2, "c": 1}
PRIORITIES = {"a": 3, "b": 0, "c": -1}


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs need no workers to finish, and the model is read once."""

    def finish(run: Run, hold: RunLease, queue: JobQueue, *_: object) -> tuple[str, None]:
        records = {record.job_id: record for record in run.jobs()}
        for job_id in queue.unfinished():
            assert write_result(run, job_id, FINISHED | {"custom_id": records[job_id].job.custom_id})
        run.write_output(hold.epoch.check)
        hold.end("finished")
        return "finished", None

    monkeypatch.setattr(launch, "_drive", finish)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a kill leaves what was written
    monkeypatch.setattr(launch, "connect", lambda *_: contextlib.nullcontext())
    for name in ("locate_model", "TextCodec"):
        monkeypatch.setattr(submission, name, remembered(getattr(submission, name)))


def remembered(make: Callable[..., Any]) -> Callable[..., Any]:
    """Call `make` once for arguments that read the same."""
    made: dict[str, Any] = {}

    def once(*arguments: Any, **named: Any) -> Any:
        key = repr((arguments, named))
        if key not in made:
            made[key] = make(*arguments, **named)
        return made[key]

    return once


def submit_killed(path: str, uri: str, patch: pytest.MonkeyPatch) -> None:
    """Submit a file, as a process that is no more will have done."""
    key = own_key()
    patch.setattr(run_lease, "own_key", lambda: key.model_copy(update={"start_ticks": key.start_ticks - 1}))
    with submission.submission(path, uri, Settings()):
        pass


def killed_submits(uri: str, tmp_path: Path) -> Iterator[tuple[Files, str, set[str]]]:
    """Yield what kills would have left of a command that makes a run, and of another one that adds a job to it.

    With each come the file that was submitted, and the jobs that were taken in before.
    """
    is_local, files = uri.startswith("/"), Files()
    if is_local:
        Path(uri).mkdir()
    for names, known in (("ab", set[str]()), ("bc", {"a", "b"})):
        path, states = tmp_path / f"{names}.jsonl", States()
        path.write_text(
            "".join(
                json.dumps(LINE | {"custom_id": name, "n": NUM_CHOICES[name], "priority": PRIORITIES[name]}) + "\n"
                for name in names
            )
        )
        with pytest.MonkeyPatch.context() as patch:
            if is_local:
                states.watch_disk(Path(uri), patch)
            else:
                states.watch_objects(files, patch)
            submit_killed(str(path), uri, patch)
        yield from ((state, str(path), known) for state in states.seen.values())


def put(files: Files, uri: str) -> None:
    store = Store(uri)
    for path, data in files.items():
        if store.is_local:  # names that begin with a dot, too
            (Path(uri) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(uri) / path).write_bytes(data)
        else:
            store.write(path, data)


def invoke(*args: str, is_no_run: bool = False, lacks_jobs: bool = False) -> None:
    """The command has to do its work, or to say that there is no run to work on, or none of its jobs to resume."""
    done = CliRunner().invoke(main, list(args), catch_exceptions=False)
    if lacks_jobs and args[0] == "resume":
        assert done.exit_code == 2
        assert done.output.endswith("has no jobs, its submit was cut short; submit the job file again\n")
    elif is_no_run:
        assert done.exit_code == 2
        assert re.fullmatch(r"swiftbatch: no run at [^\n]*; `swiftbatch submit` makes one\n", done.output)
    else:
        assert (done.exit_code, done.stderr) == (0, ""), done.output


def check_commands(uri: str, path: str, known: set[str], command: str) -> None:
    is_no_run = not Store(uri).exists(MANIFEST)
    if not is_no_run:
        assert known <= custom_ids(uri)
    lacks_jobs = not is_no_run and Run.open(uri).lacks_its_jobs()
    for reading in ("status", "results"):
        invoke(reading, uri, is_no_run=is_no_run)
    more = ["--output", f"{path}.html"] if command == "report" else []
    invoke(command, uri, *more, is_no_run=is_no_run, lacks_jobs=lacks_jobs)
    if command == "cancel" and not is_no_run:
        invoke("resume", uri, "--retry-failed", lacks_jobs=lacks_jobs)
    invoke("submit", path, "--run", uri)
    expected = known | set(Path(path).stem)
    assert custom_ids(uri) == expected
    run = Run.open(uri)
    assert run.priorities() == {name: PRIORITIES[name] for name in expected if PRIORITIES[name]}
    assert len(run.ended()[0]) == sum(NUM_CHOICES[name] for name in expected)
    lines = [json.loads(line) for line in run.store.read("output.jsonl").splitlines()]
    found = {line["custom_id"]: len(line["response"]["body"]["choices"]) for line in lines}
    assert (found, len(lines)) == ({name: NUM_CHOICES[name] for name in expected}, len(expected))


def custom_ids(uri: str) -> set[str]:
    return {record.job.custom_id for record in Run.open(uri).jobs()}


PLACES = {"disk": 40, "s3": 12}  # the least number of moments


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(("place", "step"), [("disk", 2), ("s3", 8)])
def test_a_kill_amid_submit_loses_nothing_and_the_same_file_again_completes_the_run(
    place: str, step: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sweep(place, [("resume", "cancel", "report")], step, tmp_path, request)


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_every_moment_of_submit_is_in_no_command_s_way(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sweep(place, [("resume",), ("cancel",), ("report",)], 1, tmp_path, request)


def sweep(place: str, rounds: list[tuple[str, ...]], step: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Check every `step`-th moment for each round; the commands of a round take turns."""
    uri = str(tmp_path) if place == "disk" else str(request.getfixturevalue("s3_uri"))
    moments = list(killed_submits(f"{uri}/run", tmp_path))
    assert len(moments) >= PLACES[place]
    for number, commands in enumerate(rounds):
        for index, (files, path, known) in enumerate(moments[::step]):
            copy = f"{uri}/copy-{number}-{index}"
            put(files, copy)
            check_commands(copy, path, known, commands[index % len(commands)])
