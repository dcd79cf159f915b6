"""A second training on a folder is refused; a killed one's folder is free at once."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.model.model_files import DRAFT_FOLDER, PARTS_FOLDER
from swiftbatch.worker.training.recipes import GRIFFIN_RECIPE, DraftRecipe, HeadRecipe
from swiftbatch.worker.training.target_recipe import embedded_recipe
from swiftbatch.worker.training.train_all import train_all
from swiftbatch.worker.training.train_draft import train_draft
from swiftbatch.worker.training.train_griffin import train_griffin
from swiftbatch.worker.training.train_target import train_target
from swiftbatch.worker.training.train_tokenswift import train_heads
from swiftbatch.worker.training.training_folder import held
from tests import ROOT

HOLDS = """
import sys
from pathlib import Path
from swiftbatch.worker.training.training_folder import held

while folder := sys.stdin.readline().rstrip():
    with held(Path(folder)):
        print("held", flush=True)
        sys.stdin.readline()
    print("free", flush=True)
"""


@contextmanager
def another_process() -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the named folder until the next line."""
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.fixture(scope="module")
def other() -> Iterator[subprocess.Popen[str]]:
    """One for all tests, because it imports torch."""
    with another_process() as process:
        yield process


def answer(other: subprocess.Popen[str], line: str) -> str:
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write(f"{line}\n")
    other.stdin.flush()
    return other.stdout.readline()


@contextmanager
def held_by(other: subprocess.Popen[str], folder: Path) -> Iterator[None]:
    assert answer(other, str(folder)) == "held\n"
    yield
    assert answer(other, "") == "free\n"


def target(books: Path, output: Path, model: str) -> None:
    train_target(books, output, embedded_recipe(1), print)


def heads(books: Path, output: Path, model: str) -> None:
    train_heads(model, books, output, HeadRecipe(), print)


def draft(books: Path, output: Path, model: str) -> None:
    train_draft(model, books, output, DraftRecipe(1), print)


def griffin(books: Path, output: Path, model: str) -> None:
    train_griffin(model, books, output, GRIFFIN_RECIPE, print)


def everything(books: Path, output: Path, model: str) -> None:
    train_all(books, output, embedded_recipe(1), print)


TRAININGS = (target, heads, draft, griffin, everything)


@pytest.mark.parametrize("training", TRAININGS)
def test_a_training_of_any_kind_is_refused_where_one_is_at_work(
    books: Path, tmp_path: Path, tiny_model: Path, training: Callable[..., Any], other: subprocess.Popen[str]
) -> None:
    output = tmp_path / "output"
    with held_by(other, output):
        with pytest.raises(ModelError) as refusal:
            training(books, output, str(tiny_model))
        assert other.poll() is None
        names = [path.name for path in output.iterdir()]
    who = f"process {other.pid} on {re.escape(socket.gethostname())} since [0-9-]+ [0-9:+-]+"
    line = f"output {output}: another process is at work there, {who}; wait for its end, end it, or name another folder"
    assert re.fullmatch(line, str(refusal.value))
    assert names == [".training.lock"]
    assert not output.exists()  # it was made for nothing


@pytest.mark.parametrize("part", [PARTS_FOLDER, f"{PARTS_FOLDER}/{DRAFT_FOLDER}"])
def test_all_of_them_begin_only_where_nobody_trains_a_part(
    books: Path, tmp_path: Path, part: str, other: subprocess.Popen[str]
) -> None:
    output = tmp_path / "model"
    with held_by(other, output / part), pytest.raises(ModelError, match=f"output {output / part}: another process is"):
        everything(books, output, "")
    assert not list(output.rglob("*.safetensors"))


def test_the_folder_of_a_killed_training_is_free_at_once_and_keeps_what_is_in_it(tmp_path: Path) -> None:
    with another_process() as other:
        assert answer(other, str(tmp_path / "output")) == "held\n"
        (tmp_path / "output" / "state.pt").write_text("half of it")
        other.kill()
        other.wait()
        assert (tmp_path / "output" / ".training.lock").exists()
        with held(tmp_path / "output"):
            pass
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["state.pt"]


@pytest.mark.parametrize("kind", ["file", "below a file", "long name", "link to itself"])
def test_what_cannot_be_a_folder_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("link")
    names = {"file": "file", "below a file": "file/model", "long name": "n" * 300, "link to itself": "link"}
    with pytest.raises(ModelError, match=r"output .*: cannot be written \(.+\); name another folder"):
        held(tmp_path / names[kind]).__enter__()
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_a_training_that_is_a_part_of_another_one_is_not_in_its_way(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    with held(tmp_path / "output"), held(tmp_path / "other" / ".." / "output"):
        assert (tmp_path / "output" / ".training.lock").exists()
    with held_by(other, tmp_path / "output"):
        pass


def test_what_can_t_be_a_folder_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps({}))
    with pytest.raises(ModelError, match=r"^output .*/file: cannot be written \(File exists\); name another folder$"):
        held(tmp_path / "file").__enter__()


def test_a_file_system_without_locks_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("swiftbatch.worker.training.training_folder.fcntl.flock", flock)
    with held(tmp_path / "output"):
        assert (tmp_path / "output").is_dir()
