"""Data-parallel trainings: the processes of `torchrun`, one per GPU, share each step's samples and sum their gradients.

`DistributedDataParallel` does not fit: it averages over equally many rows per process, and expects one backward pass.
Here a step divides by the rows of all processes, and runs its backward pass in parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
from torch import distributed

from swiftbatch.jobs.errors import ModelError

Report = Callable[[str], None]  # says a line
Samples = TypeVar("Samples", list, np.ndarray, torch.Tensor)  # type: ignore[type-arg]
PATIENCE = timedelta(days=30)  # while the first process computes features


@contextmanager
def joined(report: Report) -> Iterator[Report]:
    """Join the processes that `torchrun` started, if it did; yield the report, which is silent in all but the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield report
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(timeout=PATIENCE)
    try:
        yield report if is_first() else lambda line: None
    finally:
        distributed.destroy_process_group()


def num_processes() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def is_first() -> bool:
    """Return whether this process writes the files."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def meet() -> None:
    """Wait for all processes."""
    if distributed.is_initialized():
        distributed.barrier()


def share_of(samples: Samples) -> Samples:
    """Return this process's part of a step's samples. Raises ModelError if there are fewer than processes."""
    if num_processes() == 1:
        return samples
    if len(samples) < num_processes():
        raise ModelError(
            f"a step has {len(samples)} samples for {num_processes()} processes; expected one or more for each: "
            "start fewer processes, or take larger steps"
        )
    return samples[distributed.get_rank() :: num_processes()]


def total(value: torch.Tensor) -> torch.Tensor:
    if distributed.is_initialized():
        value = value.clone()
        distributed.all_reduce(value)
    return value


def sum_gradients(model: torch.nn.Module) -> None:
    """Replace each gradient by its sum over all processes."""
    if distributed.is_initialized():
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad)
