"""Chat template of a model, which converts messages to text and must not omit any."""

from __future__ import annotations

import contextlib
import html
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import markupsafe

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.job import Message, TemplateOptions
from swiftbatch.jobs.json_records import shown
from swiftbatch.worker.constraints.thinking import KNOWN
from swiftbatch.worker.text.template_renderer import TemplateLimitError, TemplateRenderer

Rendering = Callable[[list[dict[str, Any]], TemplateOptions], str]

ALIASES = {"developer": "system", "human": "user", "gpt": "assistant", "model": "assistant"}
COMMON = ("system", "user", "assistant", "developer", "tool", "function")
THOUGHTS = (  # a template may drop thoughts, up to the second mark, from earlier answers
    *KNOWN,
    ("<mm:think>", "</mm:think>"),
    ("<|channel>", "<channel|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
SWITCHES = re.compile(r"(?<!\S)/(?:no_)?think(?!\S)")  # words that a template may follow and remove
MARKER = re.compile(r"swiftbatch(\d+)text")
LIST_ITEM = re.compile(r"""["']text\\?["']\s*:\s*\\?["']\Z""")  # precedes a part in a printed Python or JSON list
MOST_SHAPES = 256
NO_TOOLS = "the model's chat template reads no tools"


@dataclass(frozen=True)
class _Text:
    """The place of a text in messages: a field of a message, a part of its content, or the arguments of a call."""

    message: int
    field: str
    part: int = 0

    def of(self, messages: Sequence[Message]) -> str:
        message = messages[self.message]
        if self.field == "tool_calls":
            return message.tool_calls[self.part].function.arguments
        return message.parts[self.part] if self.field == "parts" else str(getattr(message, self.field))

    @property
    def is_content(self) -> bool:
        return self.field in ("content", "parts")


@dataclass(frozen=True)
class _Layout:
    """Form of messages for a template, and the prompt, which alternates `words` and `shown` texts.

    Without words, the template refused the messages.
    """

    roles: tuple[str, ...]
    joined: frozenset[int]  # parts of these messages are joined
    texts: tuple[_Text, ...]
    words: tuple[str, ...] = ()
    shown: tuple[_Text, ...] = ()
    has_objects: bool = True  # arguments of calls are objects; otherwise JSON text

    @cached_property
    def missing(self) -> list[_Text]:
        """Return the texts that the template omits, or all texts if it refused the messages."""
        found = set(self.shown)
        return [text for text in self.texts if text not in found]

    @cached_property
    def lost(self) -> frozenset[int]:
        return frozenset(text.message for text in self.missing if text.is_content)

    @property
    def listed(self) -> frozenset[int]:
        """Return the messages whose parts the prompt prints as a list."""
        pairs = zip(self.words, self.shown, strict=False)
        return frozenset(text.message for words, text in pairs if LIST_ITEM.search(words))

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the prompt of messages, unless the template changes their texts."""
        texts = [text.of(messages) for text in self.shown]
        return "".join(piece for pair in zip(self.words, [*texts, ""], strict=False) for piece in pair)


class MessageTexts:
    """Finds the message form of a template, and the texts that it omits."""

    def __init__(self, rendered: Rendering) -> None:
        self._rendered = rendered
        self._layouts: dict[tuple[object, ...], _Layout] = {}

    def as_taken(self, messages: Sequence[Message], options: TemplateOptions) -> list[dict[str, Any]]:
        """Return messages with roles that the template knows, and with content in parts if it iterates over parts."""
        layout = self._layout(messages, options)
        return _given(messages, layout.roles, layout.joined, layout.has_objects)

    def refuse_lost(self, messages: Sequence[Message], options: TemplateOptions, prompt: str) -> None:
        """Raise ValueError, for the user, if the prompt lacks a text of the messages."""
        layout = self._layout(messages, options)
        if options.tools and layout.words:
            without = options.model_copy(update={"tools": ()})
            if self._layout(messages, without).words == layout.words:
                raise ValueError(f"tools: {NO_TOOLS}; expected another model, or no such field")
        for text in layout.missing if layout.words else ():
            if text.field == "tool_calls":
                raise _error(messages, text.message, f"{NO_TOOLS}, and leaves out its calls")
        if layout.words and layout.lost:
            number = min(layout.lost)
            expected = "add it to another message, such as a user's, or join all messages of the system at the start"
            if messages[number].role not in COMMON:
                expected = "expected one of the roles system, user, assistant"
            raise _error(messages, number, f"the model's chat template leaves its text out; {expected}")
        if layout.words and prompt == layout.prompt(messages):
            return
        for number in _changed(messages, layout, prompt, options.continue_final_message):
            reason = "the model's chat template leaves out a part of its text, or changes it"
            raise _error(messages, number, f"{reason}; look for marks that it reads, such as </think>")

    def unread(self, messages: Sequence[Message], options: TemplateOptions) -> list[str]:
        """Return what else the template omits from messages. It must accept these messages."""
        missing = self._layout(messages, options).missing
        names = sorted({f"messages[].{text.field}" for text in missing if not text.is_content})
        end = messages[-1].content
        may_trim = options.continue_final_message and end[-1:].isspace()
        if may_trim and not self._rendered(self.as_taken(messages, options), options).endswith(end):
            names.append("white space at the end of messages[-1].content")
        return names

    def _layout(self, messages: Sequence[Message], options: TemplateOptions) -> _Layout:
        shape = (*map(_shape, messages), repr(options))
        if (layout := self._layouts.get(shape)) is None:
            if len(self._layouts) == MOST_SHAPES:
                self._layouts.clear()
            layout = self._layouts[shape] = self._made(messages, options)
        return layout

    def _made(self, messages: Sequence[Message], options: TemplateOptions) -> _Layout:
        """Return the form that keeps roles and parts, as far as the template then shows all texts."""
        with_parts = frozenset(number for number, message in enumerate(messages) if message.parts)
        layout = self._tried(messages, options, tuple(message.role for message in messages), with_parts)
        roles = tuple(ALIASES.get(role, role) if n in layout.lost else role for n, role in enumerate(layout.roles))
        if roles != layout.roles:
            layout = self._tried(messages, options, roles, with_parts)
        if not layout.words and any(message.tool_calls for message in messages):
            layout = self._tried(messages, options, roles, with_parts, has_objects=False)
        if with_parts:
            apart = self._tried(messages, options, roles, frozenset())
            if joined := with_parts & (apart.lost | apart.listed):
                apart = self._tried(messages, options, roles, joined)
            if not apart.lost:
                return apart
        return layout

    def _tried(
        self,
        messages: Sequence[Message],
        options: TemplateOptions,
        roles: tuple[str, ...],
        joined: frozenset[int],
        has_objects: bool = True,
    ) -> _Layout:
        texts = tuple(text for number in range(len(messages)) for text in _texts(messages, number))
        try:
            prompt = self._rendered(_given(_marked(messages, texts), roles, joined, has_objects), options)
        except (TemplateLimitError, UserError):
            raise
        except Exception:  # a template is a program and may raise anything
            return _Layout(roles, joined, texts)
        pieces = MARKER.split(prompt)
        if any(int(piece) >= len(texts) for piece in pieces[1::2]):  # a variable of the line looks like a marker
            return _Layout(roles, joined, texts)
        shown = tuple(texts[int(piece)] for piece in pieces[1::2])
        return _Layout(roles, joined, texts, tuple(pieces[::2]), shown, has_objects)


def _shape(message: Message) -> tuple[object, ...]:
    """Return everything in a message that a template may depend on, except its texts."""
    texts = (*(message.parts or (message.content,)), message.name, message.reasoning_content)
    calls = (message.tool_call_id is None, *(call.function.name for call in message.tool_calls))
    return (message.role, calls, *(None if text and not text.isspace() else (text,) for text in texts))


def _texts(messages: Sequence[Message], number: int) -> Iterator[_Text]:
    message = messages[number]
    content = [_Text(number, "parts", part) for part in range(len(message.parts))] or [_Text(number, "content")]
    others = [_Text(number, field) for field in ("name", "reasoning_content") if getattr(message, field) is not None]
    others += [_Text(number, "tool_calls", call) for call in range(len(message.tool_calls))]
    return (text for text in (*content, *others) if text.of(messages).strip())


def _marked(messages: Sequence[Message], texts: Iterable[_Text]) -> list[Message]:
    fields = [dict(message) for message in messages]
    for number, text in enumerate(texts):
        marker, own = f"swiftbatch{number}text", fields[text.message]
        if text.field == "parts":
            own["parts"] = (*own["parts"][: text.part], marker, *own["parts"][text.part + 1 :])
            own["content"] = "\n".join(own["parts"])
        elif text.field == "tool_calls":
            calls = list(own["tool_calls"])
            function = calls[text.part].function.model_copy(update={"arguments": json.dumps({"text": marker})})
            calls[text.part] = calls[text.part].model_copy(update={"function": function})
            own["tool_calls"] = tuple(calls)
        else:
            own[text.field] = marker
    return [Message.model_construct(**own) for own in fields]


def _given(
    messages: Iterable[Message], roles: Sequence[str], joined: frozenset[int], has_objects: bool
) -> list[dict[str, Any]]:
    given = []
    for number, (message, role) in enumerate(zip(messages, roles, strict=True)):
        values = message.as_sent() | {"role": role}
        if (texts := values.pop("parts", None)) and number not in joined:
            values["content"] = [{"type": "text", "text": text} for text in texts]
        if "reasoning_content" in values:
            values["thinking"] = values["reasoning_content"]  # templates of gpt-oss read this name
        for call in values.get("tool_calls", ()):
            call["type"] = "function"
            call["function"].setdefault("arguments", "{}")
            if has_objects:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        given.append(values)
    return given


def _error(messages: Sequence[Message], number: int, reason: str) -> ValueError:
    return ValueError(f"messages[{number}] (role {shown(messages[number].role)}): {reason}")


def _changed(messages: Sequence[Message], layout: _Layout, prompt: str, goes_on: bool) -> Iterator[int]:
    """Yield messages whose text is not in a prompt, apart from outer white space, escapes, switches and thoughts."""
    prompt, start = SWITCHES.sub("", prompt), 0
    for place in dict.fromkeys(layout.shown or layout.texts):
        if not place.is_content:
            continue
        text = place.of(messages)
        ways = [[text]]
        if layout.roles[place.message] == "assistant" and not (goes_on and place.message == len(messages) - 1):
            ways += [_beside_thoughts(text, *marks) for marks in THOUGHTS if marks[1] in text]
        ends = [end for way in ways if (end := _end(prompt, way, start)) is not None]
        if not ends:
            yield place.message
        elif layout.shown:
            start = min(ends)


def _beside_thoughts(text: str, begin: str, end: str) -> list[str]:
    """Return the parts of a text between its thoughts, whose first mark may be missing."""
    *thoughts, rest = text.split(end)
    return [*(thought.partition(begin)[0] for thought in thoughts if begin in thought), rest]


def _end(prompt: str, texts: Iterable[str], start: int) -> int | None:
    """Return the index after consecutive texts in a prompt, searched from `start`, or None if one is missing."""
    for text in (SWITCHES.sub("", text).strip() for text in texts):
        written = (json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
        forms = (text, *written, html.escape(text), str(markupsafe.escape(text)))
        ends = (place + len(form) for form in forms if (place := prompt.find(form, start)) >= 0)
        if (end := next(ends, None)) is None:
            return None
        start = end
    return start


CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
MAX_WORDS = 500  # limits another program's error message


class ChatTemplate:
    """Chat template, rendered with a model's tokenizer."""

    def __init__(self, tokenizer: Any, clock: str | None = None) -> None:
        """`clock` is the ISO time that templates see, or None for the current time."""
        self._tokenizer = tokenizer
        self._clock = clock or datetime.now().astimezone().isoformat(timespec="seconds")
        self._texts = MessageTexts(self._rendered)
        self._renderers: dict[str, TemplateRenderer] = {}  # by template

    def render(self, messages: Sequence[Message], options: TemplateOptions | None) -> str:
        """Return the text of messages. Raises ValueError, for the user."""
        if self._tokenizer.chat_template is None:
            raise ValueError("messages: this model's tokenizer has no chat template; send a `prompt` instead")
        options = options or TemplateOptions()
        try:
            return self._rendered(self._texts.as_taken(messages, options), options)
        except TemplateLimitError as error:
            raise ValueError(f"messages: the model's chat template {error}") from None
        except UserError:  # does not come from the template
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise ValueError(f"messages: the model's chat template refuses them: {words_of(error)}") from None

    @property
    def reads_clock(self) -> bool:
        """Return whether the template may print the time."""
        return self._tokenizer.chat_template is not None and self._mentions("strftime_now")

    def refuse_lost(self, messages: Sequence[Message], options: TemplateOptions | None, prompt: str) -> None:
        """Raise ValueError, for the user, if the prompt lacks a text of the messages."""
        self._texts.refuse_lost(messages, options or TemplateOptions(), prompt)

    def own_tokens(self, messages: Sequence[Message], options: TemplateOptions | None) -> list[int] | None:
        """Return the tokens of messages if these do not come from their text."""
        return None

    def without_answer(self, messages: Sequence[Message], options: TemplateOptions | None) -> str:
        """Return the text without the start of an answer."""
        options = options or TemplateOptions()
        return self.render(messages, options.model_copy(update={"add_generation_prompt": False}))

    def unread(self, messages: Sequence[Message], options: TemplateOptions | None) -> list[str]:
        """Return names of messages' fields and options that the template ignores."""
        options = options or TemplateOptions()
        names = [name for name in options.kwargs if not self._mentions(name)]
        return [*names, *self._texts.unread(messages, options)]

    def _rendered(self, messages: list[dict[str, Any]], options: TemplateOptions) -> str:
        """Return the text of messages as transformers' `apply_chat_template` does."""
        text = self._renderer(options).render(self._variables(messages, options))
        return _untagged(text) if options.continue_final_message else text

    def _variables(self, messages: list[dict[str, Any]], options: TemplateOptions) -> dict[str, Any]:
        shown = _tagged(messages) if options.continue_final_message else messages
        fixed = {"messages": shown, "tools": list(options.tools) or None, "documents": None}
        own = {**self._tokenizer.special_tokens_map, **options.kwargs}
        return fixed | {"add_generation_prompt": options.add_generation_prompt} | own

    def prepare(self, chats: Iterable[tuple[Sequence[Message], TemplateOptions | None]]) -> None:
        """Render chats in one batch, before `render` is called for each."""
        if self._tokenizer.chat_template is not None:
            asked = ((said, options or TemplateOptions()) for said, options in chats)
            with contextlib.suppress(ValueError):  # `render` reports the error
                ready = defaultdict[TemplateRenderer, list[dict[str, Any]]](list)
                for said, options in asked:
                    ready[self._renderer(options)].append(self._variables(self._texts.as_taken(said, options), options))
                for renderer, variables in ready.items():
                    renderer.prepare(variables)

    def _renderer(self, options: TemplateOptions) -> TemplateRenderer:
        """Return the renderer of the template, or of another that is for tools."""
        source = self._tokenizer.get_chat_template(tools=list(options.tools) or None)
        if source not in self._renderers:
            self._renderers[source] = TemplateRenderer(source, self._clock)
        return self._renderers[source]

    def _mentions(self, name: str) -> bool:
        templates = self._tokenizer.chat_template
        texts = templates.values() if isinstance(templates, dict) else [templates]
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)


def _tagged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with a tag at the end of the text that is to be continued."""
    *others, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*others, last | {"content": content + CONTINUED}]
    *parts, part = content
    return [*others, last | {"content": [*parts, part | {"text": part["text"] + CONTINUED}]}]


def _untagged(text: str) -> str:
    before, tag, behind = text.rpartition(CONTINUED.strip())
    if not tag:
        raise ValueError("it does not show the final message, which is to be continued")
    return before if behind.startswith(" ") else before.rstrip()


def words_of(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_WORDS else f"{text[:MAX_WORDS]}..."
