from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import swiftbatch
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.api.python_submit import SubmitOptions, _lines, arguments_of, keywords
from swiftbatch.scheduler.api.run_process import _event
from tests.jobs.run.run_parts import MANIFEST
from tests.scheduler.commands.command_parts import pretend_to_run, refusal


def _job(name: str, **fields: Any) -> dict[str, Any]:
    return {"custom_id": name, "prompt": "It was", "max_tokens": 20, **fields}


def test_keywords_are_the_options_of_the_command() -> None:
    assert list(SubmitOptions.__annotations__) == list(keywords())


def test_keywords_become_arguments() -> None:
    asked = {"workers": 2, "strict": True, "takeover": False, "model": None, "slots": "auto", "seed": -3}
    assert arguments_of(asked) == ["--workers=2", "--strict", "--slots=auto", "--seed=-3"]
    assert arguments_of({"engine_option": {"tree": (3, 3), "rounds": 1}}) == [
        "--engine-option=tree=3,3",
        "--engine-option=rounds=1",
    ]
    with pytest.raises(swiftbatch.UserError, match="option engine-option: found a character NUL, expected text"):
        arguments_of({"engine_option": {"cache": "a\0"}})
    assert arguments_of({"column": {"prompt": "text"}, "thinking_markers": ("<a>", "</a>")}) == [
        *("--column=prompt=text", "--thinking-markers", "<a>", "</a>")
    ]


def test_an_unknown_keyword_names_the_known_ones() -> None:
    with pytest.raises(swiftbatch.UserError, match=r"no option 'worker'; expected one of .*workers"):
        swiftbatch.submit("jobs.jsonl", worker=2)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([_job("a") | {"prompt": {1}}], "job 1: .*set.*expected values that JSON has"),
        ([_job("a"), "b"], "job 2: found str, expected a dict"),
        ({"custom_id": "a"}, "found dict as jobs, expected files, a list of dicts"),
        (None, "found NoneType as jobs"),
        (5, "found int as jobs"),
        ([], r"^submit\(\): found no jobs, expected at least one$"),
        (iter(()), r"^submit\(\): found no jobs, expected at least one$"),
        (["a.jsonl", _job("a")], "found dict among files, expected files alone, or dicts"),
    ],
)
def test_jobs_that_are_no_dicts_are_refused(tmp_path: Path, jobs: Any, message: str) -> None:
    with pytest.raises(swiftbatch.UserError, match=message):
        swiftbatch.submit(jobs, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_texts_are_two_and_numbers_of_numpy_are_numbers() -> None:
    for value in (("<a>",), ("<a>", "</a>", "c"), "ab"):
        with pytest.raises(swiftbatch.UserError, match=r"option thinking-markers: found .* expected 2 texts"):
            arguments_of({"thinking_markers": value})
    assert list(_lines([{"max_tokens": np.int64(5)}])) == [b'{"max_tokens": 5}\n']


def test_what_another_library_prints_is_no_event() -> None:
    assert [_event(line) for line in (b"hello\n", b"5\n", b"[1]\n", b"\xff\n")] == [None] * 4
    assert _event(b'{"event": "x"}\n') == {"event": "x"}


def test_jobs_without_a_file_need_a_run() -> None:
    with pytest.raises(swiftbatch.UserError, match="expected run=FOLDER"):
        swiftbatch.submit([_job("a")])


def test_errors_have_the_words_of_the_command(tmp_path: Path) -> None:
    path, run = str(tmp_path / "absent.jsonl"), str(tmp_path / "run")
    with pytest.raises(swiftbatch.UserError) as found:
        swiftbatch.submit(path, run=run)
    assert refusal("submit", path, "--run", run) == f"swiftbatch: {found.value}"


def test_a_generator_that_fails_submits_nothing(tmp_path: Path) -> None:
    def jobs() -> Iterator[dict[str, Any]]:
        yield _job("a")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        swiftbatch.submit(jobs(), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.ray
def test_a_killed_run_goes_on_and_each_result_comes_once(tmp_path: Path, tiny_model: Path) -> None:
    rows = [_job("two", n=2), _job("one", max_tokens=30), _job("bad", top_p=95), _job("three")]
    model = str(tiny_model)
    run = swiftbatch.submit(rows[:1], run=tmp_path / "run", model=model)
    os.kill(run._process._process.pid, signal.SIGKILL)
    with pytest.raises(swiftbatch.UserError, match="nothing is lost, submit the same jobs again"):
        run.wait()

    async def ended() -> list[str]:
        again = await swiftbatch.submit_async((row for row in rows), run=tmp_path / "run", model=model)
        assert [reject.custom_id for reject in again.rejects] == ["bad"]
        return [result["custom_id"] async for result in again.results_async()]

    assert sorted(asyncio.run(ended())) == ["one", "three", "two"]
    opened = swiftbatch.Run.open(tmp_path / "run")
    assert opened.wait().state == "finished"
    assert "3 finished" not in repr(opened)  # four jobs: both choices count
    assert [line["custom_id"] for line in opened.lines()] == ["two", "one", "three"]
    assert opened.to_arrow().column("completion_tokens").to_pylist() == [20, 20, 30, 20]
    assert opened.stop().state == "finished"  # nobody works on it


@pytest.mark.parametrize("kind", [list, tuple, set, iter, lambda paths: (each for each in paths)])
def test_files_come_in_any_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    paths, found = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], list[Any]()
    monkeypatch.setattr("swiftbatch.scheduler.api.python_submit._started", lambda *asked: found.append(asked))
    swiftbatch.submit(kind(paths), run=tmp_path / "run")
    assert found == [(list(map(str, paths)), str(tmp_path / "run"), [])]


def test_a_run_of_another_machine_is_stopped_there(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    pretend_to_run(run)
    with pytest.raises(swiftbatch.UserError, match=r"^process 1 on elsewhere works on the run at .*: send it SIGTERM"):
        swiftbatch.Run.open(run.store.uri).stop()


@pytest.mark.ray
def test_a_stopped_run_of_a_table_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    table = pa.Table.from_pylist([_job(name, max_tokens=60) for name in "ab"])
    run = swiftbatch.submit(table, run=tmp_path / "run", model=str(tiny_model))
    assert swiftbatch.Run.open(run.uri).stop().jobs["finished"] < 2  # as in a restarted notebook
    assert run._process.wait(10.0)
    again = swiftbatch.submit(table, run=tmp_path / "run", model=str(tiny_model))
    assert again.wait(bar=True).jobs["finished"] == 2
    assert again.cancel() == "nothing to cancel: it has ended already"
