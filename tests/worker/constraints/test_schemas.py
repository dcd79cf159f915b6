"""JSON schemas as programs write them."""

from __future__ import annotations

import datetime
import ipaddress
import uuid
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import pytest
from pydantic import UUID4, Base64Bytes, BaseModel, Field, HttpUrl, IPvAnyAddress, RootModel, SecretStr, create_model

from swiftbatch.jobs.structured_output import structure_of
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.text.tokenizer import TextCodec

Item = TypeVar("Item")


class Box(BaseModel, Generic[Item]):
    item: Item


class Node(BaseModel):
    kids: list[Node] = []


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Pet(RootModel[Cat | Dog]):
    root: Cat | Dog = Field(discriminator="kind")


TYPES: list[Any] = [
    *(UUID4, uuid.UUID, Path, bytes, Base64Bytes, SecretStr, HttpUrl),
    *(IPvAnyAddress, ipaddress.IPv4Address, ipaddress.IPv6Network, ipaddress.IPv4Interface),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
    *(Box[list[int]], Box[dict[str, int]], Box[Box[int]], Node, Pet, Literal["a", 1, None], int | str | None),
    *(tuple[int, str], tuple[int, ...], dict[int, Node], list[Pet]),
]


@pytest.fixture(scope="module")
def codec(embedded_files: ModelFiles) -> TextCodec:
    return TextCodec(embedded_files)


def lets(codec: TextCodec, schema: dict[str, Any], text: str) -> bool:
    given = structure_of({"json": schema})
    matcher = codec._grammars.grammar(given).matcher()
    token_ids = codec.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def test_what_pydantic_writes_for_a_type_is_taken(codec: TextCodec) -> None:
    for kind in TYPES:
        model = create_model("Model", value=(kind, ...), other=(kind | None, None))
        for mode in ("validation", "serialization"):
            assert not lets(codec, model.model_json_schema(mode=mode), "[]"), kind


@pytest.mark.parametrize("format", ["uuid4", "path", "binary", "password", "base64", "ipvanyaddress", "int32", "a b"])
def test_a_format_that_nobody_follows_is_an_annotation(codec: TextCodec, format: str) -> None:
    assert lets(codec, {"type": "string", "format": format}, '"any text"')
    assert lets(codec, {"type": "object", "properties": {"format": {"const": format}}}, f'{{"format": "{format}"}}')
    assert not lets(codec, {"type": "string", "format": "uuid"}, '"any text"')


NAMES = ("List[int]", "Dict[str, int]", "a/b", "a~b", "~1", "a%b", "%41", "Füße", 'say "no"', "a#b?c", "a\\b", "{<^|>}")


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_leads_to_its_definition_whatever_the_name_and_however_it_is_written(
    codec: TextCodec, name: str
) -> None:
    pointer = name.replace("~", "~0").replace("/", "~1")
    schema = {"$defs": {name: {"type": "integer"}}, "type": "array"}
    for written in (pointer, quote(pointer, safe="~"), quote(pointer, safe="~[],")):
        items = {"items": {"$ref": f"#/$defs/{written}"}}
        assert lets(codec, schema | items, "[7]")
        assert not lets(codec, schema | items, '["7"]')


def test_a_decimal_number_as_text_has_a_digit(codec: TextCodec) -> None:
    """A pattern from pydantic starts with a look-ahead."""
    schema = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    assert [text for text in ("", "-", ".", "+.", "7", "-7.25", ".5") if lets(codec, schema, f'"{text}"')] == [
        *("7", "-7.25", ".5")
    ]
