from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftbatch.jobs.job import Job, JobRecord, packed
from swiftbatch.jobs.json_records import dump_line
from swiftbatch.jobs.run.output_line import (
    Reasoning,
    ToolCalls,
    error_line,
    is_plain_result,
    parse_line,
    shown_text,
    success_line,
)
from swiftbatch.jobs.sampling_params import SamplingParams

SAMPLING = SamplingParams(max_tokens=5, seed=1)
COMPLETION = Job(custom_id="a", url="/v1/completions", prompt="Once", sampling=SAMPLING)
CHAT = Job.model_validate_json(
    COMPLETION.model_copy(update={"url": "/v1/chat/completions", "prompt": None})
    .model_dump_json()
    .replace('"messages":null', '"messages":[{"role":"user","content":"Hello"}]')
)


def line_of(job: Job, **metrics: object) -> dict[str, Any]:
    record = JobRecord("a-1", job, 4, 3, prompt_token_ids=packed([4, 5, 6]))
    token_ids = np.array([7, 8], dtype=np.uint32)
    return success_line(
        record,
        "run-1",
        "upon",
        "length",
        model="embedded",
        system_fingerprint="fp",
        token_ids=token_ids,
        metrics=metrics,
    )


def test_a_completion_is_a_line_of_openai_batch() -> None:
    line = json.loads(dump_line(line_of(COMPLETION, num_drafts=2)))
    created = line["response"]["body"].pop("created")
    assert isinstance(created, int)
    assert line == {
        "id": "batch_req_a-1",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "run-1",
            "body": {
                "id": "cmpl-a-1",
                "object": "text_completion",
                "model": "embedded",
                "system_fingerprint": "fp",
                "choices": [
                    {
                        "index": 0,
                        "text": "upon",
                        "finish_reason": "length",
                        "token_ids_sha256": hashlib.sha256(struct.pack("<II", 7, 8)).hexdigest(),
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
                "metrics": {"num_drafts": 2},
            },
        },
        "error": None,
    }


def test_a_choice_has_its_number_in_its_own_line(tmp_path: Path) -> None:
    line = json.loads(dump_line(line_of(COMPLETION.model_copy(update={"choice_index": 2, "num_choices": 3}))))
    assert [choice["index"] for choice in line["response"]["body"]["choices"]] == [2]


def test_a_chat_job_gets_a_message_of_the_assistant() -> None:
    body = json.loads(dump_line(line_of(CHAT)))["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["id"] == "chatcmpl-a-1"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "upon"}
    assert "text" not in body["choices"][0]


def test_what_was_thought_stands_beside_what_a_chat_says_and_in_the_text_of_a_completion() -> None:
    reasoning, ids = Reasoning("hm", "so", 1), np.array([7, 8], dtype=np.uint32)
    choices = []
    for job in (CHAT, COMPLETION):
        record = JobRecord("a-1", job, 4, 3)
        line = success_line(
            record,
            "run-1",
            "hm</think>so",
            "stop",
            model="m",
            system_fingerprint="fp",
            token_ids=ids,
            metrics={},
            reasoning=reasoning,
        )
        body = line["response"]["body"]
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
        choices.append(body["choices"][0])
    assert choices[0]["message"] == {"role": "assistant", "reasoning_content": "hm", "content": "so"}
    assert choices[1]["text"] == "hm</think>so"


CALLED = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("finish_reason", "expected"), [("stop", "tool_calls"), ("length", "length"), ("repetition", "repetition")]
)
def test_calls_stand_beside_what_a_chat_says(finish_reason: str, expected: str) -> None:
    made = {"model": "m", "system_fingerprint": "fp", "token_ids": np.array([7], dtype=np.uint32), "metrics": {}}
    record, calls = JobRecord("a-1", CHAT, 4, 3), ToolCalls(CALLED, None, "from a channel")
    messages = []
    for reasoning in (None, Reasoning("hm", "all of it", 1)):
        line = success_line(record, "run-1", "text", finish_reason, reasoning=reasoning, calls=calls, **made)
        assert parse_line(dump_line(line), "a-1", "fp") == line
        assert is_plain_result(dump_line(line).strip(), "a-1", "fp")
        choice = line["response"]["body"]["choices"][0]
        assert choice["finish_reason"] == expected
        messages.append(choice["message"])
        assert list(messages[-1]) == ["role", "reasoning_content", "content", "tool_calls"]
    assert [each["reasoning_content"] for each in messages] == ["from a channel", "hm"]
    assert [(each["content"], each["tool_calls"]) for each in messages] == [(None, CALLED)] * 2
    del line["response"]["body"]["choices"][0]["message"]["tool_calls"]
    with pytest.raises(ValueError, match="found a message without text and calls"):
        parse_line(dump_line(line), "a-1", "fp")


def test_a_choice_s_whole_text_has_its_calls() -> None:
    function = CALLED[0]["function"]
    message = {"reasoning_content": "hm", "content": None, "tool_calls": CALLED}
    assert shown_text({"message": message}) == f"hm{json.dumps(function)}"
    assert shown_text({"text": "so"}) == shown_text({"message": {"content": "so"}}) == "so"


def test_token_ids_stand_where_vllm_puts_them_if_a_line_asks_for_them() -> None:
    asking = SAMPLING.model_copy(update={"return_token_ids": True})
    completion, chat = (
        line_of(job.model_copy(update={"sampling": asking}))["response"]["body"] for job in (COMPLETION, CHAT)
    )
    assert (completion["choices"][0]["prompt_token_ids"], completion["choices"][0]["token_ids"]) == ([4, 5, 6], [7, 8])
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == ([4, 5, 6], [7, 8])
    assert "prompt_token_ids" not in completion
    assert "prompt_token_ids" not in chat["choices"][0]


def test_a_metric_that_is_no_finite_number_is_null_and_does_not_lose_the_result() -> None:
    metrics = line_of(COMPLETION, speed=float("nan"), rate=float("inf"), good=0.5)["response"]["body"]["metrics"]
    assert metrics == {"speed": None, "rate": None, "good": 0.5}


def test_a_job_that_did_not_finish_has_an_error_and_no_response() -> None:
    line = error_line(JobRecord("a-1", COMPLETION, 4, 3), "cancelled", "cancelled by the user")
    assert line == {
        "id": "batch_req_a-1",
        "custom_id": "a",
        "response": None,
        "error": {"code": "cancelled", "message": "cancelled by the user"},
    }


def test_any_text_stays_on_one_line_and_comes_back(tmp_path: Path) -> None:
    text = "a\nb\r\x0b\x0c\x1c\x85\u2028\u2029 \u00e4\u4e2d\U0001f600 \ud800 \\u2028"
    data = dump_line({"text": text})
    (tmp_path / "line.json").write_bytes(data)
    assert len((tmp_path / "line.json").read_text(encoding="utf-8").splitlines()) == 1
    assert json.loads(data) == {"text": text}
    assert "\u00e4\u4e2d\U0001f600".encode() in data
