"""Thoughts in results are separate, and equal after any kill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.job import JobRecord, Message
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.session.session_parts import body, claimed, make_run, record, run_to_end, session, until

MARKERS = (" the", " lazy dog over it")  # the latter of several tokens
BUDGET = 40
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}so the{% endif %}"
ENGINES = ["autoregressive", "suffix", "token-recycling"]


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def chat(custom_id: str = "fox", num_tokens: int = 120, **drawn: Any) -> JobRecord:
    said = {"url": "/v1/chat/completions", "prompt": None, "messages": (Message(role="user", content=custom_id),)}
    return record(custom_id, num_tokens, {"thinking_token_budget": BUDGET} | drawn, **said)


def end_of(model: Path) -> tuple[list[int], TextCodec]:
    codec = TextCodec(locate_model(str(model)), MARKERS)
    assert codec.markers is not None
    return list(codec.markers.end), codec


def done(run: Run, model: Path, job: JobRecord, **changes: Any) -> dict[str, Any]:
    run_to_end(run, model, job, thinking_markers=MARKERS, **changes)
    return body(run, job)


def test_a_chat_has_what_was_thought_apart_from_what_it_says(run: Run, model: Path) -> None:
    found = done(run, model, chat(), engine="autoregressive")
    message = found["choices"][0]["message"]
    end, codec = end_of(model)
    assert len(end) > 3
    assert list(message) == ["role", "reasoning_content", "content"]
    assert MARKERS[1] not in message["reasoning_content"] + message["content"]
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": BUDGET}
    completion = record("fox", 120, {"thinking_token_budget": BUDGET}, prompt="fox so the")
    plain = done(run, model, completion, engine="autoregressive")
    text = plain["choices"][0]["text"]
    assert MARKERS[1] in text
    assert plain["usage"]["completion_tokens_details"]["reasoning_tokens"] == BUDGET
    assert len(codec.encode(text.split(MARKERS[1])[0], False)) > 5


@pytest.mark.sample(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["state", "tokens"])
def test_a_thought_goes_on_in_another_worker_in_the_midst_of_its_marker(
    run: Run, tmp_path: Path, model: Path, engine: str, kind: str
) -> None:
    end, _ = end_of(model)
    job, other = (
        chat(structured_outputs={"regex": "( ?[a-z]+){20,30}[.]"}, ignore_eos=False, seed=1),
        make_run(tmp_path / "other"),
    )
    undisturbed = done(other, model, job, engine="autoregressive")
    worker = session(run, model, engine="autoregressive", checkpoint=kind, thinking_markers=MARKERS)
    assert BUDGET < until(worker, job, BUDGET + 1, claimed(run, job)) < BUDGET + len(end)
    worker.drain(30.0)
    assert done(run, model, job, engine=engine)["choices"] == undisturbed["choices"]
    content = undisturbed["choices"][0]["message"]["content"]
    assert content
    assert set(content) <= set("abcdefghijklmnopqrstuvwxyz .")


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "closed at once": ({"thinking_token_budget": 0}, 0),
    "no room for more": ({"max_tokens": 30}, 30),
    "room for half a marker": ({"max_tokens": BUDGET + 2}, BUDGET),
    "a longer budget than there is room": ({"thinking_token_budget": 10**6}, 120),
    "none": ({"thinking_token_budget": None}, 120),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_budget_leaves_is_told(run: Run, model: Path, name: str) -> None:
    fields, num_thought = CASES[name]
    found = done(run, model, chat(**fields), engine="suffix")
    message = found["choices"][0]["message"]
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_thought
    assert bool(message["content"]) == (name == "closed at once")
    assert bool(message["reasoning_content"]) == (num_thought > 0)
    assert MARKERS[1][:9] not in message["reasoning_content"][-20:]


def test_a_stop_text_ends_a_thought_that_it_may_end_and_all_behind_it(run: Run, model: Path) -> None:
    whole = done(run, model, chat(), engine="suffix")["choices"][0]["message"]
    for number, name in enumerate(("reasoning_content", "content")):
        text = whole[name]
        stop = next(text[i : i + 4] for i in range(8, len(text)) if "\ufffd" not in text[i : i + 4])
        job = chat("fox", stop=(stop,), stop_in_reasoning=True, seed=3)
        found = done(make_run(Path(run.store.uri).parent / str(number)), model, job, engine="suffix")
        message = found["choices"][0]["message"]
        assert found["choices"][0]["finish_reason"] == "stop"
        assert stop not in message[name]
        assert whole[name].startswith(message[name])
        if name == "reasoning_content":
            assert message["content"] == ""


def test_without_markers_a_chat_is_as_it_was(run: Run, model: Path) -> None:
    job = chat(thinking_token_budget=None)
    run_to_end(run, model, job)
    found = body(run, job)
    assert list(found["choices"][0]["message"]) == ["role", "content"]
    assert "completion_tokens_details" not in found["usage"]


def test_a_marker_that_the_model_writes_opens_a_thought(run: Run, model: Path) -> None:
    """The text before it is the chat's."""
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    _, codec = end_of(model)
    assert codec.markers is not None
    [start] = codec.markers.start
    job = chat(logit_bias={str(start): 4.0}, thinking_token_budget=10)
    found = done(run, model, job, engine="token-recycling")
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 10
    assert found["choices"][0]["message"]["content"]
