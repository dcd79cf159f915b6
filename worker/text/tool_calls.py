"""Calls of tools in a model's text, in the form of its family, which its chat template shows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from swiftbatch.jobs.run.output_line import ToolCalls

Tools = Sequence[dict[str, Any]]
"""Functions in OpenAI's form."""
Schemas = Mapping[str, dict[str, Any]]
"""The parameters of each function, by its name."""

JSON = json.JSONDecoder(strict=False)  # models write line ends in strings unescaped
UNKNOWN_FORM = (
    "field 'tools': the form of this model's calls is unknown; expected a model of a family in docs/jobs.md#tools, or "
    "no such field"
)
NUM_OF_ID = 9  # letters and digits of a call's id, as Mistral's templates require
CHANNEL = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|start|channel|call|return)\|>|\Z)", re.S)


class Piece(NamedTuple):
    """Part of a text with calls, each a name and its arguments as JSON text."""

    start: int
    end: int
    calls: list[tuple[str, str]]


class Written(NamedTuple):
    """Texts of which calls are composed."""

    call: str  # with $NAME and $ARGUMENTS
    between: str | None = ""  # None: a text has one call
    begin: str = ""
    end: str = ""
    thought: tuple[str, str] | None = None  # texts around a thought that may come first


class WrittenTags(NamedTuple):
    """Texts of which calls with tags are composed."""

    begin: str  # with $NAME
    argument: str  # with $KEY; its value follows
    end_of_value: str  # ends with its tag
    behind: str  # an argument
    end: str
    forbidden: str  # pattern of what no value of a string may have, because the form's parser would end there
    key: re.Pattern[str]  # of names that the parser reads back
    between: str = "\n"


@dataclass(frozen=True)
class JsonForm:
    """Calls whose arguments are JSON."""

    family: str
    sign: re.Pattern[str]  # is in the chat templates of the family
    marks: tuple[str, ...]  # tokens that the parser must see, also where they are special
    head: re.Pattern[str]  # precedes the JSON; without the group `name`, the JSON has the name, or is a list of calls
    tail: re.Pattern[str]  # follows the JSON
    written: Written
    around: tuple[str, ...] = ()  # marks around all calls
    has_channels: bool = False  # other texts are in channels

    def pieces(self, text: str, schemas: Schemas) -> Iterator[Piece]:
        """Yield the parts of a text that are valid calls."""
        place = 0
        while (head := self.head.search(text, place)) is not None:
            place = max(head.end(), head.start() + 1)
            try:
                value, end = JSON.raw_decode(text, head.end())
                calls = self._calls(head, value)
            except (ValueError, RecursionError):
                continue
            tail = self.tail.match(text, end)
            if tail is not None and calls and all(name in schemas for name, _ in calls):
                yield Piece(head.start(), tail.end(), calls)
                place = tail.end()

    def _calls(self, head: re.Match[str], value: Any) -> list[tuple[str, str]]:
        """Raise ValueError."""
        if "name" in self.head.groupindex:
            return [_call(head["name"], value)]
        many = value if isinstance(value, list) else [value]
        if not all(isinstance(each, dict) for each in many):
            raise ValueError("found no object")
        return [_call(each.get("name"), each.get("arguments", each.get("parameters"))) for each in many]


@dataclass(frozen=True)
class TaggedForm:
    """Calls with a tag for each argument, whose type only the schema tells."""

    family: str
    sign: re.Pattern[str]
    marks: tuple[str, ...]
    call: re.Pattern[str]  # has the groups `name` and `body`
    argument: re.Pattern[str]  # has a name and a value
    written: WrittenTags
    around: ClassVar[tuple[str, ...]] = ()
    has_channels: ClassVar[bool] = False

    def pieces(self, text: str, schemas: Schemas) -> Iterator[Piece]:
        """Yield the parts of a text that are valid calls."""
        with suppress(ValueError, RecursionError):
            yield from self._as_written(text, schemas)
            return
        for found in self.call.finditer(text):
            schema = schemas.get(found["name"])
            if schema is None:
                continue
            types = schema.get("properties") or {}
            pairs = [(name.strip(), said) for name, said in self.argument.findall(found["body"])]
            if not self.argument.sub("", found["body"]).strip():
                arguments = {name: _value(said, types.get(name)) for name, said in pairs}
                with suppress(ValueError, RecursionError):
                    yield Piece(*found.span(), [_call(found["name"], arguments)])

    def _as_written(self, text: str, schemas: Schemas) -> list[Piece]:
        """Return the calls of a text in exactly the form that a grammar forces; its JSON may contain tags.

        Raises ValueError for any other text.
        """
        text, start, pieces = text.rstrip(), len(text) - len(text.lstrip()), list[Piece]()
        while not pieces or start < len(text):
            start = _behind(text, self.written.between, start) if pieces else start
            place, name = self._name(text, start, schemas)
            arguments: dict[str, Any] = {}
            while not text.startswith(self.written.end, place):
                place, key, value = self._argument(text, place, schemas[name].get("properties") or {})
                arguments[key] = value
            end = place + len(self.written.end)
            pieces.append(Piece(start, end, [_call(name, arguments)]))
            start = end
        return pieces

    def _name(self, text: str, start: int, schemas: Schemas) -> tuple[int, str]:
        before, after = self.written.begin.split("$NAME")
        place = _behind(text, before, start)
        end = text.index(after, place)
        if text[place:end] not in schemas:
            raise ValueError("found no call of a tool")
        return end + len(after), text[place:end]

    def _argument(self, text: str, start: int, types: Mapping[str, Any]) -> tuple[int, str, Any]:
        before, after = self.written.argument.split("$KEY")
        place = _behind(text, before, start)
        end = text.index(after, place)
        key, place = text[place:end], end + len(after)
        if is_string(types.get(key)):
            end = text.index(self.written.end_of_value, place)
            value = text[place:end]
        else:
            value, end = JSON.raw_decode(text, place)
        return _behind(text, self.written.end_of_value + self.written.behind, end), key, value


CallForm = JsonForm | TaggedForm


def _behind(text: str, expected: str, place: int) -> int:
    """Return the place behind an expected text. Raises ValueError if another one is there."""
    if not text.startswith(expected, place):
        raise ValueError("found another text")
    return place + len(expected)


def is_string(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _call(name: object, arguments: object) -> tuple[str, str]:
    """Raise ValueError."""
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("found no call")
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _value(text: str, schema: object) -> Any:
    """Return an argument as its schema wants it: a string, or what its JSON says."""
    if is_string(schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def calls_in(form: CallForm, text: str, tools: Tools, job_id: str) -> ToolCalls | None:
    """Return the calls in an output's text, with ids that the job decides, and the other text; None without calls."""
    functions = [tool["function"] for tool in tools]
    pieces = list(form.pieces(text, {each["name"]: each.get("parameters") or {} for each in functions}))
    if not pieces:
        return None
    bounds = zip([0, *(piece.end for piece in pieces)], [*(piece.start for piece in pieces), len(text)], strict=True)
    rest, thought = "".join(text[start:end] for start, end in bounds), None
    if form.has_channels:
        said = CHANNEL.findall(rest)
        thought = "\n".join(body for channel, body in said if channel == "analysis") or None
        rest = "\n".join(body for channel, body in said if channel != "analysis")
    for mark in form.around:
        rest = rest.replace(mark, "")
    calls = [call for piece in pieces for call in piece.calls]
    tool_calls = [
        {"id": _id(job_id, number), "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return ToolCalls(tool_calls, rest.strip() or None, thought)


def _id(job_id: str, number: int) -> str:
    return hashlib.sha256(f"call {number} of {job_id}".encode()).hexdigest()[:NUM_OF_ID]


def form_of(tokenizer: Any) -> CallForm | None:
    """Return the form of a model's calls, known from its chat template, or without one from its tokens."""
    templates = tokenizer.chat_template
    texts = templates.values() if isinstance(templates, dict) else [templates or " ".join(tokenizer.get_vocab())]
    return next((form for form in FORMS if any(form.sign.search(text) for text in texts)), None)


DEEPSEEK = tuple(
    f"<\uff5ctool\u2581{each}\uff5c>" for each in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
CALLS, CALL, SEPARATOR, END_OF_CALL, END_OF_CALLS = DEEPSEEK
NAME = r"(?P<name>[\w.-]+)"


def up_to(tag: str) -> str:
    """Return the pattern of a text without a tag; one that may cross tags takes hours for a text in circles."""
    return rf"(?:(?!</?{tag}\b).)*"


FORMS: tuple[CallForm, ...] = (  # the first whose sign a template has
    JsonForm(
        "gpt-oss",
        re.compile(r"<\|channel\|>commentary"),
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        re.compile(
            rf"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? ?to=functions\.{NAME}(?:<\|channel\|>\w+)?\s*"
            r"(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>\s*"
        ),
        re.compile(r"\s*(?:<\|call\|>|\Z)"),
        Written(
            "<|channel|>commentary to=functions.$NAME <|constrain|>json<|message|>$ARGUMENTS",
            between=None,  # the token that ends the call ends the text, too
            thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        ),
        has_channels=True,
    ),
    TaggedForm(
        "GLM",
        re.compile(r"<arg_key>"),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        re.compile(rf"<tool_call>\s*{NAME}(?P<body>{up_to('tool_call')})</tool_call>", re.DOTALL),
        re.compile(rf"<arg_key>([^<]*)</arg_key>\s*<arg_value>({up_to('arg_key')})</arg_value>", re.DOTALL),
        WrittenTags(
            "<tool_call>$NAME\n",
            "<arg_key>$KEY</arg_key>\n<arg_value>",
            "</arg_value>",
            "\n",
            "</tool_call>",
            "<\\/?(tool_call|arg_key|arg_value)",
            re.compile(r"\S|\S[^<]*[^<\s]"),
        ),
    ),
    TaggedForm(
        "Qwen3-Coder",
        re.compile(r"<function="),
        ("<tool_call>", "</tool_call>"),
        re.compile(
            rf"<tool_call>\s*<function={NAME}>(?P<body>{up_to('tool_call')})</function>\s*</tool_call>", re.DOTALL
        ),
        re.compile(rf"<parameter=([^<>\n]+)>\n?({up_to('parameter')}?)\n?</parameter>", re.DOTALL),
        WrittenTags(
            "<tool_call>\n<function=$NAME>\n",
            "<parameter=$KEY>\n",
            "\n</parameter>",
            "\n",
            "</function>\n</tool_call>",
            "<\\/?(tool_call|parameter)",
            re.compile(r"[^<>\s]|[^<>\s][^<>\n]*[^<>\s]"),
        ),
    ),
    JsonForm(
        "DeepSeek-V3, R1",
        re.compile(rf"{CALL}[\s\S]*```json"),
        DEEPSEEK,
        re.compile(rf"{CALL}function{SEPARATOR}{NAME}\s*```json\s*"),
        re.compile(rf"\s*```\s*{END_OF_CALL}"),
        Written(
            f"{CALL}function{SEPARATOR}$NAME\n```json\n$ARGUMENTS\n```{END_OF_CALL}",
            "\n",
            CALLS,
            END_OF_CALLS,
        ),
        (CALLS, END_OF_CALLS),
    ),
    JsonForm(
        "DeepSeek-V3.1",
        re.compile(CALL),
        DEEPSEEK,
        re.compile(rf"{CALL}{NAME}{SEPARATOR}\s*"),
        re.compile(rf"\s*{END_OF_CALL}"),
        Written(
            f"{CALL}$NAME{SEPARATOR}$ARGUMENTS{END_OF_CALL}",
            begin=CALLS,
            end=END_OF_CALLS,
        ),
        (CALLS, END_OF_CALLS),
    ),
    JsonForm(
        "Mistral, from 2025 on",
        re.compile(r"\[TOOL_CALLS\][\s\S]*\[ARGS\]"),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        re.compile(rf"\[TOOL_CALLS\]\s*{NAME}(?:\[CALL_ID\]\w+)?\[ARGS\]\s*"),
        re.compile(r"\s*"),
        Written("[TOOL_CALLS]$NAME[ARGS]$ARGUMENTS"),
    ),
    JsonForm(
        "Mistral, until 2024",
        re.compile(r"\[TOOL_CALLS\]"),
        ("[TOOL_CALLS]",),
        re.compile(r"\[TOOL_CALLS\]\s*"),
        re.compile(r"\s*"),
        Written('{"name": "$NAME", "arguments": $ARGUMENTS}', ", ", "[TOOL_CALLS][", "]"),
    ),
    JsonForm(
        "Hermes, Qwen",
        re.compile(r"<tool_call>"),
        ("<tool_call>", "</tool_call>"),
        re.compile(r"<tool_call>\s*"),
        re.compile(r"\s*(?:</tool_call>|\Z)"),
        Written('<tool_call>\n{"name": "$NAME", "arguments": $ARGUMENTS}\n</tool_call>', "\n"),
    ),
    JsonForm(
        "Llama 3",
        re.compile(r'<\|python_tag\|>|{"name": function name, "parameters"'),
        ("<|python_tag|>",),
        re.compile(r"(?:\A|;)\s*(?:<\|python_tag\|>)?\s*(?={)"),
        re.compile(r"\s*(?=;|\Z)"),
        Written('{"name": "$NAME", "parameters": $ARGUMENTS}', "; "),
    ),
)
