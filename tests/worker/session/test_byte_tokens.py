"""Characters spelled byte by byte are whole in text, stop strings and log-probabilities."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.job import JobRecord, Message
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.session.session_parts import body, make_run, preempted, record, run_to_end
from tests.worker.text.text_parts import KINDS

LLAMA = KINDS["byte fallback, a space in front"]
NUM_TOKENS = 64
FORCED = {str(token_id): 50.0 for token_id in [*LLAMA.spelled("\u4f60"), *LLAMA.spelled("\u00e9 a")]}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer like Llama 2's."""
    folder = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("bytes") / "model"))
    LLAMA.tokenizer.save_pretrained(folder)
    return folder


def job(**drawn: Any) -> JobRecord:
    """Use characters' bytes in any order."""
    return record("fox", NUM_TOKENS, {"logit_bias": FORCED, "logprobs": 0} | drawn, prompt="the END re")


def done(folder: Path, model: Path, of: JobRecord) -> tuple[dict[str, Any], int]:
    run = make_run(folder)
    run_to_end(run, model, of)
    found = body(run, of)
    return found["choices"][0], found["usage"]["completion_tokens"]


def bytes_of(choice: dict[str, Any]) -> list[bytes]:
    """Return tokens' texts as a completion's log-probabilities write them."""
    tokens = choice["logprobs"]["tokens"]
    return [
        bytes.fromhex(each.removeprefix("bytes:").replace("\\x", "")) if each.startswith("bytes:") else each.encode()
        for each in tokens
    ]


def test_a_text_that_is_cut_within_a_character_loses_that_alone(tmp_path: Path, model: Path) -> None:
    whole, _ = done(tmp_path / "whole", model, job())
    data = bytes_of(whole)
    for num_tokens in range(1, 13):
        choice, _ = done(tmp_path / str(num_tokens), model, job(max_tokens=num_tokens))
        joined = b"".join(data[:num_tokens])
        assert choice["text"] == joined.removeprefix(b" ").decode(errors="replace")
        assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])
        assert choice["logprobs"]["text_offset"][-1] <= len(choice["text"])


def test_a_stop_string_ends_a_job_with_its_last_byte_also_behind_a_kill(tmp_path: Path, model: Path) -> None:
    whole, _ = done(tmp_path / "whole", model, job())
    data = b"".join(bytes_of(whole)).removeprefix(b" ")
    stop = next(part for part in ("\u00e9a", "\u00e9 ", "\u4f60", "\u00e9") if part.encode() in data)
    expected = 1 + next(i for i in range(NUM_TOKENS) if stop.encode() in b"".join(bytes_of(whole)[: i + 1]))
    asked = job(stop=(stop,))
    choice, num_tokens = done(tmp_path / "stop", model, asked)
    assert (choice["finish_reason"], num_tokens) == ("stop", expected)
    assert choice["text"] == whole["text"][: whole["text"].index(stop)]
    run = make_run(tmp_path / "killed")
    preempted(run, model, asked, expected - 1, engine="autoregressive")
    run_to_end(run, model, asked)
    assert body(run, asked)["choices"] == [choice]


def test_a_thought_is_cut_from_the_text_of_all(tmp_path: Path, model: Path) -> None:
    """The marker's neighbours may be incomplete characters or spaces."""
    markers = ("<s>", "</s>")
    codec = TextCodec(locate_model(str(model)), markers)
    assert codec.markers is not None
    bias = FORCED | {str(token_id): 49.0 for token_id in (*codec.markers.start, *codec.markers.end)}
    asked = record(
        "fox",
        NUM_TOKENS,
        {"logit_bias": bias, "logprobs": 0},
        url="/v1/chat/completions",
        prompt=None,
        messages=(Message(role="user", content="the END"),),
    )
    run = make_run(tmp_path / "run")
    run_to_end(run, model, asked, thinking_markers=markers)
    choice = body(run, asked)["choices"][0]
    message, tokens = choice["message"], choice["logprobs"]["content"]
    names = [token["token"] for token in tokens]
    data = [bytes(token["bytes"]) if token["token"] not in markers else b"" for token in tokens]
    text = b"".join(data).removeprefix(b" ").decode(errors="replace")
    assert "<s>" in names
    assert message["content"] + message["reasoning_content"] != ""
    assert len(message["content"]) + len(message["reasoning_content"]) == len(text)
    before = b"".join(data[: names.index("<s>")]).removeprefix(b" ").decode(errors="replace")
    assert message["content"].startswith(before[:-1])  # the last may be a part of a longer character
