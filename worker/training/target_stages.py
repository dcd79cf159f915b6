"""Stages of a target's training, windows and then long texts, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, nll_loss
from transformers import PreTrainedModel

from swiftbatch.worker.training.data_parallel import Report
from swiftbatch.worker.training.target_recipe import LongTextRecipe, TargetRecipe, WindowKind, WindowRecipe
from swiftbatch.worker.training.training_folder import TrainingFolder, write_record
from swiftbatch.worker.training.training_layers import EarlierSegments, sparing
from swiftbatch.worker.training.training_loop import Optimizers, Step, repeatable, run_steps, whole_step

SKIPPING_SHARE = 0.5  # share of far windows that have several passages
MOST_STRETCHES = 4
TURN_LENGTHS = (256, 1024)  # range of tokens of one book before the other book's turn


@dataclass(frozen=True)
class WindowBatch:
    """Windows of one length."""

    token_ids: torch.Tensor  # [batch, length + 1] int64: inputs and, shifted by one, their targets
    positions: torch.Tensor  # [batch, length] int64


class WindowSource:
    """Draws windows from books in proportion to their length."""

    def __init__(self, books: list[np.ndarray], first_token_id: int, recipe: WindowRecipe, max_positions: int) -> None:
        """`books` are token ids without the first token that all texts share."""
        self._books, self._first_token_id = books, first_token_id
        self._recipe, self._max_positions = recipe, max_positions
        sizes = np.array([len(book) for book in books], dtype=np.float64)
        self._shares = sizes / sizes.sum()

    def batch(self, step: int) -> WindowBatch:
        kind = self._recipe.kind_of(step)
        random = np.random.default_rng([self._recipe.seed, step, 1])
        windows = [self._window(random, kind) for _ in range(kind.batch_size)]
        token_ids, positions = (torch.from_numpy(np.stack(part)) for part in zip(*windows, strict=True))
        return WindowBatch(token_ids, positions[:, :-1].contiguous())

    def long_text(self, number: int, length: int, pieces: tuple[int, int] | None = None) -> torch.Tensor:
        """Return token ids `[length + 1]` of a book and others after it, or of pieces with lengths in `pieces`."""
        random = np.random.default_rng([self._recipe.seed, number, 2])
        token_ids = self._stretch(random, length) if pieces is None else self._pieces(random, length, pieces)
        return torch.from_numpy(np.concatenate([[self._first_token_id], token_ids]))

    def _window(self, random: np.random.Generator, kind: WindowKind) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and positions `[length + 1]`."""
        length = kind.length  # does not count the first token
        if random.random() < kind.mixed_share:
            token_ids, positions = self._two_books(random, length), np.arange(length)
        elif random.random() < self._recipe.far_share:
            token_ids, positions = self._far(random, length)
        else:
            token_ids, positions = self._stretch(random, length), np.arange(length)
        return np.concatenate([[self._first_token_id], token_ids]), np.concatenate([[0], positions + 1])

    def _stretch(self, random: np.random.Generator, length: int) -> np.ndarray:
        """Return consecutive tokens from a random position of a book; at its end, other books follow."""
        book = self._drawn_book(random)
        start = max(0, int(random.integers(-length // 2, max(1, len(book) - length // 2))))
        parts = [book[start : start + length].astype(np.int64)]
        while (missing := length - sum(map(len, parts))) > 0:
            parts += [np.array([self._first_token_id]), self._drawn_book(random)[: missing - 1].astype(np.int64)]
        return np.concatenate(parts)

    def _pieces(self, random: np.random.Generator, length: int, sizes: tuple[int, int]) -> np.ndarray:
        """Return passages of books, separated by the first token of texts. Their lengths are log-uniform."""
        parts: list[np.ndarray] = []
        while (missing := length - sum(map(len, parts))) > 0:
            size = min(missing, round(np.exp(random.uniform(*np.log(sizes)))))
            parts += [self._stretch(random, size), np.array([self._first_token_id])]
        return np.concatenate(parts)[:length]

    def _far(self, random: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return one or several passages of a book, and positions that are far from position 0."""
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


# Stages of a target's training and their gradients. A killed training can resume.


# rows whose logits are in memory at the same time; on a CPU they fit in its cache
NUM_LOGIT_ROWS = {"cpu": 1024, "cuda": 16_384}


def add_batch_gradients(model: PreTrainedModel, batch: WindowBatch) -> float:
    """Add the gradients of a batch. Returns its loss in nats per token."""
    with sparing(model, batch.positions.numel()):
        states = states_of(model, batch.token_ids[:, :-1], batch.positions)
        return add_row_gradients(model, states.flatten(0, 1), batch.token_ids[:, 1:].flatten())[0]


def states_of(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor, earlier: EarlierSegments | None = None
) -> Tensor:
    """Return the last states `[batch, length, hidden]` of texts `[batch, length]`, which continue `earlier`."""
    inputs = token_ids.to(model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        states: Tensor = model.model(
            input_ids=inputs,
            position_ids=positions.to(model.device),
            # explicit, because a gap in the positions would otherwise count as a packed sequence
            attention_mask=torch.ones_like(inputs),
            use_cache=False,
            earlier=earlier,
        ).last_hidden_state
    return states


@dataclass(frozen=True)
class OtherView:
    """Hidden states `[num_rows, hidden]` of the same rows with another context, without gradients."""

    states: Tensor
    closeness: float  # weight of the rows' distance from this view
    is_right_alone: bool  # the distance counts only if this view gives the next token a higher probability


def add_row_gradients(
    model: PreTrainedModel, states: Tensor, targets: Tensor, other: OtherView | None = None
) -> tuple[float, float]:
    """Add the gradients of rows `states [num_rows, hidden]`; return their loss and divergence from `other`, in nats."""
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
    """Return the rows `[num_rows] bool` that should come closer to the other view."""
    if not other.is_right_alone:
        return torch.ones_like(labels, dtype=torch.bool)
    return nll_loss(said, labels, reduction="none") > nll_loss(expected, labels, reduction="none")


def _logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        logits: Tensor = model.lm_head(states)
    return logits.float()


NUM_STATE_STEPS = 10  # steps between two saved states, in windows
KIND = "long text"


@dataclass(frozen=True)
class Stage:
    """Steps of one recipe, with its own optimizers."""

    name: str
    first: int  # steps of all stages before it
    recipe: WindowRecipe
    add_gradients: Callable[[int], Step]  # the argument is the step within the stage (from 0)
    num_state_steps: int  # long texts save only at their ends, since states lack earlier segments

    @property
    def end(self) -> int:
        return self.first + self.recipe.num_steps

    def has_state_at(self, step: int) -> bool:
        return (step - self.first) % self.num_state_steps == 0 or step == self.end

    def optimizers(self, model: PreTrainedModel, step: int, restored: Optimizers) -> Optimizers:
        """Return the optimizers after `step` steps of all stages. At the stage's start they are new."""
        optimizers = Optimizers(model, self.recipe)
        if step > self.first:
            optimizers.load_state_dict(restored.state_dict())
        return optimizers

    def run(self, optimizers: Optimizers, step: int, seconds: float) -> Iterator[dict[str, Any]]:
        def take_step(step: int) -> Step:
            done = self.add_gradients(step)
            optimizers.step(step)
            return done

        for done in run_steps(take_step, self.recipe.num_steps, step - self.first, seconds):
            yield done | {"step": self.first + done["step"]}


@dataclass(frozen=True)
class StageRecord:
    """Log record of a stage that starts or resumes."""

    step: int  # steps of all stages before it
    stage: str
    device: str


def stages_of(
    model: PreTrainedModel, books: list[np.ndarray], first_token_id: int, recipe: TargetRecipe, report: Report
) -> list[Stage]:
    positions = model.config.max_position_embeddings
    source = WindowSource(books, first_token_id, recipe, positions)

    def add_window_gradients(step: int) -> Step:
        batch, kind = source.batch(step), recipe.kind_of(step).name
        return whole_step(kind, batch.positions.numel(), add_batch_gradients(model, batch))

    stages = [Stage("windows", 0, recipe, add_window_gradients, NUM_STATE_STEPS)]
    for number, long in enumerate(recipe.long_texts, start=1):
        texts = LongTexts(model, WindowSource(books, first_token_id, long, positions), long, report)
        stages.append(Stage(f"long texts {number}", stages[-1].end, long, texts.add_gradients, long.num_segments))
    return stages


def run_stages(model: PreTrainedModel, stages: list[Stage], folder: TrainingFolder, report: Report) -> None:
    """Run all remaining steps, from the state in the folder."""
    restored = Optimizers(model, stages[0].recipe)
    step, seconds = folder.restore(model, restored)
    report(f"{step:,} of {stages[-1].end:,} steps behind it")
    with repeatable(model.device), folder.open_log(step) as log:
        if step == 0:
            folder.save(model, restored, 0, 0.0)
        for stage in (each for each in stages if step < each.end):
            optimizers = stage.optimizers(model, step, restored)
            write_record(log, StageRecord(step, stage.name, device_words(model.device)))
            for done in stage.run(optimizers, step, seconds):
                write_record(log, done)
                step, seconds = done["step"], done["seconds"]
                if stage.has_state_at(step):
                    folder.save(model, optimizers, step, seconds)


def device_words(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{torch.get_num_threads()} processor cores"
    return torch.cuda.get_device_name(device)


class LongTexts:
    """Gradients of each step of long texts; steps of one text must be consecutive."""

    def __init__(self, model: PreTrainedModel, source: WindowSource, recipe: LongTextRecipe, report: Report) -> None:
        self._model, self._source, self._recipe, self._report = model, source, recipe, report
        self._text, self._earlier = torch.empty(0), EarlierSegments()
        self._figures: list[tuple[float, float]] = []  # loss of each segment of the text, and distance of its views

    def add_gradients(self, step: int) -> Step:
        """Add the gradients of a segment and of the windows that accompany it."""
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
        return whole_step(KIND, self._recipe.segment + batch.positions.numel(), self._figures[-1][0])

    def _add_segment(self, start: int) -> tuple[float, float]:
        """Add a segment's gradients. Returns its loss and the distance between its two views."""
        end = start + self._recipe.segment
        positions = torch.arange(start, end)
        states = states_of(self._model, self._text[None, start:end], positions[None], self._earlier)[0]
        near = self._near_view(start, end) if start >= self._recipe.near else None
        figures = add_row_gradients(self._model, states, self._text[start + 1 : end + 1], near)
        self._earlier.advance()
        return figures

    @torch.no_grad()
    def _near_view(self, start: int, end: int) -> OtherView:
        """Return hidden states of the same rows if only the first token and nearby tokens precede them."""
        window = torch.cat([self._text[:1], self._text[start - self._recipe.near + 1 : end]])
        states = states_of(self._model, window[None], torch.arange(len(window))[None])[0, start - end :]
        return OtherView(states, self._recipe.closeness, self._recipe.is_near_right_alone)
