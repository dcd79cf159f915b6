"""Windows of texts with the target's features, for trainings of GRIFFIN's draft model and of MTP layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from swiftbatch.worker.drafters.griffin.draft_input import NUM_SINKS, WINDOW, window_start
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.training.data_parallel import Report, share_of
from swiftbatch.worker.training.feature_files import FEWEST_TOKENS, TextFeatures, TextSource
from swiftbatch.worker.training.recipes import GriffinRecipe
from swiftbatch.worker.training.training_texts import jumping_positions

MOST_HELD_OUT_TOKENS = 1024  # of a test book
SHORTEST = 64  # a text with fewer tokens is left out


@dataclass(frozen=True)
class GriffinFeatures:
    """Texts with features, each `SHORTEST` tokens long or longer."""

    books: list[TextFeatures]
    own: list[TextFeatures]  # empty if the recipe uses no own texts
    held_out: list[TextFeatures]  # empty without test books


def griffin_features(
    target: TargetModel, data: Path, folder: Path, recipe: GriffinRecipe, report: Report
) -> GriffinFeatures:
    """Read the features in `folder`; compute missing ones. Raises CorpusError."""
    source = TextSource(target, data, folder, recipe.texts, min(SHORTEST, recipe.window_length), report)
    books = source.books()
    return GriffinFeatures(books, source.own(books), source.held_out(FEWEST_TOKENS, MOST_HELD_OUT_TOKENS))


@dataclass(frozen=True)
class Windows:
    """Rows in entries 0, 1, ... of windows, of which shorter ones are padded."""

    token_ids: torch.Tensor  # [num_windows, length] int64
    inputs: torch.Tensor  # [num_windows, length, hidden]: the feature before each token; zeros for a text's first
    features: torch.Tensor  # [num_windows, length, hidden]: the feature at each token
    num_before: torch.Tensor  # [num_windows, length] int64: number of preceding rows without a gap; -1: no row

    @classmethod
    def gather(cls, picks: list[tuple[TextFeatures, np.ndarray]], device: torch.device) -> Windows:
        """Copy windows from texts, each given by positions, up to `[length]`."""
        *columns, num_before = zip(*(_rows(text, positions) for text, positions in picks), strict=True)
        padded = [pad_sequence(list(column), batch_first=True) for column in columns]
        padded.append(pad_sequence(list(num_before), batch_first=True, padding_value=-1))
        return cls(*(tensor.to(device) for tensor in padded))

    def has_next(self) -> torch.Tensor:
        """Return the rows whose next row has the text's next token, `[num_windows, length] bool`."""
        return self.num_before.roll(-1, dims=1) == self.num_before + 1

    def entries(self) -> torch.Tensor:
        num_windows, length = self.token_ids.shape
        return torch.arange(length, device=self.token_ids.device).expand(num_windows, -1)


def _rows(text: TextFeatures, positions: np.ndarray) -> tuple[torch.Tensor, ...]:
    places = torch.from_numpy(positions)
    inputs = text.features[(places - 1).clamp(min=0)]
    inputs[places == 0] = 0.0
    new = np.flatnonzero(np.diff(positions, prepend=-2) != 1)  # the window lacks the predecessors of these rows
    rows = np.arange(len(positions))
    num_before = rows - new[np.searchsorted(new, rows, side="right") - 1]
    return text.token_ids[places].long(), inputs, text.features[places], torch.from_numpy(num_before)


class FeatureWindowSource:
    """Draws a step's windows from the recipe's seed and the step's number."""

    def __init__(self, books: list[TextFeatures], own: list[TextFeatures], recipe: GriffinRecipe) -> None:
        self._recipe = recipe
        num_own = round(recipe.own_share * recipe.num_step_windows) if own else 0
        self._parts = [(books, recipe.num_step_windows - num_own), (own, num_own)]

    def windows(self, step: int, device: torch.device) -> Windows:
        """Return this process's windows of books and own texts, some of them with a gap, as in long texts."""
        random, length = np.random.default_rng([self._recipe.seed, step]), self._recipe.window_length
        num_sinks = min(NUM_SINKS, length // 2)
        picks = []
        for texts, num_windows in self._parts:
            if num_windows:
                sizes = np.asarray([len(text.token_ids) for text in texts], dtype=np.float64)
                chosen = random.choice(len(texts), size=num_windows, p=sizes / sizes.sum())
                drawn = [(texts[index], len(texts[index].token_ids)) for index in chosen]
                picks += [(text, jumping_positions(random, size, min(size, length), num_sinks)) for text, size in drawn]
        return Windows.gather(share_of(picks), device)


def windows_in_use(text: TextFeatures, device: torch.device) -> Iterator[tuple[Windows, int]]:
    """Yield windows and their first new row; together, the new rows are all rows of a text."""
    num_tokens = len(text.token_ids)
    ends = [*range(2 * WINDOW - 1, num_tokens, WINDOW), num_tokens]  # the window restarts after these rows
    for first, end in pairwise([0, *ends]):
        start = window_start(first + 1)
        positions = np.concatenate([np.arange(min(NUM_SINKS, end)), np.arange(start, end)])
        yield Windows.gather([(text, positions)], device), len(positions) - (end - first)
