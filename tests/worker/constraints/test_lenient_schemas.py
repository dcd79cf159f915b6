"""A lenient run leaves out what a grammar cannot hold, and says what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.jobs.structured_output import MAX_SCHEMA, structure_of
from swiftbatch.worker.constraints.grammar import StructureError
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.session.session_parts import body, make_run, record, run_to_end

NUMBERS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
LOOKS_AHEAD = {"type": "string", "pattern": "^(?=a)ab$"}
SHIP = {"properties": {"uniqueItems": {"type": "string"}, "pattern": {"const": {"pattern": "(?=a)"}}}}

SCHEMAS: list[tuple[dict[str, Any], list[str], dict[str, Any]]] = [  # with what is left out, and what is left
    (NUMBERS | {"uniqueItems": True}, ["uniqueItems"], NUMBERS),
    (NUMBERS | {"contains": {"const": 1}, "minContains": 2}, ["contains", "minContains"], NUMBERS),
    (SHIP | {"propertyNames": LOOKS_AHEAD}, ["propertyNames"], SHIP),
    (
        {"properties": {"a": LOOKS_AHEAD, "b": {"type": "string", "pattern": "b+"}}, "not": {"const": 1}},
        ["not", "pattern"],
        {"properties": {"a": {"type": "string"}, "b": {"type": "string", "pattern": "b+"}}},
    ),
    (
        {"patternProperties": {"^(?=a)": {"type": "integer"}, "^b": {"type": "null"}}},
        ["patternProperties"],
        {"patternProperties": {"^b": {"type": "null"}}},
    ),
    ({"type": "string", "pattern": r"(a)\1"}, ["pattern"], {"type": "string"}),
    (
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        ["oneOf"],
        {"anyOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    ),
    (
        {"type": "array", "items": [{"minProperties": 2}, {"minProperties": 1}], "type ": {"minProperties": 9}},
        ["minProperties"],
        {"type": "array", "items": [{}, {"minProperties": 1}], "type ": {}},
    ),
    (
        {"anyOf": [{"$ref": "https://example.com/a.json"}, {"$ref": "#/$defs/b"}], "$defs": {"b": {"type": "null"}}},
        ["$ref"],
        {"anyOf": [{}, {"$ref": "#/$defs/b"}], "$defs": {"b": {"type": "null"}}},
    ),
    (
        {"properties": {"a": {"multipleOf": 0.12345678912}, "b": {"multipleOf": 0.5}}},
        ["multipleOf"],
        {"properties": {"a": {}, "b": {"multipleOf": 0.5}}},
    ),
    (NUMBERS, [], NUMBERS),
]
UNFIT = ({"const": 2**60 + 1}, {"type": "integer", "minimum": 5, "maximum": 3})


def asking(schema: dict[str, Any]) -> SamplingParams:
    return SamplingParams(max_tokens=9, seed=1, structured_outputs=structure_of({"json": schema}))


@pytest.fixture(scope="module")
def lenient(embedded_files: ModelFiles) -> TextCodec:
    return TextCodec(embedded_files, lenient_schemas=True)


@pytest.fixture(scope="module")
def strict(embedded_files: ModelFiles) -> TextCodec:
    return TextCodec(embedded_files)


@pytest.mark.parametrize(("schema", "ignored", "rest"), SCHEMAS, ids=[json.dumps(each[0]) for each in SCHEMAS])
def test_what_no_grammar_holds_is_left_out_and_the_rest_is_kept(
    lenient: TextCodec, strict: TextCodec, schema: dict[str, Any], ignored: list[str], rest: dict[str, Any]
) -> None:
    assert lenient.ignored_keywords(asking(schema)) == tuple(ignored)
    [left], [kept] = lenient.rules(asking(schema)), strict.rules(asking(rest))
    assert left._definition == kept._definition
    if ignored:
        with pytest.raises(StructureError) as told:
            strict.rules(asking(schema))
        named = ["pattern"] if ignored == ["patternProperties"] else ignored
        assert any(name in str(told.value) for name in named)


@pytest.mark.parametrize("schema", UNFIT)
def test_a_schema_that_no_keyword_makes_impossible_is_still_refused(lenient: TextCodec, schema: dict[str, Any]) -> None:
    with pytest.raises(StructureError):
        lenient.rules(asking(schema | {"uniqueItems": True}))


def test_a_schema_of_the_greatest_length_is_taken(lenient: TextCodec) -> None:
    schema = NUMBERS | {"uniqueItems": True, "title": ""}
    length = MAX_SCHEMA - len(json.dumps(schema, separators=(",", ":")))
    assert lenient.ignored_keywords(asking(schema | {"title": "a" * length})) == ("uniqueItems",)


def test_a_result_names_what_was_left_out_of_its_schema(tmp_path: Path, tiny_model: Path) -> None:
    schemas = {"odd": {"type": "boolean", "not": {"const": 1}}, "plain": {"type": "boolean"}}
    fields = {"ignore_eos": False, "temperature": 0.0}
    jobs = [record(name, 9, fields | {"structured_outputs": {"json": each}}) for name, each in schemas.items()]
    run = make_run(tmp_path / "run")
    run.add_jobs(jobs)
    run_to_end(run, tiny_model, *jobs, lenient_schemas=True)
    [odd], [plain] = (body(run, job)["choices"] for job in jobs)
    assert odd["ignored_schema_keywords"] == ["not"]
    assert odd["text"] in ("true", "false")
    assert "ignored_schema_keywords" not in plain
