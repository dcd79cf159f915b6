"""Books on disk as one stream of token ids, and the windows that training draws from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from jobs.errors import UserError

JUMP_SHARE = 1 / 3  # of the windows: the first tokens of a text, then a stretch from further back


class CorpusError(UserError):
    """The data folder holds no readable books."""


def read_books(data: Path, pattern: str = "*train*.jsonl") -> Iterator[str]:
    """Yield the `text` of every record of the JSONL files under `data` that match `pattern`, in file order."""
    paths = [data] if data.is_file() else sorted(data.rglob(pattern))
    if not paths:
        raise CorpusError(f"{data}: no file matches {pattern}; expected JSONL records with a `text` field")
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield str(json.loads(line)["text"])
                except (ValueError, KeyError, TypeError) as error:
                    raise CorpusError(f"{path}, line {number}: expected a JSON object with `text`: {error}") from error


def encode_books(books: list[str], tokenizer: PreTrainedTokenizerFast) -> list[np.ndarray]:
    """Encode each book to ids `[num_tokens] uint16`, an end-of-text id in front of each."""
    encoded = tokenizer(books, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return [np.asarray([tokenizer.eos_token_id, *ids], dtype=np.uint16) for ids in encoded]


def jumping_positions(random: np.random.Generator, num_tokens: int, length: int, num_sinks: int) -> np.ndarray:
    """Positions `[length]` of a stretch of a text, or of its first tokens and a stretch from anywhere behind them.

    So is a long text read in use; no text may be shorter than `length`.
    """
    num_sinks = num_sinks if random.random() < JUMP_SHARE else 0
    start = random.integers(num_sinks, num_tokens - length + num_sinks + 1)
    return np.concatenate([np.arange(num_sinks), np.arange(start, start + length - num_sinks)])


class WindowSampler:
    """Draws random windows of equal length from the books, joined in an order of the seed's choosing."""

    def __init__(self, books: list[np.ndarray], seed: int) -> None:
        self._random = np.random.default_rng(seed)
        order = self._random.permutation(len(books))
        self.stream = np.concatenate([books[i] for i in order])  # [num_tokens] uint16

    def batch(self, batch_size: int, length: int) -> torch.Tensor:
        """Return windows `[batch_size, length + 1] int64`: inputs and, shifted by one, their targets."""
        starts = self._random.integers(0, len(self.stream) - length - 1, size=batch_size)
        rows = np.stack([self.stream[start : start + length + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))

    def positions(self, batch_size: int, length: int, span: int) -> torch.Tensor:
        """Return rising position ids `[batch_size, length]` below `span`, with up to three random gaps a row.

        The gaps show the model distances up to `span` in windows that are much shorter (positional skip-wise
        training, Zhu et al. 2023). A quarter of the rows, and all where `span` leaves no room, have no gap.
        """
        positions = np.tile(np.arange(length), (batch_size, 1))
        for row in positions:
            if span <= length or self._random.random() < 0.25:
                continue
            total = self._random.integers(0, span - length)
            for share in self._random.dirichlet(np.ones(3)):
                row[self._random.integers(1, length) :] += int(share * total)
        return torch.from_numpy(positions)
