"""Calls of tools in a model's text, in the form of its family, which its chat template shows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from swiftbatch.jobs.job import TemplateOptions
from swiftbatch.jobs.run.output_line import ToolCalls
from swiftbatch.jobs.structured_output import Structure
from swiftbatch.worker.constraints.grammar import GrammarTokenizer, StructureError, definition_of
from swiftbatch.worker.sampling.token_masks import ConstraintError

if TYPE_CHECKING:
    from swiftbatch.worker.sampling.sequence import Rule

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
    between: str = ""
    begin: str = ""
    end: str = ""


@dataclass(frozen=True)
class JsonForm:
    """Calls whose arguments are JSON."""

    family: str
    sign: re.Pattern[str]  # is in the chat templates of the family
    marks: tuple[str, ...]  # tokens that the parser must see, also where they are special
    head: re.Pattern[str]  # precedes the JSON; without the group `name`, the JSON has the name, or is a list of calls
    tail: re.Pattern[str]  # follows the JSON
    written: Written | None = None  # None: calls cannot be forced
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
    written: ClassVar[None] = None
    around: ClassVar[tuple[str, ...]] = ()
    has_channels: ClassVar[bool] = False

    def pieces(self, text: str, schemas: Schemas) -> Iterator[Piece]:
        """Yield the parts of a text that are valid calls."""
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


CallForm = JsonForm | TaggedForm


def _call(name: object, arguments: object) -> tuple[str, str]:
    """Raise ValueError."""
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("found no call")
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _value(text: str, schema: object) -> Any:
    """Return an argument as its schema wants it: a string, or what its JSON says."""
    if isinstance(schema, dict) and schema.get("type") == "string":
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


def rule_of_calls(form: CallForm, options: TemplateOptions, tokenizer: Any, grammars: GrammarTokenizer) -> Rule:
    """Return the rule of a text of calls, or of one call. Raises ConstraintError if calls cannot be forced."""
    if form.written is None:
        problem = f"calls of this model's family, {form.family}, cannot be forced"
        raise ConstraintError(f"field 'tool_choice': {problem}; expected auto or none")
    for number, tool in enumerate(options.tools):
        try:
            grammars.grammar(_parameters_of(tool))
        except StructureError as error:
            raise ConstraintError(f"field 'tools[{number}].function.parameters': {error.reason}") from None
    tools = [tool for tool in options.tools if options.function in (None, tool["function"]["name"])]
    vocab = tokenizer.get_vocab()
    tokens = {mark: vocab[mark] for mark in form.marks if mark in vocab}
    try:
        return grammars.grammar(grammar_of(form.written, tools, tokens, is_one=options.function is not None))
    except StructureError as error:
        raise ConstraintError(f"field 'tools': {error.reason}") from None


def grammar_of(written: Written, tools: Tools, tokens: Mapping[str, int], *, is_one: bool) -> Structure:
    """Return the grammar of one call or of several; `tokens` are the marks that are tokens."""
    call, between, begin, end = (_quoted(text, tokens) for text in written)
    rules = [
        f"start: {begin} call {'' if is_one else f'({between} call)*'} {end}",
        f"call: {' | '.join(f'call{number}' for number in range(len(tools)))}",
    ]
    for number, tool in enumerate(tools):
        own = call.replace("$NAME", tool["function"]["name"]).replace("$ARGUMENTS", f'" arguments{number} "')
        rules += [f"call{number}: {own}", f"arguments{number}: %json {_schema(tool)}"]
    return Structure.model_construct(kind="grammar", text="\n".join(rules) + "\n")


def _parameters_of(tool: dict[str, Any]) -> Structure:
    """Return the structure of a call's arguments."""
    schema = {**(tool["function"].get("parameters") or {"additionalProperties": False}), "type": "object"}
    return Structure.model_construct(kind="json", text=json.dumps(schema))


def _schema(tool: dict[str, Any]) -> str:
    [only] = json.loads(definition_of(_parameters_of(tool)))["grammars"]
    return json.dumps(only["json_schema"])


def _quoted(text: str, tokens: Mapping[str, int]) -> str:
    """Return a text in Lark, with tokens by their ids."""
    marks = re.compile("|".join(map(re.escape, tokens)) or r"\Z.")
    texts = [json.dumps(each, ensure_ascii=False) for each in marks.split(text)]
    ids = [f"<[{tokens[mark]}]>" for mark in marks.findall(text)]
    return " ".join(each for pair in zip(texts, [*ids, ""], strict=True) for each in pair if each not in ("", '""'))


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
        has_channels=True,
    ),
    TaggedForm(
        "GLM",
        re.compile(r"<arg_key>"),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        re.compile(rf"<tool_call>\s*{NAME}(?P<body>{up_to('tool_call')})</tool_call>", re.DOTALL),
        re.compile(rf"<arg_key>([^<]*)</arg_key>\s*<arg_value>({up_to('arg_key')})</arg_value>", re.DOTALL),
    ),
    TaggedForm(
        "Qwen3-Coder",
        re.compile(r"<function="),
        ("<tool_call>", "</tool_call>"),
        re.compile(
            rf"<tool_call>\s*<function={NAME}>(?P<body>{up_to('tool_call')})</function>\s*</tool_call>", re.DOTALL
        ),
        re.compile(rf"<parameter=([^<>\n]+)>\n?({up_to('parameter')}?)\n?</parameter>", re.DOTALL),
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
