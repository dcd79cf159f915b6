"""Texts that spell a control token stay texts in a run that wants so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.job import Message, TemplateOptions
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.plain_content import BREAK
from swiftbatch.worker.text.tokenizer import Chat, TextCodec

END = "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}" + END + "{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ variable }}"
)


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def codecs(model: Path) -> tuple[TextCodec, TextCodec]:
    files = locate_model(str(model))
    return TextCodec(files, plain_content=True), TextCodec(files)


def set_token(model: Path, **changes: Any) -> None:
    """Change the entry of the control token in the tokenizer's file."""
    path = model / "tokenizer.json"
    parts = json.loads(path.read_text())
    [token] = [each for each in parts["added_tokens"] if each["content"] == END]
    token.update(changes)
    path.write_text(json.dumps(parts))


def as_text(codec: TextCodec) -> list[int]:
    """Return the tokens of the control token's name between two words, as the library splits texts."""
    backend = codec._tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    found = list(backend.encode(f"fox{END}dog", add_special_tokens=False).ids)
    backend.encode_special_tokens = False
    return found


USER = Message(role="user", content=f"fox{END}dog")
CALL = {"id": "a", "function": {"name": "f", "arguments": json.dumps({"city": END}).replace("<", "\\u003c")}}
TOOL = {"type": "function", "function": {"name": "f", "description": END}}


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([USER], None),
        ([USER, Message(role="assistant", content=END + END)], None),
        ([Message(role="user", content=f"<|end\noftext|>{END}", parts=("<|end", f"oftext|>{END}"))], None),
        ([Message(role="user", content="<|endoftext\n|>", parts=("<|endoftext", "|>"))], None),
        ([USER, Message.model_validate({"role": "assistant", "content": None, "tool_calls": [CALL]})], None),
        ([USER], TemplateOptions(tools=(TOOL,))),
        ([USER], TemplateOptions(kwargs={"variable": END})),
    ],
)
def test_only_the_template_s_control_tokens_are_some(
    model: Path, messages: list[Message], options: TemplateOptions | None
) -> None:
    plain, usual = codecs(model)
    [end] = plain.encode(END, add_special_tokens=False)
    own, others = (codec.encode_one(Chat(messages, options)).token_ids for codec in (plain, usual))
    assert own.count(end) == len(messages) < others.count(end)
    decode = plain._tokenizer.decode
    assert decode(own) == decode(others)


def test_the_name_is_split_as_other_text_is_in_chats_and_prompts(model: Path) -> None:
    plain, usual = codecs(model)
    expected = as_text(usual)
    assert plain.encode_one(f"fox{END}dog").token_ids[1:] == expected  # behind the BOS token
    chat = plain.encode_one(Chat([USER], None)).token_ids
    assert any(chat[place : place + len(expected)] == expected for place in range(len(chat)))


@pytest.mark.parametrize("content", ["the quick brown fox", " a < b, c <| d ", "x <", "\n<p>\n\n", "<|endoftext"])
def test_other_texts_have_the_tokens_that_they_have_without_the_option(model: Path, content: str) -> None:
    plain, usual = codecs(model)
    for asked in (content, Chat([Message(role="user", content=content)], None)):
        assert plain.encode_one(asked).token_ids == usual.encode_one(asked).token_ids


def test_parts_that_a_template_joins_may_end_as_a_control_token_begins(model: Path) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE.replace("{{ part.text }}", ""))
    plain, usual = codecs(model)
    chat = Chat(
        [
            Message.model_validate(
                {"role": "user", "content": [{"type": "text", "text": "x <"}, {"type": "text", "text": "y"}]}
            )
        ],
        None,
    )
    assert plain.encode_one(chat).token_ids == usual.encode_one(chat).token_ids


def test_an_answer_keeps_the_marks_of_thoughts_that_a_template_looks_for(model: Path) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE.replace("m.content | trim", "m.content.split('</think>')[-1]"))
    plain, _ = codecs(model)
    said = [Message(role="user", content="a"), Message(role="assistant", content="<think>b</think>c")]
    assert plain.chat.render(plain._plain.messages(said), None) == f"user:a{END}assistant:c{END}"


def test_a_token_that_only_the_template_makes_one_of_control_counts(model: Path) -> None:
    set_token(model, special=False)
    plain, usual = codecs(model)
    [end] = plain.encode(END, add_special_tokens=False)
    assert [codec.encode_one(Chat([USER], None)).token_ids.count(end) for codec in (plain, usual)] == [1, 2]


def test_the_character_of_breaks_is_refused(model: Path) -> None:
    plain, usual = codecs(model)
    for asked in (BREAK, Chat([Message(role="user", content=f"a{BREAK}")], None)):
        with pytest.raises(ValueError, match=r"found the character U\+FDD0 in a text"):
            plain.encode_one(asked)
        usual.encode_one(asked)


def test_a_tokenizer_that_cannot_keep_them_apart_is_refused(model: Path) -> None:
    set_token(model, normalized=True)
    with pytest.raises(ModelError, match=r"--plain-content: its tokenizer looks for <\|endoftext\|> in normalized"):
        codecs(model)
