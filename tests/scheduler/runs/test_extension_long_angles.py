"""A longrope job is extended on its side of the bound, never across."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from tests.scheduler.runs.extension_parts import extend, run_all
from tests.worker.model.folders import saved_as
from tests.worker.model.long_angles import PHI4_MINI, SHORT_LENGTH
from tests.worker.session.session_parts import body, digest, make_run, record

pytestmark = pytest.mark.long

NUM_PROMPT_TOKENS = 5  # as in these tests' records
MOST_SHORT = SHORT_LENGTH - NUM_PROMPT_TOKENS


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("phi")
    saved_as(PHI4_MINI | {"vocab_size": 300}, folder)
    for file in tiny_model.glob("token*.json"):
        shutil.copy(file, folder)
    return folder


def finished(folder: Path, phi: Path, max_tokens: int) -> Run:
    run = make_run(folder)
    run.add_jobs([record("fox", max_tokens)])
    run_all(run, phi)
    return run


@pytest.mark.sample(2)
@pytest.mark.parametrize(("first", "longer"), [(40, MOST_SHORT - 20), (MOST_SHORT + 1, MOST_SHORT + 20)])
def test_on_either_side_of_the_bound_the_tokens_are_those_of_one_run(
    first: int, longer: int, phi: Path, tmp_path: Path
) -> None:
    run, single = finished(tmp_path / "run", phi, first), finished(tmp_path / "single", phi, longer)
    assert extend(run, phi, longer).refused == []
    run_all(run, phi)
    assert digest(run, run.jobs()[0]) == digest(single, single.jobs()[0])
    assert body(run, run.jobs()[0])["metrics"]["attempts"][1]["resume"]["num_recovered_tokens"] == first


def test_across_the_bound_a_job_is_not_extended_since_its_tokens_would_be_others(phi: Path, tmp_path: Path) -> None:
    run = finished(tmp_path / "run", phi, 40)
    found = extend(run, phi, MOST_SHORT + 1)
    assert found.records == []
    assert found.refused == [
        (
            "fox",
            f"prompt (5 tokens) and --max-tokens ({MOST_SHORT + 1}) need {SHORT_LENGTH + 1} positions: above "
            f"{SHORT_LENGTH} the model turns all of a text otherwise (longrope), and the tokens that the job has would "
            f"be others; expected at most {SHORT_LENGTH}, or a new job",
        )
    ]
    assert len(extend(run, phi, MOST_SHORT).records) == 1
