"""Books on disk, as texts and as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from swiftbatch.jobs.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

JUMP_SHARE = 1 / 3  # share of windows made of a text's first tokens and a stretch from further back


class CorpusError(UserError):
    """The data folder holds no readable books."""


def read_books(data: Path, pattern: str = "*train*.jsonl") -> Iterator[str]:
    """Yield the `text` of every record of the JSONL files under `data` that match `pattern`, in file order.

    Raises CorpusError for what is no such record, and where there is no text at all.
    """
    paths = [data] if data.is_file() else sorted(data.rglob(pattern))
    if not paths:
        raise CorpusError(f"{data}: no file matches {pattern}; expected JSONL records with a `text` field")
    num_characters = 0
    for path in paths:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = _text_of(path, number, line)
                num_characters += len(text)
                yield text
    if not num_characters:
        raise CorpusError(f"{data}: the files that match {pattern} hold no text; expected records with a `text` field")


def _text_of(path: Path, number: int, line: bytes) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{path}, line {number}: expected a JSON object with `text`: {error}") from error
    if not isinstance(text, str):
        raise CorpusError(f"{path}, line {number}, text: found {type(text).__name__}, expected a string")
    return text


def encode_books(books: list[str], tokenizer: PreTrainedTokenizerFast) -> list[np.ndarray]:
    """Encode each book to ids `[num_tokens] uint16`, without the token that every text begins with."""
    encoded = tokenizer(books, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return [np.asarray(ids, dtype=np.uint16) for ids in encoded]


def jumping_positions(random: np.random.Generator, num_tokens: int, length: int, num_sinks: int) -> np.ndarray:
    """Positions `[length]` of a stretch of a text, or of its first tokens and a stretch from anywhere behind them.

    So is a long text read in use; no text may be shorter than `length`.
    """
    num_sinks = num_sinks if random.random() < JUMP_SHARE else 0
    start = random.integers(num_sinks, num_tokens - length + num_sinks + 1)
    return np.concatenate([np.arange(num_sinks), np.arange(start, start + length - num_sinks)])
