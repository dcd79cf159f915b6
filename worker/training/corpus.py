"""Training data on disk: JSONL files of books and of chats."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.job import Message, TemplateOptions
from swiftbatch.jobs.json_records import Strict, is_utf8, list_of, reasons
from swiftbatch.worker.text.tokenizer import Chat, TextCodec
from swiftbatch.worker.training.data_parallel import Report

TRAIN, TEST = "*train*.jsonl", "*test*.jsonl"  # patterns of file names
TEXT, MESSAGES, CONVERSATIONS = "text", "messages", "conversations"  # the last is ShareGPT's
EXPECTED = f"a JSON object with `{TEXT}`, or a chat's `{MESSAGES}` or `{CONVERSATIONS}`"
CHARACTERS_PER_TOKEN = 16  # upper bound for running text, which limits how much of a book is encoded
NUM_AT_A_TIME = 64  # records to encode
WHOLE_CHAT = TemplateOptions(add_generation_prompt=False)


class CorpusError(UserError):
    """Data folder without readable texts."""


class ChatRecord(Strict):
    messages: Annotated[tuple[Message, ...], BeforeValidator(list_of("a list of messages"))] = Field(min_length=1)


@dataclass(frozen=True)
class Record:
    where: str
    said: str | Chat


def read_books(data: Path) -> Iterator[str]:
    """Yield the `text` of each record, as `read_records` does; a chat is an error."""
    for record in read_records(data, TRAIN):
        if isinstance(record.said, Chat):
            raise CorpusError(f"{record.where}: found a chat, expected `{TEXT}`: a model is trained on books first")
        yield record.said


def read_records(data: Path, pattern: str) -> Iterator[Record]:
    """Yield each record of the JSONL files under `data` that match `pattern`, in file order.

    Raises CorpusError for records that are neither text nor chat, and if there is no text at all.
    """
    paths = [data] if data.is_file() else sorted(path for path in data.rglob(pattern) if path.is_file())
    if not paths:
        raise CorpusError(f"{data}: no file matches {pattern}; expected JSONL records, each {EXPECTED}")
    is_empty = True
    for path in paths:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                record = _record(f"{path}, line {number}", line)
                is_empty = is_empty and not record.said
                yield record
    if is_empty:
        raise CorpusError(f"{data}: the files that match {pattern} hold no text; expected records, each {EXPECTED}")


def _record(where: str, line: bytes) -> Record:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where}: expected {EXPECTED}: {error}") from error
    if not isinstance(values, dict) or not values.keys() & {TEXT, MESSAGES, CONVERSATIONS}:
        raise CorpusError(f"{where}: expected {EXPECTED}")
    if TEXT in values:
        if not isinstance(values[TEXT], str):
            raise CorpusError(f"{where}, {TEXT}: found {type(values[TEXT]).__name__}, expected a string")
        if not is_utf8(values[TEXT]):
            raise CorpusError(f"{where}, {TEXT}: found half a surrogate pair, expected text that UTF-8 can write")
        return Record(where, values[TEXT])
    return Record(where, _chat(where, values[MESSAGES if MESSAGES in values else CONVERSATIONS]))


def _chat(where: str, messages: Any) -> Chat:
    try:
        return Chat(ChatRecord(messages=messages).messages, WHOLE_CHAT)
    except ValidationError as error:
        raise CorpusError(f"{where}: {reasons(error, ChatRecord)}") from None


def encoded_records(data: Path, pattern: str, codec: TextCodec, num_tokens: int, report: Report) -> Iterator[list[int]]:
    """Yield the first `num_tokens` tokens of each record, of a chat in the words of the model's template.

    Chats that the template refuses are left out, and reported. Raises CorpusError if nothing else is there.
    """
    refused, num_encoded = list[str](), 0
    coming = read_records(data, pattern)
    while records := list(itertools.islice(coming, NUM_AT_A_TIME)):
        for record, found in zip(records, _encoded(codec, records, num_tokens), strict=True):
            if isinstance(found, ValueError):
                refused.append(f"{record.where}: {found}")
            else:
                num_encoded += 1
                yield found[:num_tokens]
    if refused and not num_encoded:
        raise CorpusError(f"{refused[0]}; no other chat in {pattern} is better, and there is no text")
    if refused:
        report(f"{len(refused):,} of {num_encoded + len(refused):,} records are left out, first {refused[0]}")


def _encoded(codec: TextCodec, records: list[Record], num_tokens: int) -> Iterator[list[int] | ValueError]:
    chats = [record.said for record in records if isinstance(record.said, Chat)]
    prompts = iter(codec.encode_all(chats, itertools.repeat(True)))
    for record in records:
        if isinstance(record.said, str):
            yield codec.encode(record.said[: num_tokens * CHARACTERS_PER_TOKEN])
        else:
            prompt = next(prompts)
            yield prompt if isinstance(prompt, ValueError) else list(prompt.token_ids)
