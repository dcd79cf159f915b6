"""The choice of how many rows a run's forwards have on GPUs: as many as its jobs use, if they cost next to nothing.

It changes how fast a run is, and its numerics, so it is made once, when the run is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS, ROW_CHOICES, most_slots
from swiftbatch.worker.kv.gpu_memory_plan import NO_DRAFTS, DraftMemory, GPUMemory, one_slot
from swiftbatch.worker.kv.kv_capacity import HORIZON
from swiftbatch.worker.kv.model_sizes import ModelSizes

ROWS_OF_A_DRAFT = 4  # of each job among many; the nodes behind these are seldom accepted
WIDE_CAPABILITY = 9  # from Hopper on, products of 256 rows take little longer than reading the weights
ROWS_BEFORE = 128  # of which that holds on an A100; also what is chosen for a GPU that is not known
ROWS_OF_A_TILE = 128  # that packed weights are decoded for at once


@dataclass(frozen=True)
class RunLoad:
    """The jobs of one worker, as far as the rows of its forwards follow from them."""

    num_jobs: int
    mean_length: float  # positions that a job holds, over its time, beside what it is to grow by next
    has_drafts: bool


def rows_that_pay(sizes: ModelSizes, gpu: GPUMemory, load: RunLoad, most: int) -> int:
    """The fewest rows that hold all jobs that run together, with their drafts; `most` where no choice does."""
    job_bytes = sizes.kept_bytes(round(load.mean_length + HORIZON / 2)) + sizes.state_bytes
    num_together = max(1, min(load.num_jobs, int(one_slot(sizes, gpu, 1).left_bytes / job_bytes)))
    num_wanted = num_together * (ROWS_OF_A_DRAFT if load.has_drafts else 1)
    for num_rows in ROW_CHOICES:
        if num_rows >= most or (num_rows >= num_wanted and most_slots(num_rows) >= num_together):
            return num_rows
    return ROW_CHOICES[-1]


def most_rows(capability: int | None, item_size: int, is_packed: bool) -> int:
    """The most rows whose products take no longer than their weights take to be read, about.

    `capability` is the major version of the GPU's, None for one that is not known. Float32, of 4 bytes a number, has
    no tensor cores, so every row takes its time.
    """
    if item_size > 2:
        return NUM_ROWS
    wide = ROW_CHOICES[-1] if capability is not None and capability >= WIDE_CAPABILITY else ROWS_BEFORE
    return min(wide, ROWS_OF_A_TILE) if is_packed else wide


def most_together(sizes: ModelSizes, gpu: GPUMemory, length: int, drafts: DraftMemory = NO_DRAFTS) -> int:
    """The most jobs of one length that a GPU holds, with as many rows as are best for that."""
    plans = {num_rows: one_slot(sizes, gpu.with_rows(num_rows), length, drafts) for num_rows in ROW_CHOICES}
    return max(min(most_slots(num_rows), plan.num_fitting) for num_rows, plan in plans.items())
