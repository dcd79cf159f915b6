"""Results have calls of tools, which no engine, kill or verification changes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.job import JobRecord, Message, TemplateOptions
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.runs.verification import verify_run
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.scheduler.runs.verification_parts import finished
from tests.worker.session.session_parts import body, claimed, make_run, record, run_to_end, session, until

MARKERS = (" the", " lazy dog over it")
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "pattern": "^[a-z ]{20,40}$"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "traffic")
)
TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}so{{ think }}{% endif %}{# <tool_call> #}"
)


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def chat(custom_id: str = "fox", think: str = "", thinking_token_budget: int | None = None, **choice: Any) -> JobRecord:
    options = TemplateOptions(tools=TOOLS, kwargs={"think": think}, **choice)
    said = {"url": "/v1/chat/completions", "prompt": None, "messages": (Message(role="user", content=custom_id),)}
    drawn = {"ignore_eos": False, "thinking_token_budget": thinking_token_budget}
    return record(custom_id, 400, drawn, template=options, **said)


def done(folder: Path, model: Path, job: JobRecord, **changes: Any) -> dict[str, Any]:
    run = make_run(folder)
    run_to_end(run, model, job, **changes)
    return body(run, job)


def checked(choice: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
    for call in message["tool_calls"]:
        assert call["function"]["name"] in names
        [(key, city)] = json.loads(call["function"]["arguments"]).items()
        assert key == "city"
        assert re.fullmatch("[a-z ]{20,40}", city)
    return list(message["tool_calls"])


@pytest.mark.parametrize("engine", ["autoregressive", "suffix", "token-recycling"])
def test_required_calls_are_whole_and_the_same_by_every_engine(tmp_path: Path, model: Path, engine: str) -> None:
    one = chat(must_call=True, function="traffic")
    found = done(tmp_path / "run", model, one, engine=engine)["choices"][0]
    assert len(checked(found, "traffic")) == 1
    assert list(found["message"]) == ["role", "content", "tool_calls"]
    plain = done(tmp_path / "plain", model, one, engine="autoregressive")["choices"][0]
    assert (found["message"], found["token_ids_sha256"]) == (plain["message"], plain["token_ids_sha256"])


def test_calls_come_behind_a_thought_in_which_none_counts(tmp_path: Path, model: Path) -> None:
    job = chat(must_call=True, function="weather", think=MARKERS[0], thinking_token_budget=30)
    found = done(tmp_path / "run", model, job, engine="token-recycling", thinking_markers=MARKERS)
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 30}
    choice = found["choices"][0]
    assert len(checked(choice, "weather")) == 1
    assert list(choice["message"]) == ["role", "reasoning_content", "content", "tool_calls"]
    assert "<tool_call>" not in choice["message"]["reasoning_content"]


def test_a_model_that_may_think_calls_at_once_or_behind_its_thought(tmp_path: Path, model: Path) -> None:
    for name in ("dog", "owl", "hen"):  # some open a thought, some do not
        job = chat(name, must_call=True, function="weather", thinking_token_budget=0)
        found = done(tmp_path / name, model, job, engine="suffix", thinking_markers=MARKERS)
        assert len(checked(found["choices"][0], "weather")) == 1


def test_calls_are_the_same_after_a_kill_in_their_midst(tmp_path: Path, model: Path) -> None:
    job = chat(must_call=True)
    undisturbed = done(tmp_path / "plain", model, job, engine="autoregressive")["choices"]
    run = make_run(tmp_path / "run")
    worker = session(run, model, engine="autoregressive")
    until(worker, job, 25, claimed(run, job))
    worker.drain(30.0)
    run_to_end(run, model, job, engine="suffix")
    found = body(run, job)["choices"]
    assert found == undisturbed
    assert checked(found[0], "weather", "traffic")


def test_a_text_that_need_not_call_is_free(tmp_path: Path, model: Path) -> None:
    [choice] = done(tmp_path / "run", model, chat())["choices"]
    assert list(choice["message"]) == ["role", "content"]
    assert choice["finish_reason"] in ("stop", "length")


def test_verification_reads_calls_again(tmp_path: Path, model: Path) -> None:
    jobs = [chat("a", must_call=True, function="weather"), chat("b")]
    run = finished(tmp_path / "run", model, *jobs)
    found = verify_run(run, 1.0, 0)
    assert (found.verdict, found.findings, found.num_jobs) == ("exact", (), 2)
    assert checked(body(run, next(run.records()))["choices"][0], "weather")


def test_a_changed_call_is_found(tmp_path: Path, model: Path) -> None:
    run = finished(tmp_path / "run", model, chat("a", must_call=True, function="weather"))
    job = next(run.records())
    line = run.result(job.job_id) or {}
    line["response"]["body"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] = "traffic"
    run.store.delete_folder("results")
    Run.open(run.store.uri).write_segment("forged", ResultSegment([(job.job_id, line)]))
    [finding] = verify_run(Run.open(run.store.uri), 1.0, 0).findings
    assert finding.what == "text"


def test_a_template_of_unknown_calls_is_refused(tmp_path: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ tools | tojson }}{{ messages[0].content }}")
    codec = TextCodec(locate_model(str(model)))
    job = chat().job
    with pytest.raises(ValueError, match="field 'tools': the form of this model's calls is unknown"):
        codec.rules(job.sampling, None, job.template)
