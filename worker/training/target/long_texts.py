"""Training on long texts, which follows training in windows: each text is read whole, a segment a step.

Windows of 96K are dear, and few of them leave a model that spreads its attention over far text that says nothing: the
whole text scored worse than its newest tokens alone. Here every segment is read twice, with the whole text in front of
it and with the newest tokens. The first view learns to say what the second says, beside what comes in the text.
Gradients stop at the segment's beginning, as in Transformer-XL (Dai et al. 2019), so a step takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from swiftbatch.worker.training.steps import StepLoss
from swiftbatch.worker.training.target.losses import OtherView, add_batch_gradients, add_row_gradients, states_of
from swiftbatch.worker.training.target.recipe import LongTextRecipe
from swiftbatch.worker.training.target.training_attention import EarlierSegments
from swiftbatch.worker.training.target.windows import WindowSource

KIND = "long text"


class LongTexts:
    """Gradients of each step; those of one text have to come in a row."""

    def __init__(
        self, model: PreTrainedModel, source: WindowSource, recipe: LongTextRecipe, report: Callable[[str], None]
    ) -> None:
        self._model, self._source, self._recipe, self._report = model, source, recipe, report
        self._text, self._earlier = torch.empty(0), EarlierSegments()
        self._figures: list[tuple[float, float]] = []  # losses of the text's segments, distances of their views

    def add_gradients(self, step: int) -> StepLoss:
        """Add those of a step (from 0): of a segment, and of the windows beside it."""
        number, place = divmod(step, self._recipe.num_segments)
        if place == 0:
            self._text = self._source.long_text(number, self._recipe.length, self._recipe.pieces)
            self._earlier = EarlierSegments()
            self._figures = []
        self._figures.append(self._add_segment(place * self._recipe.segment))
        batch = self._source.batch(step)
        add_batch_gradients(self._model, batch)
        if place == self._recipe.num_segments - 1:
            loss, distance = np.mean(self._figures, axis=0)
            of = f"long text {number + 1} of {self._recipe.num_texts}"
            self._report(f"{of}: loss {loss:.3f}, {distance:.4f} nats between its view and the near one")
        return StepLoss(KIND, self._recipe.segment + batch.positions.numel(), self._figures[-1][0])

    def _add_segment(self, start: int) -> tuple[float, float]:
        """Add the gradients of the segment from `start` on; return its loss and the distance of the two views."""
        end = start + self._recipe.segment
        positions = torch.arange(start, end)
        states = states_of(self._model, self._text[None, start:end], positions[None], self._earlier)[0]
        near = self._near_view(start, end) if start >= self._recipe.near else None
        figures = add_row_gradients(self._model, states, self._text[start + 1 : end + 1], near)
        self._earlier.advance()
        return figures

    @torch.no_grad()
    def _near_view(self, start: int, end: int) -> OtherView:
        """The same rows with the first token and the newest in front of them, read from position 0 on."""
        window = torch.cat([self._text[:1], self._text[start - self._recipe.near + 1 : end]])
        states = states_of(self._model, window[None], torch.arange(len(window))[None])[0, start - end :]
        return OtherView(states, self._recipe.closeness, self._recipe.is_near_right_alone)
