"""The worth of far text to a model: losses with windows of several lengths, and passages that come back.

Forwards are those that swiftbatch decodes with, so a figure holds for what a user gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from swiftbatch.worker.target.target import TargetModel

WINDOWS = (512, 2048, 8192, 32_768)  # newest tokens that are read
SCORED_FROM = 32_768  # tokens of its book in front of the first that is scored
NUM_SCORED = 256  # tokens of one place
NUM_PLACES = 24
DISTANCES = (1024, 8192, 30_000)
NUM_NEEDLES = 24  # for each distance
NEEDLE = 16  # tokens of a passage that comes back
CUE = 8  # tokens of the needle that are said again, so that the others may follow


@dataclass(frozen=True)
class LongContext:
    """Figures on texts that were not trained on."""

    loss_by_window: dict[str, float]  # nats per token with so many newest tokens in front
    continued_by_distance: dict[str, float]  # share of a passage's tokens that are the likeliest when it comes back


def measure_long_context(target: TargetModel, books: Sequence[np.ndarray], first_token_id: int) -> LongContext:
    """Measure on token ids of whole books, without their first token; a fixed seed draws each place and passage."""
    random = np.random.default_rng(0)
    stream = np.concatenate(books).astype(np.int64)
    passages = _passages(books, random)
    losses = {f"{window}": _loss(target, passages, window, first_token_id) for window in WINDOWS}
    rates = {f"{distance}": _continued(target, stream, distance, first_token_id, random) for distance in DISTANCES}
    return LongContext(losses, rates)


def _passages(books: Sequence[np.ndarray], random: np.random.Generator) -> list[np.ndarray]:
    """Some of `SCORED_FROM + NUM_SCORED` tokens, each of one book; of all books in a row where none is so long."""
    length = SCORED_FROM + NUM_SCORED
    long = [book for book in books if len(book) >= length] or [np.concatenate(books)]
    chosen = (long[int(random.integers(len(long)))] for _ in range(NUM_PLACES))
    starts = ((book, int(random.integers(0, len(book) - length + 1))) for book in chosen)
    return [book[start : start + length].astype(np.int64) for book, start in starts]


def _loss(target: TargetModel, passages: list[np.ndarray], window: int, first_token_id: int) -> float:
    """Mean over the last tokens of passages, where at least `window` tokens are read in front of each."""
    losses = []
    for passage in passages:
        text = np.concatenate([[first_token_id], passage[-window - NUM_SCORED :]])
        logits = logits_of_last(target, text[:-1].tolist(), NUM_SCORED)
        losses.append(float(cross_entropy(logits, torch.from_numpy(text[-NUM_SCORED:]))))
    return round(float(np.mean(losses)), 4)


def _continued(
    target: TargetModel, stream: np.ndarray, distance: int, first_token_id: int, random: np.random.Generator
) -> float:
    """Return the share of right tokens behind the repeated beginning of a passage `distance` tokens back."""
    right = 0
    for _ in range(NUM_NEEDLES):
        start = int(random.integers(0, len(stream) - distance))
        elsewhere = int(random.integers(0, len(stream) - NEEDLE))
        needle = stream[elsewhere : elsewhere + NEEDLE]
        text = np.concatenate([[first_token_id], needle, stream[start : start + distance - NEEDLE], needle])
        logits = logits_of_last(target, text[:-1].tolist(), NEEDLE - CUE)
        right += int((logits.argmax(dim=-1).numpy() == needle[CUE:]).sum())
    return round(right / (NUM_NEEDLES * (NEEDLE - CUE)), 4)


def logits_of_last(target: TargetModel, token_ids: list[int], num_rows: int) -> torch.Tensor:
    """Logits `[num_rows, vocab] float32` behind the last rows of a text."""
    cache = target.new_cache(len(token_ids))
    rows: list[torch.Tensor] = []
    while cache.length < len(token_ids):
        start = cache.length
        hidden = target.read(cache, token_ids[start:])
        kept = max(0, len(token_ids) - num_rows - start)
        rows.append(hidden[kept:])
    return target.logits(torch.cat(rows)[-num_rows:]).cpu()
