"""A resume is right after any damage, and a log line names the file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.session.session_parts import (
    have_caches_loaded,
    make_run,
    preempted,
    record,
    resumed_digest,
    undisturbed_digest,
)

pytestmark = pytest.mark.long

JOB = record("fox", 160)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> str:
    return undisturbed_digest(tmp_path_factory.mktemp("undisturbed") / "run", tiny_model, JOB)


@pytest.fixture(scope="module")
def damaged_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("preempted") / "run"
    run = make_run(folder)
    for num_tokens in (60, 120):
        preempted(run, tiny_model, JOB, num_tokens)
    return folder


@pytest.fixture(scope="module")
def files(damaged_run: Path) -> list[str]:
    root = damaged_run / "checkpoints" / JOB.job_id
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    kinds = {name.split("/")[1].split("-")[0].split(".")[0] for name in names}
    assert kinds == {"claim", "tokens", "kv", "drafter", "manifest", "resume", "timeline"}
    replaced = [name for name in names if name.startswith("0001/drafter-")]  # nothing reads it beside a newer one
    return [name for name in names if name not in replaced]


@pytest.fixture(autouse=True, scope="module")
def _loading_is_worth_it() -> Iterator[None]:
    """A replaying job reads and names no segments."""
    with pytest.MonkeyPatch.context() as patch:
        have_caches_loaded(patch)
        yield


def damage(path: Path, kind: str, place: float) -> None:
    """Flip a bit, truncate, or delete; `place` in [0, 1) says where."""
    data = path.read_bytes()
    position = int(place * len(data))
    if kind == "deleted":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(data[:position])
    else:
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << int(place * 997) % 8)]) + data[position + 1 :])


@pytest.mark.parametrize(  # the checkpoints' own tests also truncate and delete
    "kind", ["flipped", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("truncated", "deleted"))]
)
@settings(max_examples=2)
@given(place=st.floats(0, 1, exclude_max=True))
def test_each_damaged_file_in_turn_costs_no_token_and_is_named(
    kind: str,
    place: float,
    files: list[str],
    damaged_run: Path,
    tiny_model: Path,
    undisturbed: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in files:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(damaged_run, folder)
        damage(folder / "checkpoints" / JOB.job_id / name, kind, place)
        caplog.clear()
        assert resumed_digest(folder, tiny_model, JOB) == undisturbed, name
        is_missed = kind != "deleted" or not name.endswith("timeline.json")  # an attempt without tokens has none
        assert (name in caplog.text) == is_missed, name
