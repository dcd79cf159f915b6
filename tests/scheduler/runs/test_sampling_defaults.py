from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.scheduler.display.events import ModelSamplesBy
from tests.scheduler.commands.command_parts import write_jobs
from tests.scheduler.commands.submit_parts import submit_file

RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "max_new_tokens": 9}
LINES: tuple[dict[str, Any], ...] = (
    {"custom_id": "silent", "prompt": "It was", "max_tokens": 5},
    {"custom_id": "null", "prompt": "It was", "max_tokens": 5, "top_k": None},
    {"custom_id": "says", "prompt": "It was", "max_tokens": 5, "temperature": 1.0, "top_k": -1},
    {"custom_id": "body", "url": "/v1/completions", "body": {"prompt": "It was", "top_p": 0.5}},
)


@pytest.fixture
def recommending(tmp_path: Path, tiny_model: Path) -> Path:
    """A model with a sampling of its own."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED), encoding="utf-8")
    return folder


def _sampling(path: str, run: Path, **said: object) -> dict[str, tuple[float, int, float]]:
    def drawn(params: SamplingParams) -> tuple[float, int, float]:
        return params.temperature, params.top_k, params.top_p

    return {
        record.custom_id: drawn(record.job.sampling) for record in submit_file(path, str(run), **said).run.records()
    }


def test_lines_that_leave_fields_out_get_the_model_s_own(tmp_path: Path, recommending: Path) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", *LINES)
    found = _sampling(path, tmp_path / "run", model=str(recommending))
    own = (0.6, 20, 0.95)
    assert found == {"silent": own, "null": own, "says": (1.0, 0, 0.95), "body": (0.6, 20, 0.5)}
    assert _sampling(path, tmp_path / "run") == found


def test_the_run_keeps_openai_s_defaults(tmp_path: Path, recommending: Path) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", *LINES)
    found = _sampling(path, tmp_path / "run", model=str(recommending), sampling_defaults="openai")
    assert found["silent"] == (1.0, 0, 1.0)
    assert _sampling(path, tmp_path / "run") == found


def test_a_model_without_recommendations_changes_nothing(tmp_path: Path, tiny_model: Path) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", *LINES)
    assert _sampling(path, tmp_path / "run", model=str(tiny_model))["silent"] == (1.0, 0, 1.0)
    assert submit_file(path, str(tmp_path / "run")).sampling_defaults == {}


def test_submit_says_the_model_s_own_sampling(tmp_path: Path, recommending: Path) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", *LINES)
    found = submit_file(path, str(tmp_path / "run"), model=str(recommending)).sampling_defaults
    assert str(ModelSamplesBy(found)).endswith("the model's own sampling holds: temperature 0.6, top_k 20, top_p 0.95")


def test_a_recommendation_out_of_bounds_is_refused(tmp_path: Path, recommending: Path) -> None:
    (recommending / "generation_config.json").write_text('{"top_p": 1.5}', encoding="utf-8")
    path = write_jobs(tmp_path / "jobs.jsonl", *LINES)
    with pytest.raises(
        ModelError, match=r"generation_config.json: field 'top_p': found 1.5.*--sampling-defaults openai"
    ):
        submit_file(path, str(tmp_path / "run"), model=str(recommending))
    submit_file(path, str(tmp_path / "run"), model=str(recommending), sampling_defaults="openai")
