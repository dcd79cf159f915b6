"""Common parts of trainings of whole models: optimizers, learning rate, loop of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.training.recipes import Recipe


@dataclass(frozen=True)
class StepRecord:
    """Log record of one optimizer step."""

    step: int
    kind: str
    num_tokens: int
    loss: float  # nats per token
    seconds: float  # since the training began


@dataclass(frozen=True)
class StepLoss:
    """The loss from which a step's gradients were computed."""

    kind: str
    num_tokens: int
    loss: float


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
        self._peaks = [recipe.learning_rate, recipe.embedding_learning_rate]

    def step(self, rate: float) -> None:
        """Apply the gradients at a share of the peak rates, and clear them."""
        for optimizer, peak in zip(self._all, self._peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * peak
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
    model: torch.nn.Module,
    optimizers: Optimizers,
    recipe: Recipe,
    add_gradients: Callable[[int], StepLoss],
    first: int = 0,
    seconds: float = 0.0,
) -> Iterator[StepRecord]:
    """Train from step `first` on, after `seconds` of training, and yield each finished step.

    `add_gradients` adds the gradients of a step's batch; steps count from 0.
    """
    start = time.monotonic() - seconds
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("training", total=recipe.num_steps, completed=first, loss=float("nan"))
        for step in range(first, recipe.num_steps):
            done = add_gradients(step)
            check_loss(step + 1, done.loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
            optimizers.step(recipe.rate(step))
            progress.update(task, advance=1, loss=done.loss, description=done.kind)
            passed = round(time.monotonic() - start, 2)
            yield StepRecord(step + 1, done.kind, done.num_tokens, done.loss, passed)


def check_loss(step: int, loss: float) -> None:
    """Raise ModelError if a step's loss is not finite."""
    if not math.isfinite(loss):
        raise ModelError(
            f"the loss of training step {step} is {loss}, expected a number: the model's logits are not finite behind "
            "some tokens of the texts; its weights are damaged, or outgrow the dtype"
        )
