from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from swiftbatch.jobs.input.line_parsing import JobLine
from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.jobs.input.request_fields import LineFields
from swiftbatch.jobs.job import CHAT as CHAT_URL
from swiftbatch.jobs.job import COMPLETIONS
from swiftbatch.jobs.sampling_params import RepetitionDetection
from tests.jobs.input.job_lines import CHAT, GOOD, batch, read_jobs, read_lines

LOOPS = dict.fromkeys(RepetitionDetection.model_fields.keys() - {"action"}, 8)
COUNTS: dict[str, Any] = {
    **dict.fromkeys(["top_k", "penalty_window", "seed", "min_tokens", "thinking_token_budget", "priority"], 3),
    "truncate_prompt_tokens": 3,
    **{
        "max_tokens": 8,
        "max_completion_tokens": 8,
        "n": 2,
        "best_of": 2,
        "logprobs": 5,
        "prompt_logprobs": 5,
        "stop_token_ids": [3, 9],
    },
    **{"prompt": [5, 6], "repetition_detection": LOOPS, "top_logprobs": 0},
}
SENDING = {"method": "POST", "url": COMPLETIONS}


def floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: floats(each) for name, each in value.items()}
    return [floats(each) for each in value] if isinstance(value, list) else float(value)


def same(folder: Path, *lines: Any) -> list[JobLine]:
    found, rejects = read_lines(folder, *(line | {"custom_id": str(number)} for number, line in enumerate(lines)))
    assert rejects == []
    return found


def rows(folder: Path, **columns: Any) -> tuple[list[JobLine], list[Reject]]:
    parquet.write_table(pa.table(columns), folder / "jobs.parquet")
    jobs, rejects = read_jobs(str(folder / "jobs.parquet"), 1)
    return [line for _, line in jobs], rejects


def test_a_whole_number_is_one_however_it_is_written(tmp_path: Path) -> None:
    off = {"top_k": -1.0, "thinking_token_budget": -1.0, "seed": -0.0}
    whole, written, plain = same(tmp_path, batch(COUNTS), batch(floats(COUNTS)), GOOD | {"max_tokens": 1e3} | off)
    for name in ("sampling", "prompts", "max_tokens", "num_choices", "priority"):
        assert getattr(whole, name) == getattr(written, name)
    assert (plain.max_tokens, plain.sampling["top_k"], plain.sampling["seed"]) == (1000, 0, 0)


def test_every_field_that_counts_is_among_them() -> None:
    counting = {name for name, field in LineFields.model_fields.items() if "int" in str(field.annotation)}
    assert counting - {"logit_bias"} == COUNTS.keys() - {"prompt", "repetition_detection"}


@pytest.mark.parametrize("name", sorted(COUNTS.keys() - {"prompt", "stop_token_ids", "repetition_detection"}))
def test_a_part_of_one_or_true_is_no_whole_number(tmp_path: Path, name: str) -> None:
    values = (0.5, "8") if name in ("logprobs", "top_logprobs") else (0.5, True, "8")
    _, rejects = read_lines(tmp_path, *(GOOD | {name: value} for value in values))
    assert len(rejects) == len(values)
    assert all(f"'{name}'" in each.reason for each in rejects)


def test_a_number_as_custom_id_is_its_digits_in_lines_and_in_rows(tmp_path: Path) -> None:
    lines, rejects = read_lines(tmp_path, *(GOOD | {"custom_id": each} for each in (7, 8.0, 10**20, "7")))
    assert [line.custom_id for line in lines] == ["7", "8", str(10**20)]
    assert [reject.reason for reject in rejects] == [
        "field 'custom_id': found \"7\" again (first in line 1), expected it once"
    ]
    for numbers in (pa.array([7, 8]), pa.array([7.0, 8.0])):
        found, rejects = rows(tmp_path, custom_id=numbers, prompt=["Once"] * 2)
        assert ([line.custom_id for line in found], rejects) == (["7", "8"], [])


def test_a_uuid_of_a_table_is_its_text(tmp_path: Path) -> None:
    ids = [uuid.UUID(int=number) for number in (1, 2**127)]
    found, rejects = rows(tmp_path, custom_id=pa.array([each.bytes for each in ids], pa.uuid()), prompt=["Once"] * 2)
    assert ([line.custom_id for line in found], rejects) == ([str(each) for each in ids], [])


def test_json_text_in_a_column_is_read_for_every_field_that_is_an_object(tmp_path: Path) -> None:
    loops = {"max_pattern_size": 8, "min_count": 2.0}
    (line,), rejects = rows(tmp_path, prompt=["Once"], repetition_detection=[json.dumps(loops)], tools=["[]"])
    assert rejects == []
    assert line.sampling["repetition_detection"] == RepetitionDetection(max_pattern_size=8, min_count=2)


ENDS = ("", "/", "?api-version=1")
STARTS = ("/v1/", "/", "v1/", "", "https://api.example.com/v1/", "http://127.0.0.1:8000/", "https://a.b/x/openai/v1/")


@pytest.mark.parametrize("start", STARTS)
def test_a_url_is_its_endpoint_whatever_server_it_names(tmp_path: Path, start: str) -> None:
    told = [(f"{start}{url.removeprefix('/v1/')}{end}", url) for url in (COMPLETIONS, CHAT_URL) for end in ENDS]
    bodies = {COMPLETIONS: {"prompt": "Once"}, CHAT_URL: {"messages": CHAT["messages"]}}
    lines = same(tmp_path, *(batch(bodies[url], said) for said, url in told))
    assert [line.url for line in lines] == [url for _, url in told]


@pytest.mark.parametrize("method", ["POST", "post", "Post", None, ...])
def test_a_line_is_posted_whatever_it_says_of_that(tmp_path: Path, method: Any) -> None:
    line = {"url": COMPLETIONS, "body": {"prompt": "Once"}} | ({} if method is ... else {"method": method})
    [found] = same(tmp_path, line)
    assert found.prompts == ("Once",)


def test_null_is_an_absent_field_also_one_of_another_form(tmp_path: Path) -> None:
    chat, nulls = {"messages": CHAT["messages"]}, dict.fromkeys(["method", "url", "body"])
    others = dict.fromkeys(["messages", "reasoning_effort", "chat_template_kwargs"])
    plain, long, talk, short = same(
        tmp_path,
        GOOD | nulls | others,
        SENDING | {"prompt": None, "body": {"prompt": "Once", "max_tokens": 5} | others},
        SENDING | {"url": CHAT_URL, "body": chat | {"prompt": None, "response_format": {"type": "text", "x": None}}},
        chat | {"prompt": None},
    )
    assert plain.prompts == long.prompts == ("Once",)
    assert talk.messages == short.messages


def test_a_number_that_asks_for_nothing_does_so_however_it_is_written(tmp_path: Path) -> None:
    nothing = [{"length_penalty": 1}, {"length_penalty": 1.0}, {"echo": False}, {"prompt_logprobs": False}]
    same(tmp_path, *(GOOD | each for each in nothing))


def test_a_mass_of_nothing_keeps_the_likeliest_token(tmp_path: Path) -> None:
    zero, one = same(tmp_path, GOOD | {"top_p": 0, "seed": 1}, GOOD | {"top_k": 1, "seed": 1})
    assert zero.sampling == one.sampling


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_a_part_of_text_is_one_by_each_of_its_names(tmp_path: Path, kind: str) -> None:
    [line] = same(tmp_path, CHAT | {"messages": [{"role": "user", "content": [{"type": kind, "text": "Hello"}]}]})
    assert line.messages[0].content == "Hello"


def test_no_tokens_mean_the_prompt_alone_and_change_no_later_line(tmp_path: Path) -> None:
    echo = GOOD | {"echo": True, "logprobs": 1}
    alone, one, again = same(tmp_path, echo | {"max_tokens": 0}, echo | {"max_tokens": 1}, echo | {"max_tokens": 0})
    assert [line.sampling["echo"] for line in (alone, one, again)] == ["alone", True, "alone"]
    assert {line.max_tokens for line in (alone, one, again)} == {1}
    assert alone.jobs([1])[0].job_id("m") != one.jobs([1])[0].job_id("m")
