"""The windows that a target is trained on: each a function of the seed, the step and its place in the batch alone.

Every window begins with the token that every text begins with, at position 0, as in use: attention that finds nothing
rests there. Behind it a text is read from position 0 on, or as a long one is seen through a window: the newest tokens
at their positions far from the first, or some stretches of it with what lies between them left out. In windows of two
books by turns the near text is often the wrong one, and the right one lies further back (Tworkowski et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from swiftbatch.worker.training.target.recipe import WindowKind, WindowRecipe

SKIPPING_SHARE = 0.5  # share of the windows far from position 0 that are several stretches in place of one
MOST_STRETCHES = 4
TURN_LENGTHS = (256, 1024)  # tokens of one book before the other's turn


@dataclass(frozen=True)
class WindowBatch:
    """Windows of one length."""

    token_ids: torch.Tensor  # [batch, length + 1] int64: inputs and, shifted by one, their targets
    positions: torch.Tensor  # [batch, length] int64


class WindowSource:
    """Draws windows from books, longer books more often."""

    def __init__(self, books: list[np.ndarray], first_token_id: int, recipe: WindowRecipe, max_positions: int) -> None:
        """`books` are token ids without their first token, which is the same for all."""
        self._books, self._first_token_id = books, first_token_id
        self._recipe, self._max_positions = recipe, max_positions
        sizes = np.array([len(book) for book in books], dtype=np.float64)
        self._shares = sizes / sizes.sum()

    def batch(self, step: int) -> WindowBatch:
        """Draw the windows of a step (from 0)."""
        kind = self._recipe.kind_of(step)
        random = np.random.default_rng([self._recipe.seed, step, 1])
        windows = [self._window(random, kind) for _ in range(kind.batch_size)]
        token_ids, positions = (torch.from_numpy(np.stack(part)) for part in zip(*windows, strict=True))
        return WindowBatch(token_ids, positions[:, :-1].contiguous())

    def long_text(self, number: int, length: int, pieces: tuple[int, int] | None = None) -> torch.Tensor:
        """Token ids `[length + 1]` of a text (from 0), the first token in front.

        It goes on from one book to the next where that ends, or behind a piece of it whose length is between `pieces`.
        """
        random = np.random.default_rng([self._recipe.seed, number, 2])
        token_ids = self._stretch(random, length) if pieces is None else self._pieces(random, length, pieces)
        return torch.from_numpy(np.concatenate([[self._first_token_id], token_ids]))

    def _window(self, random: np.random.Generator, kind: WindowKind) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and positions `[length + 1]`."""
        length = kind.length  # behind the first token
        if random.random() < kind.mixed_share:
            token_ids, positions = self._two_books(random, length), np.arange(length)
        elif random.random() < self._recipe.far_share:
            token_ids, positions = self._far(random, length)
        else:
            token_ids, positions = self._stretch(random, length), np.arange(length)
        return np.concatenate([[self._first_token_id], token_ids]), np.concatenate([[0], positions + 1])

    def _stretch(self, random: np.random.Generator, length: int) -> np.ndarray:
        """Consecutive tokens from somewhere in a book; where it ends the next one begins."""
        book = self._drawn_book(random)
        start = max(0, int(random.integers(-length // 2, max(1, len(book) - length // 2))))
        parts = [book[start : start + length].astype(np.int64)]
        while (missing := length - sum(map(len, parts))) > 0:
            parts += [np.array([self._first_token_id]), self._drawn_book(random)[: missing - 1].astype(np.int64)]
        return np.concatenate(parts)

    def _pieces(self, random: np.random.Generator, length: int, sizes: tuple[int, int]) -> np.ndarray:
        """Stretches of books, each with the first token between it and the one before; short ones are as likely."""
        parts: list[np.ndarray] = []
        while (missing := length - sum(map(len, parts))) > 0:
            size = min(missing, round(np.exp(random.uniform(*np.log(sizes)))))
            parts += [self._stretch(random, size), np.array([self._first_token_id])]
        return np.concatenate(parts)[:length]

    def _far(self, random: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """A stretch of a book, or some with what lies between them left out, far from the window's first token."""
        num_stretches = int(random.integers(2, MOST_STRETCHES + 1)) if random.random() < SKIPPING_SHARE else 1
        book = self._drawn_book(random)
        span = min(len(book), self._max_positions - 2)
        if span < length:
            places, token_ids = np.arange(length), self._stretch(random, length)
        else:
            starts = np.sort(random.integers(0, span - length + 1, size=num_stretches))
            ends = np.sort(random.integers(0, length + 1, size=num_stretches - 1))
            sizes = np.diff(np.concatenate([[0], ends, [length]]))
            places = np.repeat(starts, sizes) + np.arange(length)
            token_ids = book[places].astype(np.int64)
        reached = places - places[0]
        return token_ids, reached + random.integers(0, self._max_positions - 1 - reached[-1])

    def _two_books(self, random: np.random.Generator, length: int) -> np.ndarray:
        texts = [self._stretch(random, length) for _ in range(2)]
        read, parts = [0, 0], []
        turn = 0
        while sum(read) < length:
            size = min(int(random.integers(*TURN_LENGTHS)), length - sum(read))
            parts.append(texts[turn][read[turn] : read[turn] + size])
            read[turn] += size
            turn = 1 - turn
        return np.concatenate(parts)

    def _drawn_book(self, random: np.random.Generator) -> np.ndarray:
        return self._books[random.choice(len(self._books), p=self._shares)]
