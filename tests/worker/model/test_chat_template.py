from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.jobs.job import Message, TemplateOptions
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.tiny_targets import model as model

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OVER_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
ADDING = "{% for m in messages %}{{ m.content + '.' }}{% endfor %}"
WITH_NAMES = "{% for m in messages %}{{ m.name | default('?') }}: {{ m.content }}{% endfor %}"
THINKING = "{{ 'think ' if enable_thinking else 'do ' }}{{ reasoning_effort | default('some') }}"

ONE = Message(role="user", content="a")
TWO = Message(role="user", content="a\nb", parts=("a", "b"))


def codec(model: Path, template: str) -> TextCodec:
    (model / "chat_template.jinja").write_text(template)
    return TextCodec(locate_model(str(model)))


@pytest.mark.parametrize(
    ("template", "text"), [(PLAIN, "<user>a\nb</><assistant>"), (OVER_PARTS, "<user>[a][b]"), (ADDING, "a\nb.")]
)
def test_several_parts_are_given_to_templates_that_go_over_them_and_are_one_text_to_others(
    model: Path, template: str, text: str
) -> None:
    assert codec(model, template).chat.render([TWO], None) == text


def test_a_single_text_is_the_same_to_every_template(model: Path) -> None:
    assert codec(model, OVER_PARTS).chat.render([ONE], None) == "<user>a"


def test_names_are_given_and_told_of_where_nobody_reads_them(model: Path) -> None:
    named = ONE.model_copy(update={"name": "Ann"})
    reader, other = codec(model, WITH_NAMES).chat, codec(model, PLAIN).chat
    assert reader.render([named, ONE], None) == "Ann: a?: a"
    assert [each.unread([named], None) for each in (reader, other)] == [[], ["messages[].name"]]
    assert other.unread([ONE], None) == []


def test_variables_are_given_and_told_of_where_nobody_reads_them(model: Path) -> None:
    options = TemplateOptions(kwargs={"enable_thinking": True, "reasoning_effort": "low"})
    reader, other = codec(model, THINKING).chat, codec(model, PLAIN).chat
    assert [reader.render([ONE], each) for each in (None, options)] == ["do some", "think low"]
    assert reader.unread([ONE], options) == []
    assert other.unread([ONE], options) == ["enable_thinking", "reasoning_effort"]


def test_a_last_message_is_continued_or_answered_as_it_is_asked(model: Path) -> None:
    template = codec(model, PLAIN).chat
    begun = [ONE, Message(role="assistant", content="Well")]
    going_on = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    assert template.render(begun, going_on) == "<user>a</><assistant>Well"
    assert template.render([ONE], TemplateOptions(add_generation_prompt=False)) == "<user>a</>"
    assert template.render([ONE], None) == "<user>a</><assistant>"
