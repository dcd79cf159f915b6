"""A job never continues from another run's or job's checkpoints."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run
from tests.jobs.run.run_parts import MANIFEST as BFLOAT16_MANIFEST
from tests.worker.session.session_parts import (
    have_caches_loaded,
    preempted,
    record,
    resumed_digest,
    undisturbed_digest,
)

pytestmark = pytest.mark.long

NUM_TOKENS = 160
JOB = record("fox", NUM_TOKENS)
KINDS = (
    *("claim.json", "tokens.bin", "kv-0-*.arrow", "drafter-*.arrow"),
    *("manifest.json", "resume.json", "timeline.json"),
)


def of_another_model(job: JobRecord) -> JobRecord:
    return JobRecord(job.job.job_id("f2"), job.job, job.line_number, job.num_prompt_tokens)


LEADING = ("tokens.bin", "manifest.json")  # tokens themselves, and what leads to all other files
# the job, and its run's different manifest fields
STRANGERS: Mapping[str, tuple[JobRecord, dict[str, Any]]] = {
    "another job of the run": (record("dog", NUM_TOKENS), {}),
    "another seed of the run": (record("fox", NUM_TOKENS, {"seed": 4}), {}),
    "another prompt": (record("fox", NUM_TOKENS, prompt="over the lazy dog"), {}),
    "another model": (of_another_model(JOB), {}),
    "another dtype": (JOB, {"dtype": "bfloat16"}),
}
MANIFEST = BFLOAT16_MANIFEST.model_copy(update={"dtype": "float32"})


@pytest.fixture(autouse=True, scope="module")
def _loading_is_worth_it() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        have_caches_loaded(patch)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> str:
    return undisturbed_digest(tmp_path_factory.mktemp("undisturbed") / "run", tiny_model, JOB)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The same layers with other weights."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight.flip(0).contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def preempted_twice(folder: Path, model: Path, job: JobRecord, changes: dict[str, Any]) -> Path:
    run = Run.planned(str(folder), MANIFEST.model_copy(update=changes)).made()
    for num_tokens in (60, 120):
        preempted(run, model, job, num_tokens, dtype=run.manifest.dtype)
    return folder / "checkpoints" / job.job_id


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return preempted_twice(tmp_path_factory.mktemp("own"), tiny_model, JOB, {})


@pytest.fixture(scope="module", params=STRANGERS)
def stranger(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, other_model: Path
) -> Path:
    job, changes = STRANGERS[request.param]
    model = other_model if "model_fingerprint" in changes else tiny_model
    return preempted_twice(tmp_path_factory.mktemp("stranger"), model, job, changes)


def only(folder: Path, pattern: str) -> Path:
    [path] = folder.glob(pattern)
    return path


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("stranger", "kind"),
    [
        pytest.param(name, kind, marks=() if name == "another model" or kind in LEADING else pytest.mark.slow)
        for name, kind in itertools.product(STRANGERS, KINDS)
    ],
    indirect=["stranger"],
)
def test_a_stranger_s_file_costs_no_token_and_is_named(
    kind: str,
    stranger: Path,
    own: Path,
    tiny_model: Path,
    undisturbed: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(own.parents[1], tmp_path / "run")
    attempt = "0001" if kind.startswith("kv") else "0002"
    mine = only(tmp_path / "run" / "checkpoints" / JOB.job_id / attempt, kind)
    mine.write_bytes(only(stranger / attempt, kind).read_bytes())
    assert resumed_digest(tmp_path / "run", tiny_model, JOB) == undisturbed
    named = {entry.getMessage() for entry in caplog.records if mine.name in entry.getMessage()}
    assert len(named) == 1
    assert "found a file of " in named.pop()


@pytest.mark.sample(3)
def test_a_stranger_s_folder_leaves_a_job_that_begins_anew(
    stranger: Path, own: Path, tiny_model: Path, undisturbed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(own.parents[1], tmp_path / "run")
    mine = tmp_path / "run" / "checkpoints" / JOB.job_id
    shutil.rmtree(mine)
    shutil.copytree(stranger, mine)
    assert resumed_digest(tmp_path / "run", tiny_model, JOB) == undisturbed
    for name in ("tokens.bin", "manifest.json"):
        for attempt in ("0001", "0002"):
            assert f"skipped checkpoints/{JOB.job_id}/{attempt}/{name} in " in caplog.text
