"""What a worker computes with, in a line: attempts on other numerics are exact only up to ties."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from jobs.run.records import Exactness
from worker.target.attention_kernel import attention_kernel
from worker.target.hardware import hardware_of
from worker.target.target import TargetModel


def describe_numerics(target: TargetModel, num_threads: int) -> str:
    """Hardware, dtype, threads, torch version and attention kernel: all that decides bits beside the weights."""
    device, dtype = target.device.type, str(target.dtype).removeprefix("torch.")
    kernel = attention_kernel(device, target.dtype)
    return f"{device} {hardware_of(device)}, {dtype}, {num_threads} threads, torch {torch.__version__}, {kernel}"


def exactness_of(verdict: Exactness, numerics: Iterable[str]) -> Exactness:
    """The run's verdict for a job whose attempts all had the same numerics, else that it holds up to ties."""
    return verdict if len(set(numerics)) <= 1 else "exact up to ties"
