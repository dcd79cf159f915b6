"""Windows of rows that GRIFFIN's draft model learns from and is measured on, in the entries that it sees in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from swiftbatch.worker.papers.griffin.training.recipe import GriffinRecipe
from swiftbatch.worker.papers.griffin.window import NUM_SINKS, WINDOW, window_start
from swiftbatch.worker.training.corpus import jumping_positions
from swiftbatch.worker.training.feature_file import TextFeatures


@dataclass(frozen=True)
class Windows:
    """Rows in entries 0, 1, ... of windows of equal length."""

    token_ids: torch.Tensor  # [num_windows, length] int64
    inputs: torch.Tensor  # [num_windows, length, hidden]: the feature in front of each token; zeros for a text's first
    features: torch.Tensor  # [num_windows, length, hidden]: the feature at each token
    num_before: torch.Tensor  # [num_windows, length] int64: rows in front of it without a gap in the text

    @classmethod
    def gather(cls, picks: list[tuple[TextFeatures, np.ndarray]], device: torch.device) -> Windows:
        """Copy windows out of texts; each is given by its positions in the text, `[length]`."""
        windows = [_rows(text, positions) for text, positions in picks]
        return cls(*(torch.stack(tensors).to(device) for tensors in zip(*windows, strict=True)))

    def entries(self) -> torch.Tensor:
        """`[num_windows, length]`."""
        num_windows, length = self.token_ids.shape
        return torch.arange(length, device=self.token_ids.device).expand(num_windows, -1)


def _rows(text: TextFeatures, positions: np.ndarray) -> tuple[torch.Tensor, ...]:
    places = torch.from_numpy(positions)
    inputs = text.features[(places - 1).clamp(min=0)]
    inputs[places == 0] = 0.0
    new = np.flatnonzero(np.diff(positions, prepend=-2) != 1)  # rows without their predecessor
    rows = np.arange(len(positions))
    num_before = rows - new[np.searchsorted(new, rows, side="right") - 1]
    return text.token_ids[places].long(), inputs, text.features[places], torch.from_numpy(num_before)


class FeatureWindowSource:
    """Draws the windows of a step, which depend on the recipe's seed and the step's number alone."""

    def __init__(self, books: list[TextFeatures], own: list[TextFeatures], recipe: GriffinRecipe) -> None:
        self._recipe = recipe
        num_own = round(recipe.own_share * recipe.num_step_windows) if own else 0
        self._parts = [(books, recipe.num_step_windows - num_own), (own, num_own)]

    def windows(self, step: int, device: torch.device) -> Windows:
        """Windows from books and own texts, a share of them as the model reads a long text in use."""
        random, length = np.random.default_rng([self._recipe.seed, step]), self._recipe.window_length
        num_sinks = min(NUM_SINKS, length // 2)
        picks = []
        for texts, num_windows in self._parts:
            if num_windows:
                sizes = np.asarray([len(text.token_ids) for text in texts], dtype=np.float64)
                chosen = random.choice(len(texts), size=num_windows, p=sizes / sizes.sum())
                drawn = [(texts[index], len(texts[index].token_ids)) for index in chosen]
                picks += [(text, jumping_positions(random, size, length, num_sinks)) for text, size in drawn]
        return Windows.gather(picks, device)


def windows_in_use(text: TextFeatures, device: torch.device) -> Iterator[tuple[Windows, int]]:
    """Yield one window after the other and the first row that is new in it: together, all rows of a text.

    Each row sees what it sees in use, when all tokens up to its own are committed.
    """
    num_tokens = len(text.token_ids)
    ends = [*range(2 * WINDOW - 1, num_tokens, WINDOW), num_tokens]  # of the rows before the window begins anew
    for first, end in pairwise([0, *ends]):
        start = window_start(first + 1)
        positions = np.concatenate([np.arange(min(NUM_SINKS, end)), np.arange(start, end)])
        yield Windows.gather([(text, positions)], device), len(positions) - (end - first)
