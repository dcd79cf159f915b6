"""Markers of thoughts, and what the chat template leaves open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.job import Job, Message, TemplateOptions
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.constraints.grammar import Grammar
from swiftbatch.worker.constraints.thinking import Markers, Thinking, ThinkingRule
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.token_masks import ConstraintError
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.tiny_targets import model as model

MESSAGES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
OPENING = MESSAGES + (
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
SILENT = MESSAGES + "{% if add_generation_prompt %}<assistant>{% endif %}{# <think> </think> #}"


def codec(model: Path, template: str = "", named: tuple[str, str] | None = None) -> TextCodec:
    if template:
        (model / "chat_template.jinja").write_text(template)
    return TextCodec(locate_model(str(model)), named)


def with_tokens(model: Path, *tokens: str) -> None:
    """Add tokens as far as the model's config allows."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.save_pretrained(model)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": len(tokenizer)}))


def made(codec: TextCodec, start: str, end: str) -> Markers:
    return Markers(tuple(codec.encode(start, False)), tuple(codec.encode(end, False)), (start, end))


def test_markers_are_the_tokenizer_s_or_the_template_s_and_others_can_be_named(model: Path) -> None:
    assert codec(model).markers is None
    assert codec(model, MESSAGES + "<think>").markers is None
    spelled = codec(model, OPENING)
    assert spelled.markers == made(spelled, "<think>", "</think>")
    assert len(spelled.encode("</think>", False)) > 1
    named = codec(model, "", ("the fox", "lazy dog"))
    assert named.markers == made(named, "the fox", "lazy dog")
    with_tokens(model, "[THINK]", "[/THINK]")
    own = codec(model)
    assert own.markers == made(own, "[THINK]", "[/THINK]")
    assert len(own.encode("[/THINK]", False)) == 1


def test_markers_that_the_model_does_not_have_are_refused_where_they_are_named(model: Path) -> None:
    with pytest.raises(ModelError, match="--thinking-markers: found 'fox' twice, expected two that differ"):
        codec(model, "", ("fox", "fox"))
    with pytest.raises(ModelError, match="--thinking-markers: found ' ', expected a text that is not blank"):
        codec(model, "", ("fox", " "))
    with_tokens(model, "<think>", "</think>")
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 200}))
    with pytest.raises(ModelError, match="--thinking-markers: '<think>' has no tokens of the model's"):
        codec(model, "", ("<think>", "</think>"))
    assert codec(model).markers is None


def chat(*contents: str, sampling: dict[str, Any] | None = None, **options: Any) -> Job:
    roles = ["user", "assistant"] * len(contents)
    return Job(
        custom_id="a",
        url="/v1/chat/completions",
        messages=tuple(Message(role=role, content=text) for role, text in zip(roles, contents, strict=False)),
        template=TemplateOptions(**options) if options else None,
        sampling=SamplingParams(max_tokens=5, seed=1, **(sampling or {})),
    )


def found(codec: TextCodec, job: Job) -> Thinking:
    thinking = codec.thinking(job, codec.prompt_of(job).last_marker)
    assert thinking is not None
    return thinking


CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}


def test_a_thought_is_open_where_the_template_opens_it_whatever_the_messages_say(model: Path) -> None:
    opening = codec(model, OPENING)
    assert found(opening, chat("fox")).is_open
    assert found(opening, chat("what is </think> for?")).is_open
    assert not found(opening, chat("fox", kwargs={"enable_thinking": False})).is_open
    assert not found(opening, chat("what is <think> for?", kwargs={"enable_thinking": False})).is_open
    assert not found(opening, chat("fox", add_generation_prompt=False)).is_open
    assert found(opening, chat("fox", "<think>well", **CONTINUED)).is_open
    assert not found(opening, chat("fox", "<think>well</think>so", **CONTINUED)).is_open
    assert not found(opening, chat("<think>", "so", **CONTINUED)).is_open
    spaced = codec(model, OPENING.replace("<think>\n", "so he mused"), (" he mused", "well"))
    assert found(spaced, chat("well")).is_open
    silent = codec(model, SILENT)
    for text in ("fox", "what is <think> for?"):
        assert not found(silent, chat(text)).is_open


def test_a_thought_is_open_where_a_prompt_leaves_it(model: Path) -> None:
    known = codec(model, SILENT)
    for prompt, is_open in (("fox<think> the", True), ("<think>a</think> fox", False), ("fox", False)):
        for said in ({"prompt": prompt}, {"prompt_ids": tuple(known.encode(prompt))}):
            job = Job(custom_id="a", url="/v1/completions", sampling=SamplingParams(max_tokens=5, seed=1), **said)  # type: ignore[arg-type]
            thinking = found(known, job)
            assert (thinking.is_open, thinking.opening) == (is_open, "anywhere")


def test_a_structure_waits_for_a_thought_that_is_open_or_that_an_answer_may_open(model: Path) -> None:
    opening = codec(model, OPENING)
    asked = {"structured_outputs": {"regex": "a+"}}
    rules = {
        name: opening.rules(job.sampling, found(opening, job))
        for name, job in {
            "open": chat("fox", sampling=asked),
            "closed": chat("fox", sampling=asked, kwargs={"enable_thinking": False}),
            "continued": chat("fox", "so", sampling=asked, **CONTINUED),
            "completion": Job(
                custom_id="a", url="/v1/completions", prompt="fox", sampling=chat("a", sampling=asked).sampling
            ),
        }.items()
    }
    [rule] = rules.pop("open")
    assert isinstance(rule, ThinkingRule)
    assert (rule.thinking.is_open, rule.budget) == (True, None)
    assert [type(each) for [each] in rules.values()] == [Grammar] * 3
    silent, job = codec(model, SILENT), chat("fox", sampling=asked)
    [rule] = silent.rules(job.sampling, found(silent, job))
    assert isinstance(rule, ThinkingRule)
    assert (rule.thinking.is_open, rule.thinking.opening) == (False, "first")


def test_a_budget_without_markers_is_refused_with_its_field(model: Path, tiny_model: Path) -> None:
    job = chat("fox", sampling={"thinking_token_budget": 5})
    with pytest.raises(ConstraintError, match="field 'thinking_token_budget': found 5, and no markers of thinking"):
        codec(model).rules(job.sampling)
    known = codec(model, OPENING)
    [rule] = known.rules(job.sampling, found(known, job))
    assert isinstance(rule, ThinkingRule)
    assert rule.budget == 5
