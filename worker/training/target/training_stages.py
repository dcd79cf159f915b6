"""The stages of a target's training and their gradients: windows, then long texts; also after a kill.

A long text is read whole, a segment a step. Windows of 96K are dear, and few of them leave a model that spreads its
attention over far text that says nothing: the whole text scored worse than its newest tokens alone. Here every segment
is read twice, with the whole text in front of it and with the newest tokens. The first view learns to say what the
second says, beside what comes in the text. Gradients stop at the segment's beginning, as in Transformer-XL (Dai et al.
2019), so a step takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, nll_loss
from transformers import PreTrainedModel

from swiftbatch.worker.training.target.delta_nets import sparing
from swiftbatch.worker.training.target.recipe import LongTextRecipe, TargetRecipe, WindowRecipe
from swiftbatch.worker.training.target.training_attention import EarlierSegments
from swiftbatch.worker.training.target.training_windows import WindowBatch, WindowSource
from swiftbatch.worker.training.training_folder import TrainingFolder, write_record
from swiftbatch.worker.training.training_loop import Optimizers, StepLoss, StepRecord, repeatable, run_steps

NUM_LOGIT_ROWS = {"cpu": 1024, "cuda": 16_384}  # rows whose logits are held at once: on a CPU they fit its cache


def add_batch_gradients(model: PreTrainedModel, batch: WindowBatch) -> float:
    """Add the gradients of a batch's loss, and return it, in nats per token."""
    with sparing(model, batch.positions.numel()):
        states = states_of(model, batch.token_ids[:, :-1], batch.positions)
        return add_row_gradients(model, states.flatten(0, 1), batch.token_ids[:, 1:].flatten())[0]


def states_of(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor, earlier: EarlierSegments | None = None
) -> Tensor:
    """The last states of texts `[batch, length]`, `[batch, length, hidden]`; `earlier` is what they go on from."""
    inputs = token_ids.to(model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        states: Tensor = model.model(
            input_ids=inputs,
            position_ids=positions.to(model.device),
            # An explicit mask: without it, a gap in the positions would be taken for a packed sequence.
            attention_mask=torch.ones_like(inputs),
            use_cache=False,
            earlier=earlier,
        ).last_hidden_state
    return states


@dataclass(frozen=True)
class OtherView:
    """Other states `[num_rows, hidden]` of the same rows, whose gradients count for nothing."""

    states: Tensor
    closeness: float  # weight of how far rows are from it
    is_right_alone: bool  # if closeness counts only where this view gives more to the token that came than the rows do


def add_row_gradients(
    model: PreTrainedModel, states: Tensor, targets: Tensor, other: OtherView | None = None
) -> tuple[float, float]:
    """Add the gradients of the loss of rows `states [num_rows, hidden]`; returns it, and how far `other` is from it.

    That distance is the divergence of what the rows say from what the other view says. Both are in nats per token.
    """
    leaf, num_rows = states.detach().requires_grad_(), NUM_LOGIT_ROWS[model.device.type]
    sums = torch.zeros(2, device=model.device)
    for start in range(0, len(targets), num_rows):
        rows = slice(start, start + num_rows)
        said, labels = log_softmax(_logits(model, leaf[rows]), dim=-1), targets[rows].to(model.device)
        whole = loss = nll_loss(said, labels, reduction="sum") / len(targets)
        if other is not None:
            with torch.no_grad():
                expected = log_softmax(_logits(model, other.states[rows]), dim=-1)
            distances = kl_div(said, expected, reduction="none", log_target=True).sum(dim=-1) / len(targets)
            whole = loss + other.closeness * (distances * _where_it_counts(said, expected, labels, other)).sum()
            sums[1] += distances.detach().sum()
        whole.backward()
        sums[0] += loss.detach()
    states.backward(leaf.grad)
    return float(sums[0]), float(sums[1])


def _where_it_counts(said: Tensor, expected: Tensor, labels: Tensor, other: OtherView) -> Tensor:
    """Mark the rows, `[num_rows] bool`, that are to come closer to the other view."""
    if not other.is_right_alone:
        return torch.ones_like(labels, dtype=torch.bool)
    return nll_loss(said, labels, reduction="none") > nll_loss(expected, labels, reduction="none")


def _logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        logits: Tensor = model.lm_head(states)
    return logits.float()


NUM_STATE_STEPS = 10  # between two states of training in windows
KIND = "long text"


@dataclass(frozen=True)
class Stage:
    """Steps of one recipe, with optimizers of their own."""

    name: str
    first: int  # steps of all stages in front of it
    recipe: WindowRecipe
    add_gradients: Callable[[int], StepLoss]  # of a step of the stage (from 0)
    num_state_steps: int  # between two states; of long texts at their ends, since none holds what is behind

    @property
    def end(self) -> int:
        """Steps behind it when it is over."""
        return self.first + self.recipe.num_steps

    def has_state_at(self, step: int) -> bool:
        """Tell whether a state is written behind so many steps of all stages."""
        return (step - self.first) % self.num_state_steps == 0 or step == self.end

    def optimizers(self, model: PreTrainedModel, step: int, restored: Optimizers) -> Optimizers:
        """Return the optimizers behind `step` steps of all stages: new ones at the stage's beginning, else restored."""
        optimizers = Optimizers(model, self.recipe)
        if step > self.first:
            optimizers.load_state_dict(restored.state_dict())
        return optimizers

    def run(self, model: PreTrainedModel, optimizers: Optimizers, step: int, seconds: float) -> Iterator[StepRecord]:
        """Run the stage's steps that are left behind `step` steps of all stages; records count those of all, too."""
        for done in run_steps(model, optimizers, self.recipe, self.add_gradients, step - self.first, seconds):
            yield replace(done, step=self.first + done.step)


@dataclass(frozen=True)
class StageRecord:
    """A stage that begins or goes on, as the log keeps it."""

    step: int  # steps behind it, of all stages
    stage: str
    device: str


def stages_of(
    model: PreTrainedModel,
    books: list[np.ndarray],
    first_token_id: int,
    recipe: TargetRecipe,
    report: Callable[[str], None],
) -> list[Stage]:
    """Return the stages in order."""
    positions = model.config.max_position_embeddings
    source = WindowSource(books, first_token_id, recipe, positions)

    def add_window_gradients(step: int) -> StepLoss:
        batch = source.batch(step)
        return StepLoss(recipe.kind_of(step).name, batch.positions.numel(), add_batch_gradients(model, batch))

    stages = [Stage("windows", 0, recipe, add_window_gradients, NUM_STATE_STEPS)]
    for number, long in enumerate(recipe.long_texts, start=1):
        texts = LongTexts(model, WindowSource(books, first_token_id, long, positions), long, report)
        stages.append(Stage(f"long texts {number}", stages[-1].end, long, texts.add_gradients, long.num_segments))
    return stages


def run_stages(
    model: PreTrainedModel, stages: list[Stage], folder: TrainingFolder, report: Callable[[str], None]
) -> None:
    """Run all steps that are left, from the state in the folder on."""
    restored = Optimizers(model, stages[0].recipe)
    step, seconds = folder.restore(model, restored)
    report(f"{step:,} of {stages[-1].end:,} steps behind it")
    with repeatable(model.device), folder.open_log(step) as log:
        if step == 0:
            folder.save(model, restored, 0, 0.0)
        for stage in (each for each in stages if step < each.end):
            optimizers = stage.optimizers(model, step, restored)
            write_record(log, StageRecord(step, stage.name, device_words(model.device)))
            for done in stage.run(model, optimizers, step, seconds):
                write_record(log, done)
                step, seconds = done.step, done.seconds
                if stage.has_state_at(step):
                    folder.save(model, optimizers, step, seconds)


def device_words(device: torch.device) -> str:
    """A device as a card names it."""
    if device.type == "cpu":
        return f"{torch.get_num_threads()} processor cores"
    return torch.cuda.get_device_name(device)


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
