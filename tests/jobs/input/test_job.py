from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftbatch.jobs.job import Job
from swiftbatch.jobs.sampling_params import LATER_FIELDS, SamplingParams
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


OLD_JOB = {"temperature": 0.5, "min_p": 0.1, "seed": 3, "stop": ["x"], "max_tokens": 7, "prompt": "Once upon a time"}
LATER = {
    "frequency_penalty": 0.1,
    "presence_penalty": -0.1,
    "logit_bias": {"5": 1},
    "min_tokens": 1,
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "bad_words": ["rose"],
    "repetition_detection": {"max_pattern_size": 20, "min_count": 4},
    "logprobs": 0,
    "structured_outputs": {"regex": "a+"},
    "thinking_token_budget": 0,
    "thinking_end": "close",
    "stop_in_reasoning": True,
    "return_token_ids": True,
    "truncate_prompt_tokens": 5,
    "echo": True,
    "prompt_logprobs": 0,
}


def test_a_job_of_old_keeps_its_identity_and_new_fields_change_it_where_they_are_used(tmp_path: Path) -> None:
    """Older run folders have checkpoints under this name."""
    old = OLD_JOB | {"custom_id": "a/b"}
    (job,), _ = read(tmp_path, old)
    assert job.job_id("fingerprint") == "a-b-1c1a738e8961466c"
    defaults = {name: SamplingParams.model_fields[name].default for name in LATER}
    (said,), rejects = read(tmp_path, old | defaults | {"logit_bias": {}, "frequency_penalty": -0.0})
    assert (said.job_id("fingerprint"), rejects) == (job.job_id("fingerprint"), [])
    changed = [read(tmp_path, old | {name: value})[0][0].job_id("fingerprint") for name, value in LATER.items()]
    assert len({*changed, job.job_id("fingerprint")}) == 1 + len(LATER)
    assert tuple(LATER) == LATER_FIELDS


def test_a_bias_and_stop_tokens_are_the_same_in_whatever_order_they_are_given(tmp_path: Path) -> None:
    lines = [
        GOOD | {"seed": 1, "logit_bias": {"17": 1, "5": -2.5}, "stop_token_ids": [9, 3, 9]},
        GOOD | {"seed": 1, "custom_id": "again", "logit_bias": {"5": -2.5, "17": 1.0}, "stop_token_ids": [3, 9]},
    ]
    jobs, rejects = read(tmp_path, *lines)
    assert rejects == []
    assert jobs[0].sampling == jobs[1].sampling
    assert jobs[0].sampling.logit_bias == ((5, -2.5), (17, 1.0))
    kept = Job.model_validate_json(jobs[0].model_dump_json())  # as stored in a run folder
    assert kept == jobs[0]
    assert kept.job_id("model") == jobs[0].job_id("model")


def test_job_ids_are_those_of_earlier_versions(tmp_path: Path) -> None:
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
