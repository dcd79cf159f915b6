from __future__ import annotations

from dataclasses import replace

import pytest

from swiftbatch.worker.kernels.kernel_sizes import MOST_SLOTS, NUM_ROWS, ROW_CHOICES, most_slots
from swiftbatch.worker.kv.gpu_memory_plan import (
    GRAPH_BYTES,
    GRAPH_RESERVE,
    GRAPHS,
    ROWS,
    SLACK,
    SUMS,
    RunLoad,
    most_rows,
    most_together,
    one_slot,
    plan_pages,
    rows_that_pay,
)
from swiftbatch.worker.kv.model_sizes import ModelSizes, PackedPart
from tests.worker.kv.memory.test_plan import GPU, LLAMA

HOPPER, AMPERE = 9, 8


def chosen(num_jobs: int, mean_length: float, *, has_drafts: bool = True, most: int = 256) -> int:
    return rows_that_pay(LLAMA, GPU, RunLoad(num_jobs, mean_length, has_drafts), most)


def test_few_jobs_have_the_fewest_rows_and_many_short_ones_the_most() -> None:
    assert [chosen(number, 5000) for number in (1, 5, 16, 17, 32, 33, 200)] == [64, 64, 64, 128, 128, 256, 256]
    assert [chosen(number, 5000, has_drafts=False) for number in (1, 32, 33, 129)] == [64, 64, 128, 128]
    assert chosen(200, 2000, has_drafts=False) == 256


def test_jobs_that_have_no_room_beside_others_have_no_rows() -> None:
    """Five jobs of 100,000 positions run at a time, however many wait."""
    assert chosen(200, 100_000) == 64


def test_with_narrow_forwards_a_run_has_the_most_rows_unless_their_buffers_cost_jobs() -> None:
    few, long = RunLoad(2, 1000, False, True), RunLoad(200, 100_000, False, True)
    assert rows_that_pay(LLAMA, GPU, few, 256) == 256
    jobs = [int(one_slot(LLAMA, replace(GPU, num_rows=rows), 1).left_bytes / (100_512 * 131_072)) for rows in (64, 256)]
    assert (rows_that_pay(LLAMA, GPU, long, 256) == 256) == (jobs[0] == jobs[1])


def test_no_run_has_more_rows_than_its_gpu_takes_for_nothing() -> None:
    assert chosen(200, 2000, most=128) == 128
    assert chosen(200, 2000, most=64) == 64
    assert [most_rows(capability, 2, False) for capability in (HOPPER, 10, AMPERE, None)] == [256, 256, 128, 128]
    assert most_rows(HOPPER, 2, True) == 128  # codes are converted once for all rows of a tile
    assert most_rows(HOPPER, 4, False) == 64  # float32 has no tensor cores


@pytest.mark.parametrize("sizes", [LLAMA, replace(LLAMA, vocab=32_000)])
def test_a_plan_counts_the_buffers_of_all_rows_and_what_draws_keep_of_more_jobs(sizes: ModelSizes) -> None:
    plans = [one_slot(sizes, replace(GPU, num_rows=num_rows), 1000) for num_rows in ROW_CHOICES]
    taken = [plan.needs[ROWS].once for plan in plans]
    of_jobs = [(most_slots(number) + 1) * (sizes.vocab * 12 + 1024) for number in ROW_CHOICES]
    of_rows = [each - jobs - 1152 * 128 * 4 for each, jobs in zip(taken, of_jobs, strict=True)]
    assert of_rows == [of_rows[0] * number // NUM_ROWS for number in ROW_CHOICES]
    assert [plan.needs[SUMS].once // plans[0].needs[SUMS].once for plan in plans] == [1, 2, 4]


def test_more_rows_have_pages_for_more_jobs_at_a_time() -> None:
    plans = [plan_pages(LLAMA, replace(GPU, num_rows=num_rows), 8192) for num_rows in ROW_CHOICES]
    assert [plan.num_slots for plan in plans] == [MOST_SLOTS, 128, 256]
    assert all(plan.used_bytes <= plan.free_bytes for plan in plans)
    assert most_together(LLAMA, GPU, 8192) == max(
        min(most_slots(num_rows), one_slot(LLAMA, replace(GPU, num_rows=num_rows), 8192).num_fitting)
        for num_rows in ROW_CHOICES
    )


def test_a_plan_counts_a_graph_for_each_smaller_number_of_rows() -> None:
    packed = replace(LLAMA, packed=(PackedPart(10**9, 4, 128),))
    for sizes, numbers in ((LLAMA, (0, 1, 2)), (packed, (1, 2, 3))):
        taken = [one_slot(sizes, replace(GPU, num_rows=number), 1000).needs[GRAPHS].once for number in ROW_CHOICES]
        assert [each - int(SLACK * GPU.free_bytes) - GRAPH_RESERVE for each in taken] == [
            number * GRAPH_BYTES for number in numbers
        ]
