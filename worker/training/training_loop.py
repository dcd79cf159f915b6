"""Common parts of trainings of whole models: optimizers, learning rate, loop of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.training.data_parallel import Report, is_first, meet
from swiftbatch.worker.training.recipes import Recipe
from swiftbatch.worker.training.training_folder import Stateful, TrainingFolder, write_measured, write_record

NUM_STATE_STEPS = 100  # steps between two states


class Step(NamedTuple):
    """One optimizer step."""

    kind: str  # for display
    loss: float  # nats per token
    logged: dict[str, Any]  # further fields of its record


def whole_step(kind: str, num_tokens: int, loss: float) -> Step:
    return Step(kind, loss, {"kind": kind, "num_tokens": num_tokens, "loss": loss})


class Optimizers:
    """Optimizers of a model's parameters, as one."""

    def __init__(self, model: torch.nn.Module, recipe: Recipe) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
        self._all: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                others, lr=recipe.embedding_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            ),
        ]
        self._parameters, self._recipe = list(model.parameters()), recipe
        self._peaks = [recipe.learning_rate, recipe.embedding_learning_rate]

    def step(self, step: int) -> None:
        """Clip and apply the gradients of a step (from 0), and clear them."""
        torch.nn.utils.clip_grad_norm_(self._parameters, self._recipe.gradient_clip)
        for optimizer, peak in zip(self._all, self._peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = self._recipe.rate(step) * peak
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, object]]:
        return [optimizer.state_dict() for optimizer in self._all]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        """Restore the states. Raises ValueError for states of other parameters."""
        for optimizer, state in zip(self._all, states, strict=True):
            optimizer.load_state_dict(state)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Sum in a fixed order on a GPU, so that a resumed training gives the same weights."""
    if device.type == "cpu":  # a CPU always does
        yield
        return
    from swiftbatch.worker.forward.cuda.cuda_loading import hold_gemms_steady

    hold_gemms_steady()
    was = torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def run_steps(
    take_step: Callable[[int], Step], num_steps: int, first: int = 0, seconds: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Take the steps from `first` on (from 0), after `seconds` of training, and yield a log record of each.

    Raises ModelError if a step's loss is not finite.
    """
    start = time.monotonic() - seconds
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn(), disable=not is_first()) as progress:
        task = progress.add_task("training", total=num_steps, completed=first, loss=float("nan"))
        for step in range(first, num_steps):
            done = take_step(step)
            if not math.isfinite(done.loss):
                raise ModelError(
                    f"the loss of training step {step + 1} is {done.loss}, expected a number: the model's logits are "
                    "not finite behind some tokens of the texts; its weights are damaged, or outgrow the dtype"
                )
            progress.update(task, advance=1, loss=done.loss, description=done.kind)
            yield {"step": step + 1, **done.logged, "seconds": round(time.monotonic() - start, 2)}


@dataclass(frozen=True)
class PartTraining:
    """A trained part's model, and what its training does with it."""

    model: torch.nn.Module
    optimizer: Stateful
    num_steps: int
    take_step: Callable[[int], Step]  # takes the number of a step, from 0
    measure: Callable[[str, int], Iterable[Any]]  # "before", "during" or "after", and the steps so far: log records
    save: Callable[[], None]  # writes the part


def train_part(folder: TrainingFolder, training: PartTraining, report: Report) -> None:
    """Train from the state in the folder, which is saved every `NUM_STATE_STEPS`; then write and measure the part."""
    num_steps = training.num_steps
    step, seconds = folder.restore(training.model, training.optimizer)
    num_parameters = sum(parameter.numel() for parameter in training.model.parameters())
    report(f"{num_parameters:,} parameters, {step:,} of {num_steps:,} steps behind it")
    meet()  # before the first process writes a later state
    if not is_first():
        for _ in run_steps(training.take_step, num_steps, step, seconds):
            pass
        return
    with folder.open_log(step) as log:
        if step == 0:
            write_measured(log, training.measure("before", 0), report)
            folder.save(training.model, training.optimizer, 0, 0.0)
        for done in run_steps(training.take_step, num_steps, step, seconds):
            write_record(log, done)
            if done["step"] % NUM_STATE_STEPS == 0 or done["step"] == num_steps:
                for record in training.measure("during", done["step"]):
                    write_record(log, record)
                folder.save(training.model, training.optimizer, done["step"], done["seconds"])
        training.save()
        write_measured(log, training.measure("after", num_steps), report)
    folder.plot()
    folder.finish()
