"""What a worker computes with, in a line: attempts on other numerics are exact only up to ties."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from jobs.status import Exactness
from worker.target import TargetModel


def describe_numerics(target: TargetModel, num_threads: int) -> str:
    """Hardware, dtype, threads and torch version: all that decides bits beside the weights."""
    is_cuda = target.device.type == "cuda"
    hardware = torch.cuda.get_device_name(target.device) if is_cuda else torch.backends.cpu.get_cpu_capability()
    dtype = str(target.dtype).removeprefix("torch.")
    return f"{target.device.type} {hardware}, {dtype}, {num_threads} threads, torch {torch.__version__}"


def exactness_of(verdict: Exactness, numerics: Iterable[str]) -> Exactness:
    """The run's verdict for a job whose attempts all had the same numerics, else that it holds up to ties."""
    return verdict if len(set(numerics)) <= 1 else "exact up to ties"
