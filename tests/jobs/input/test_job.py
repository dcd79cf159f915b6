"""What a `Job` promises: it is complete, and its identity is a safe file name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.job import Job
from jobs.sampling import SamplingParams
from tests.jobs.input.job_lines import CHAT, GOOD, read


def test_a_path_as_custom_id_is_accepted_and_its_job_id_is_a_safe_file_name(tmp_path: Path) -> None:
    (job,), rejects = read(tmp_path, GOOD | {"custom_id": "../../etc/x"})
    assert rejects == []
    assert job.custom_id == "../../etc/x"
    assert job.job_id("model").startswith("etc-x-")


@given(custom_id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=512))
def test_every_job_id_is_a_safe_file_name(custom_id: str) -> None:
    sampling = SamplingParams(max_tokens=1, seed=1)
    job_id = Job(custom_id=custom_id, url="/v1/completions", prompt="x", sampling=sampling).job_id("model")
    slug, digest = job_id.rsplit("-", 1)
    assert 1 <= len(slug) <= 40
    assert slug[0] not in ".-"
    assert all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in slug)
    assert len(digest) == 16


def test_a_job_id_follows_from_id_model_prompt_and_sampling(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"prompt": "Twice"}, {"max_tokens": 6}, {"seed": 3}, {"temperature": 0.5}]
    job_ids = [read(tmp_path, GOOD | change)[0][0].job_id("model") for change in changes]
    job_ids.append(read(tmp_path, GOOD)[0][0].job_id("other model"))
    assert len(set(job_ids)) == len(job_ids)
    assert read(tmp_path, GOOD | {"temperature": 1, "top_k": 0})[0][0].job_id("model") == job_ids[0]


def test_job_ids_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """So that a file which is submitted again goes on."""
    jobs, _ = read(tmp_path, GOOD, CHAT)
    assert [job.job_id("model") for job in jobs] == ["good-3ce870ebdfbdbee6", "talk-bfd4f6cd160d8162"]


INCOMPLETE: list[tuple[dict[str, Any], int | None]] = [
    ({}, 1),
    ({"prompt": "x", "url": "/v1/chat/completions"}, 1),
    ({"prompt": "x"}, None),
    ({"prompt": "x", "prompt_ids": (1,)}, 1),
    ({"prompt": "x", "template": {"continue_final_message": True}}, 1),
]


@pytest.mark.parametrize(("text", "seed"), INCOMPLETE)
def test_a_job_that_is_not_complete_cannot_be_made(text: dict[str, Any], seed: int | None) -> None:
    values = {"custom_id": "a", "url": "/v1/completions", "sampling": SamplingParams(max_tokens=1, seed=seed)}
    with pytest.raises(ValueError, match="expected"):
        Job.model_validate(values | text)
