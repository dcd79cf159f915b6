from __future__ import annotations

import pytest

from bench.fields import NOTHING, Options, fields, run
from swiftbatch.jobs.sampling_params import LATER_FIELDS, SamplingParams
from swiftbatch.worker.config import Computation
from swiftbatch.worker.decode_bench import BenchError


def make_options(**changes: object) -> Options:
    asked = {"engine": "autoregressive", "position": 40, "num_tokens": 32, "num_rounds": 2, "device": "cpu"}
    sampling = {"temperature": 1.0, "min_p": 0.1, "seed": 0, "model": Computation.model}
    return Options.model_validate(asked | sampling | changes)


def test_every_field_that_takes_part_in_a_draw_is_measured() -> None:
    measured = set().union(*fields(9).values()) - {"ignore_eos"}
    ends = {"stop_token_ids", "include_stop_str_in_output", "stop_in_reasoning"}  # these read a set, and the text
    about_prompts = {"echo", "prompt_logprobs", "truncate_prompt_tokens"}
    assert measured >= set(LATER_FIELDS) - ends - about_prompts - {"thinking_end", "return_token_ids"}
    for said in fields(9).values():
        SamplingParams(max_tokens=9, **said)


@pytest.mark.long
def test_all_have_a_time_beside_nothing_and_drafts_may_be_made() -> None:
    records = list(run(make_options(engine="suffix")))
    assert [record["field"] for record in records] == list(fields(1))
    assert records[0]["field"] == NOTHING
    assert records[0]["ratio"] == 1.0
    assert all(record["ms_per_token"] > 0 and record["tokens_per_step"] >= 1 for record in records)


def test_too_few_tokens_for_a_clock_are_refused() -> None:
    with pytest.raises(BenchError, match="32 tokens in 3 rounds: expected 48 or more"):
        next(run(make_options(num_rounds=3)))
