"""The cost of every field of a line: all are measured in turn, behind the same text, beside one that says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Group

from bench.fields import NOTHING, FieldBenchOptions, FieldRecord, fields, render, run_field_bench
from swiftbatch.jobs.sampling_params import LATER_FIELDS, SamplingParams
from swiftbatch.worker.bench_texts import BenchError
from swiftbatch.worker.config import Computation
from tests.bench.bench_parts import words


def make_options(**changes: object) -> FieldBenchOptions:
    asked = {"engine": "autoregressive", "position": 40, "num_tokens": 32, "num_rounds": 2, "device": "cpu"}
    sampling = {"temperature": 1.0, "min_p": 0.1, "seed": 0, "model": Computation.model}
    return FieldBenchOptions.model_validate(asked | sampling | changes)


def test_every_field_that_takes_part_in_a_draw_is_measured() -> None:
    measured = set().union(*fields(9).values()) - {"ignore_eos"}
    ends = {"stop_token_ids", "include_stop_str_in_output", "stop_in_reasoning"}  # a look at a set, and at the text
    assert measured >= set(LATER_FIELDS) - ends - {"thinking_end"}
    for said in fields(9).values():
        SamplingParams(max_tokens=9, **said)


@pytest.mark.long
def test_all_have_a_time_beside_nothing_and_drafts_may_be_made(tmp_path: Path) -> None:
    path = tmp_path / "fields.json"
    records = run_field_bench(make_options(engine="suffix", json_path=path))
    assert [record.field for record in records] == list(fields(1))
    assert records[0].field == NOTHING
    assert records[0].ratio == 1.0
    assert all(record.ms_per_token > 0 and record.tokens_per_step >= 1 for record in records)
    assert json.loads(path.read_text())["results"] == [record.model_dump() for record in records]


def test_the_table_has_a_row_for_each() -> None:
    record = FieldRecord(field="logprobs", ms_per_token=2.5, ratio=1.023, tokens_per_step=1.0)
    assert ["logprobs", "2.500", "1.023x", "1.00"] in words(Group(render([record])))


def test_too_few_tokens_for_a_clock_and_unknown_engines_are_refused() -> None:
    with pytest.raises(BenchError, match="32 tokens in 3 rounds: expected 48 or more"):
        run_field_bench(make_options(num_rounds=3))
    with pytest.raises(ValidationError, match="got warp; expected one of"):
        make_options(engine="warp")
