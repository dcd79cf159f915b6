"""A folder or a hub repository with several GGUF files asks which, and a name may say it."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run_records import at_commit
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model import hub
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.model.gguf.tiny_gguf import write_tiny

COMMIT = "a" * 40
NAMES = ("hf:some/model:small-Q8_0.gguf", "some/model:small-Q8_0.gguf", "some/model@main:small-Q8_0.gguf")


@pytest.fixture(autouse=True)
def small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "small"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("stored"), torch.bfloat16)[0]


@pytest.fixture
def snapshot(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a model in a cache of the hub, which is away."""
    home = tmp_path / "hub"
    folder = home / "models--some--model" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for name in ("small-F16.gguf", "small-Q8_0.gguf"):
        shutil.copy(file, folder / name)
    (home / "models--some--model" / "refs").mkdir()
    (home / "models--some--model" / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    download = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **said: download(*args, cache_dir=home, **said)
    )
    return folder


def test_a_folder_with_one_gguf_file_is_that_file_and_one_with_several_asks_which(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(file, folder / "a.gguf")
    for name in ("mmproj-a.gguf", "b-00002-of-00002.gguf"):
        (folder / name).write_text("")
    alone = locate_model(str(folder))
    assert alone.fingerprint == locate_model(str(file)).fingerprint
    assert inspect_model(str(folder)).refusal is None
    shutil.copy(file, folder / "b-00001-of-00002.gguf")
    with pytest.raises(ModelError) as told:
        locate_model(f"{folder}/")
    assert str(told.value) == (
        f"model {folder}: found GGUF files and no config.json: a.gguf, b-00001-of-00002.gguf; name one of them, as in "
        f"--model {folder}/a.gguf"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_which_file_of_a_hub_repository_is_meant(snapshot: Path, file: Path, name: str) -> None:
    found = locate_model(name)
    assert (found.fingerprint, found.commit) == (locate_model(str(file)).fingerprint, COMMIT)
    assert (found.path / "model.gguf").readlink() == snapshot / "small-Q8_0.gguf"
    assert inspect_model(name).refusal is None
    again = at_commit(name, found.commit)
    assert again == f"{name.partition(':small')[0].removesuffix('@main')}@{COMMIT}:small-Q8_0.gguf"
    assert locate_model(again).path == found.path


def test_a_hub_repository_of_gguf_files_asks_which_and_names_them_where_one_is_absent(snapshot: Path) -> None:
    with pytest.raises(ModelError, match=r"small-F16\.gguf, small-Q8_0\.gguf; .* --model some/model:small-F16\.gguf$"):
        locate_model("some/model")
    with pytest.raises(ModelError, match=r"no file Q4\.gguf; its GGUF files: small-F16\.gguf, small-Q8_0\.gguf$"):
        locate_model("hf:some/model:Q4.gguf")


def test_all_parts_of_a_file_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hub, "hub_snapshot", lambda _model, wanted: asked.extend(wanted) or tmp_path)
    (tmp_path / "a-00001-of-00003.gguf").write_text("")
    hub.hub_file("some/model:a-00001-of-00003.gguf", "a-00001-of-00003.gguf")
    assert asked == ["a-*-of-00003.gguf"]


def test_a_snapshot_that_is_named_as_a_folder_has_no_commit(snapshot: Path) -> None:
    assert locate_model(str(snapshot / "small-F16.gguf")).commit is None


def test_a_commit_takes_the_place_of_a_revision() -> None:
    assert at_commit("some/model", None) == "some/model"
    assert at_commit("some/model@main", COMMIT) == f"some/model@{COMMIT}"
    assert at_commit("some/model", COMMIT) == f"some/model@{COMMIT}"
