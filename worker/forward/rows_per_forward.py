"""Choice of a run's rows per forward on GPUs, which changes speed and numerics."""

from __future__ import annotations

from dataclasses import dataclass

from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS, ROW_CHOICES, most_slots
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory, one_slot
from swiftbatch.worker.kv.kv_capacity import HORIZON
from swiftbatch.worker.kv.model_sizes import ModelSizes

ROWS_OF_A_DRAFT = 4  # among many jobs, later nodes are seldom accepted
WIDE_CAPABILITY = 9  # from Hopper on, 256 rows take little longer than reading the weights
ROWS_BEFORE = 128  # the same limit on earlier GPUs (measured on an A100), and for unknown GPUs
ROWS_OF_A_TILE = 128  # rows for which packed weights are decoded once


@dataclass(frozen=True)
class RunLoad:
    """Jobs of one worker, as far as rows depend on them."""

    num_jobs: int
    mean_length: float  # a job's average number of positions over its time
    has_drafts: bool


def rows_that_pay(sizes: ModelSizes, gpu: GPUMemory, load: RunLoad, most: int) -> int:
    """Return the smallest row count that fits all concurrent jobs with their drafts, but at most `most`."""
    job_bytes = sizes.kept_bytes(round(load.mean_length + HORIZON / 2)) + sizes.state_bytes
    num_together = max(1, min(load.num_jobs, int(one_slot(sizes, gpu, 1).left_bytes / job_bytes)))
    num_wanted = num_together * (ROWS_OF_A_DRAFT if load.has_drafts else 1)
    for num_rows in ROW_CHOICES:
        if num_rows >= most or (num_rows >= num_wanted and most_slots(num_rows) >= num_together):
            return num_rows
    return ROW_CHOICES[-1]


def most_rows(capability: int | None, item_size: int, is_packed: bool) -> int:
    """Return the most rows whose products take about as long as reading the weights.

    Float32 has no tensor cores, so each row costs time.
    """
    if item_size > 2:
        return NUM_ROWS
    wide = ROW_CHOICES[-1] if capability is not None and capability >= WIDE_CAPABILITY else ROWS_BEFORE
    return min(wide, ROWS_OF_A_TILE) if is_packed else wide


def most_together(sizes: ModelSizes, gpu: GPUMemory, length: int) -> int:
    plans = {num_rows: one_slot(sizes, gpu.with_rows(num_rows), length) for num_rows in ROW_CHOICES}
    return max(min(most_slots(num_rows), plan.num_fitting) for num_rows, plan in plans.items())
