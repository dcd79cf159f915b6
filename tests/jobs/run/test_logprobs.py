from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from swiftbatch.jobs.job import Job, JobRecord, Message
from swiftbatch.jobs.json_records import dump_line
from swiftbatch.jobs.logprobs import NO_TOKEN, UNLIKELY, TokenLogprobs, shown_logprobs
from swiftbatch.jobs.run.output_line import success_line
from swiftbatch.jobs.sampling_params import SamplingParams

END = "</s>"
BYTES = [b"Hi", b" there", b"\xe2", b"\x80\x93", "na\u00efve".encode(), b"\xff", b"Hi", END.encode(), b""]
OFFSETS = [0, 2, 2, 3]
SAMPLING = SamplingParams(max_tokens=9, seed=1, logprobs=2)
COMPLETION = Job(custom_id="a", url="/v1/completions", prompt="Once", sampling=SAMPLING)
CHAT = Job(
    custom_id="a",
    url="/v1/chat/completions",
    messages=(Message(role="user", content="Hello"),),
    sampling=SAMPLING,
)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CompletionLogprobs(Strict):
    """A completion's log-probabilities in OpenAI's reference."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(Strict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Strict):
    """A chat's log-probabilities in OpenAI's reference."""

    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class Texts:
    def token_bytes(self, token_id: int) -> bytes:
        return BYTES[token_id]

    def text_offsets(self, token_ids: Sequence[int]) -> list[int]:
        return OFFSETS[: len(token_ids)]


def logprobs_of(token_ids: list[int], rows: list[list[tuple[int, float]]], own: list[float]) -> TokenLogprobs:
    found = TokenLogprobs.empty(len(token_ids), 2)
    for place, row in enumerate(rows):
        found.top_ids[place] = [token_id for token_id, _ in row]
        found.top_logprobs[place] = [value for _, value in row]
    found.logprobs[:] = own
    return found


def shown(job: Job, token_ids: list[int], logprobs: TokenLogprobs) -> dict[str, Any]:
    record, ids = JobRecord("a-1", job, 1, 3), np.array(token_ids, np.uint32)
    found = shown_logprobs(job, ids, logprobs, Texts())
    line = success_line(
        record,
        "r",
        "text",
        "length",
        model="m",
        system_fingerprint="fp",
        token_ids=ids,
        metrics={},
        logprobs=found,
    )
    choice = json.loads(dump_line(line))["response"]["body"]["choices"][0]
    return dict(choice["logprobs"])


IDS = [0, 2, 3, 7]
ROWS = [[(0, -0.5), (1, -1.5)], [(5, -0.25), (0, -3.0)], [(6, -1.0), (0, -2.0)], [(7, 0.0), (NO_TOKEN, -np.inf)]]
FOUND = logprobs_of(IDS, ROWS, [-0.5, -4.0, -np.inf, 0.0])


def test_a_completion_has_openai_s_four_lists_with_the_drawn_token_among_the_likeliest() -> None:
    found = shown(COMPLETION, IDS, FOUND)
    CompletionLogprobs.model_validate(found)
    assert found == {
        "tokens": ["Hi", "bytes:\\xe2", "bytes:\\x80\\x93", END],
        "token_logprobs": [-0.5, -4.0, UNLIKELY, 0.0],
        "top_logprobs": [
            {"Hi": -0.5, " there": -1.5},
            {"bytes:\\xe2": -4.0, "bytes:\\xff": -0.25, "Hi": -3.0},
            {"bytes:\\x80\\x93": UNLIKELY, "Hi": -1.0},  # of two tokens with one text, the likelier
            {END: 0.0},
        ],
        "text_offset": OFFSETS,
    }
    assert list(found["top_logprobs"][1]) == ["bytes:\\xe2", "bytes:\\xff", "Hi"]


def test_a_chat_has_a_list_of_tokens_with_their_bytes_and_the_likeliest_alone() -> None:
    found = shown(CHAT, IDS, FOUND)
    ChatLogprobs.model_validate(found)
    first, second, third, last = found["content"]
    assert first == {
        "token": "Hi",
        "logprob": -0.5,
        "bytes": [72, 105],
        "top_logprobs": [
            {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]},
            {"token": " there", "logprob": -1.5, "bytes": list(b" there")},
        ],
    }
    assert (second["token"], second["bytes"], third["bytes"]) == ("\\xe2", [0xE2], [0x80, 0x93])
    assert [top["token"] for top in second["top_logprobs"]] == ["\\xff", "Hi"]
    assert (third["logprob"], last["token"], last["top_logprobs"]) == (
        UNLIKELY,
        END,
        [{"token": END, "logprob": 0.0, "bytes": list(END.encode())}],
    )


def test_no_number_of_likeliest_gives_those_of_the_tokens_alone() -> None:
    none = TokenLogprobs.of(np.array([-1.0], np.float32), np.empty((1, 0), np.int32), np.empty((1, 0), np.float32))
    assert shown(COMPLETION, [0], none)["top_logprobs"] == [{"Hi": -1.0}]
    assert shown(CHAT, [0], none)["content"][0]["top_logprobs"] == []


def test_numbers_are_written_as_the_float32_that_they_are() -> None:
    value = np.float32(-2.103829860687256)
    found = logprobs_of([0], [[(0, float(value)), (1, -3.0)]], [float(value)])
    assert np.float32(shown(COMPLETION, [0], found)["token_logprobs"][0]) == value
