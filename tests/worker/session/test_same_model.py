"""A worker uses exactly its run's model, or none."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model import weight_files
from swiftbatch.worker.model.digests import digests_of
from swiftbatch.worker.model.model_files import OtherModelError, locate_model
from swiftbatch.worker.session import session as sessions
from tests.tiny_targets import model as model
from tests.worker.session.session_parts import (
    claimed,
    digest,
    made_with,
    make_run,
    record,
    run_to_end,
    session,
    to_the_end,
)

WEIGHTS = "model.safetensors"


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Run:
    return made_with(make_run(tmp_path / "run"), model)


def change_weights(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["model.norm.weight"] *= 1.5
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def change_json(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        said = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(said | {"a_new_key": 1}), encoding="utf-8")

    return change


def write_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")


CHANGES = {
    WEIGHTS: change_weights,
    "config.json": change_json("config.json"),
    "tokenizer.json": change_json("tokenizer.json"),
    "tokenizer_config.json": change_json("tokenizer_config.json"),
    "chat_template.jinja": write_template,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_differs_is_refused_in_a_line_with_node_file_found_and_expected(
    name: str, run: Run, model: Path
) -> None:
    before = digests_of(model)
    CHANGES[name](model)
    with pytest.raises(OtherModelError) as caught:
        session(run, model)
    line = str(caught.value)
    assert "\n" not in line
    assert socket.gethostname() in line
    expected = (before.model | before.text).get(name)
    found = (digests_of(model).model | digests_of(model).text)[name]
    assert str(model / name) in line
    assert f"found SHA-256 {found[:12]}, expected " + (f"SHA-256 {expected[:12]}" if expected else "no such") in line


def test_a_file_that_is_gone_is_refused(run: Run, model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(OtherModelError, match="found no such file, expected SHA-256"):
        session(run, model)


def test_weights_that_change_between_the_look_at_them_and_the_load_are_refused(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = sessions.located_model

    def located(name: str, of: Run) -> object:
        files = find(name, of)
        change_weights(model)
        return files

    monkeypatch.setattr(sessions, "located_model", located)
    with pytest.raises(OtherModelError, match=WEIGHTS):
        session(run, model)


@pytest.mark.parametrize("name", sorted(set(CHANGES) - {WEIGHTS}))
def test_small_files_that_change_while_the_model_is_loaded_are_refused(
    name: str, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = TargetModel.load

    def loaded(*args: object) -> object:
        target = load(*args)  # type: ignore[arg-type]
        CHANGES[name](model)
        return target

    monkeypatch.setattr(TargetModel, "load", loaded)
    with pytest.raises(OtherModelError, match=name):
        session(run, model)


def test_what_is_written_into_a_loaded_file_changes_no_token(run: Run, model: Path) -> None:
    """`cp` writes in place, which would change a mapped file."""
    job, again = record("fox"), record("dog")
    worker = run_to_end(run, model, job, again)
    other = make_run(model.parent / "other")
    worker = session(other, model)
    with (model / WEIGHTS).open("r+b") as file:
        file.write(b"\x55" * (model / WEIGHTS).stat().st_size)
    to_the_end(worker, claimed(other, job), claimed(other, again))
    assert [digest(other, each) for each in (job, again)] == [digest(run, each) for each in (job, again)]


def test_a_model_as_it_was_is_taken_again(run: Run, model: Path) -> None:
    (model / WEIGHTS).rename(model / "kept")
    shutil.copy(model / "kept", model / WEIGHTS)
    job = record("fox")
    assert len(to_the_end(session(run, model), claimed(run, job)).of("finished")) == 1


def test_the_bytes_that_are_hashed_are_those_that_are_computed_with(model: Path) -> None:
    files = locate_model(str(model))
    read = weight_files.read_tensors(files, torch.bfloat16, lambda weight: weight)
    stored = load_file(model / WEIGHTS)
    assert set(read) == set(stored)
    assert all(torch.equal(read[name], stored[name]) and read[name].dtype == stored[name].dtype for name in stored)


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_a_file_that_is_cut_off_while_it_is_read_is_refused(
    cut: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = locate_model(str(model))
    layout = weight_files.stored_layout(str(model), model)
    monkeypatch.setattr(weight_files, "stored_layout", lambda *_: layout)  # a complete file had it a moment ago
    data = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(data[:cut])
    with pytest.raises(ModelError, match="can't be read as safetensors"):
        weight_files.read_tensors(files, torch.bfloat16, lambda weight: weight)


def test_a_file_with_something_behind_its_tensors_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = locate_model(str(model))
    layout = weight_files.stored_layout(str(model), model)
    monkeypatch.setattr(weight_files, "stored_layout", lambda *_: layout)
    with (model / WEIGHTS).open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelError, match="can't be read as safetensors"):
        weight_files.read_tensors(files, torch.bfloat16, lambda weight: weight)
