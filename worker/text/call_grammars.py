"""Grammars of texts that must be calls of tools, in the form of the model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from swiftbatch.jobs.job import TemplateOptions
from swiftbatch.jobs.json_records import shown
from swiftbatch.jobs.structured_output import FOLLOWED_FORMATS, Structure
from swiftbatch.worker.constraints.grammar import SPECIAL, GrammarTokenizer, StructureError, definition_of
from swiftbatch.worker.sampling.token_masks import ConstraintError
from swiftbatch.worker.text.tool_calls import CallForm, Tools, Written, WrittenTags, is_string

if TYPE_CHECKING:
    from swiftbatch.worker.sampling.sequence import Rule

Tokens = Mapping[str, int]
"""The marks that are tokens."""

# keywords that tags can follow: of all arguments, and of an argument that is a string
OF_ALL = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
OF_STRING = {"type", "enum", "const", "minLength", "maxLength", "pattern"}
NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"}
ANY = "(?s:.*)"


def rule_of_calls(form: CallForm, options: TemplateOptions, tokenizer: Any, grammars: GrammarTokenizer) -> Rule:
    """Return the rule of a text of calls, or of one call. Raises ConstraintError for a schema."""
    for number, tool in enumerate(options.tools):
        try:
            grammars.grammar(_parameters_of(tool))
            if isinstance(form.written, WrittenTags):
                _refuse_untagged(tool, form.written)
        except StructureError as error:
            raise ConstraintError(f"field 'tools[{number}].function.parameters': {error.reason}") from None
        except ValueError as error:
            raise ConstraintError(f"field 'tools[{number}].function.parameters': {error}") from None
    tools = [tool for tool in options.tools if options.function in (None, tool["function"]["name"])]
    vocab = tokenizer.get_vocab()
    tokens = {mark: vocab[mark] for mark in form.marks if mark in vocab}
    try:
        return grammars.grammar(grammar_of(form.written, tools, tokens, is_one=options.function is not None))
    except StructureError as error:
        raise ConstraintError(f"field 'tools': {error.reason}") from None


def grammar_of(written: Written | WrittenTags, tools: Tools, tokens: Tokens, *, is_one: bool) -> Structure:
    """Return the grammar of one call or of several."""
    made = _with_tags if isinstance(written, WrittenTags) else _with_json
    call, rules = [], list[str]()
    for number, tool in enumerate(tools):
        call.append(f"call{number}")
        rules += made(written, number, tool, tokens)  # type: ignore[arg-type]
    between, begin, thought, end = written.between, "", "", ""
    if isinstance(written, Written):
        begin, end = _quoted(written.begin, tokens), _quoted(written.end, tokens)
        thought = _thought(written, tokens)
    more = "" if is_one or between is None else f"({_quoted(between, tokens)} call)*"
    rules = [f"start: {thought} {begin} call {more} {end}", f"call: {' | '.join(call)}", *rules]
    return Structure.model_construct(kind="grammar", text="\n".join(rules) + "\n")


def _thought(written: Written, tokens: Tokens) -> str:
    """Return a thought that may come first; its end must be a token, which no text within it contains."""
    if written.thought is None or not any(written.thought[1].startswith(mark) for mark in tokens):
        return ""
    before, behind = (_quoted(text, tokens) for text in written.thought)
    return f"({before} /{ANY}/ {behind})?"


def _with_json(written: Written, number: int, tool: dict[str, Any], tokens: Tokens) -> list[str]:
    call = _quoted(written.call, tokens).replace("$NAME", tool["function"]["name"])
    own = call.replace("$ARGUMENTS", f'" arguments{number} "')
    return [f"call{number}: {own}", f"arguments{number}: {_json(_parameters_of(tool))}"]


def _with_tags(written: WrittenTags, number: int, tool: dict[str, Any], tokens: Tokens) -> list[str]:
    """Return the rules of a call with the arguments of a schema in its order."""
    parameters = tool["function"].get("parameters") or {}
    required = parameters.get("required", ())
    places, rules = [], list[str]()
    for place, (key, schema) in enumerate((parameters.get("properties") or {}).items()):
        name = f"{number}_{place}"
        places.append(f"argument{name}{'' if key in required else '?'}")
        start = _quoted(written.argument, tokens).replace("$KEY", json.dumps(key, ensure_ascii=False)[1:-1])
        value, more = _value(written, name, schema, parameters, tokens)
        rules += [f"argument{name}: {start} {value} {_quoted(written.behind, tokens)}", *more]
    begin = _quoted(written.begin, tokens).replace("$NAME", tool["function"]["name"])
    return [f"call{number}: {begin} {' '.join(places)} {_quoted(written.end, tokens)}", *rules]


def _value(
    written: WrittenTags, name: str, schema: Any, parameters: dict[str, Any], tokens: Tokens
) -> tuple[str, list[str]]:
    """Return a value with its end, and their rules. A string is written as it is, other values as JSON."""
    end = _quoted(written.end_of_value, tokens)
    if not is_string(schema):
        around = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
        whole = schema | around if isinstance(schema, dict) else schema
        own = Structure.model_construct(kind="json", text=json.dumps(whole))
        return f"value{name} {end}", [f"value{name}: {_json(own)}"]
    is_token = any(written.end_of_value.startswith(mark) for mark in tokens)
    closing = "" if is_token else _pattern(written.end_of_value)  # as one lexeme, which no other text can be part of
    inner = f"{ANY}{written.forbidden}{ANY}"
    parts = [*(f"/({each}){closing}/" for each in _patterns(schema)), f"~/{inner}{closing}/"]
    return f"STRING{name} {end if is_token else ''}", [f"STRING{name}: {' & '.join(parts)}"]


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the patterns that a string must match."""
    yield f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"
    if "enum" in schema or "const" in schema:
        allowed = [schema["const"]] if "const" in schema else schema["enum"]
        yield "|".join(_pattern(each) for each in allowed if isinstance(each, str))
    if "pattern" in schema:
        start = "" if schema["pattern"].startswith("^") else ANY
        end = "" if schema["pattern"].endswith("$") else ANY
        yield start + schema["pattern"].removeprefix("^").removesuffix("$").replace("/", "\\/") + end


def _pattern(text: str) -> str:
    """Return the pattern of a text in Lark."""
    return SPECIAL.sub(r"\\\g<0>", text).replace("/", "\\/").replace("\n", "\\n")


def _refuse_untagged(tool: dict[str, Any], written: WrittenTags) -> None:
    """Raise ValueError for parameters that calls with tags cannot follow."""
    parameters = tool["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    if unknown := parameters.keys() - OF_ALL - NOTES:
        raise ValueError(f"found {shown(min(unknown))}, which this model's form of calls cannot follow")
    for key in {*properties, *parameters.get("required", ())}:
        if key not in properties or not written.key.fullmatch(key):
            raise ValueError(f"found the argument {shown(key)}, which this model's form of calls cannot write")
    for key, schema in properties.items():
        idle = {"format"} if is_string(schema) and schema.get("format") not in FOLLOWED_FORMATS else set[str]()
        if is_string(schema) and (unknown := schema.keys() - OF_STRING - NOTES - idle):
            expected = 'expected none in a string, or a type such as ["string", "null"]'
            raise ValueError(f"found {shown(min(unknown))} of {shown(key)}, {expected}")


def _parameters_of(tool: dict[str, Any]) -> Structure:
    """Return the structure of a call's arguments, which are an object. Raises ValueError for another type."""
    kind = (tool["function"].get("parameters") or {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f'found the type {shown(kind)}, expected "object", since arguments are one')
    schema = {**(tool["function"].get("parameters") or {"additionalProperties": False}), "type": "object"}
    return Structure.model_construct(kind="json", text=json.dumps(schema))


def _json(structure: Structure) -> str:
    [only] = json.loads(definition_of(structure))["grammars"]
    return f"%json {json.dumps(only['json_schema'])}"


def _quoted(text: str, tokens: Tokens) -> str:
    """Return a text in Lark, with tokens by their ids."""
    marks = re.compile("|".join(map(re.escape, tokens)) or r"\Z.")
    texts = [json.dumps(each, ensure_ascii=False) for each in marks.split(text)]
    ids = [f"<[{tokens[mark]}]>" for mark in marks.findall(text)]
    return " ".join(each for pair in zip(texts, [*ids, ""], strict=True) for each in pair if each not in ("", '""'))
