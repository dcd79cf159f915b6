"""The GPU page has the plan's table and agrees with it."""

from __future__ import annotations

import math

import pytest

from bench.sizing import MODELS, Options, packed_models, run
from bench.tables import tables
from swiftbatch.worker.drafters.engine_options import TokenSwiftOptions
from swiftbatch.worker.inspection import CONTEXT_BYTES, GPU_BYTES, SLOT_LENGTHS
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kv.gpu_memory_plan import GRAPH_RESERVE, SLACK, WORK, GPUMemory, one_slot
from swiftbatch.worker.kv.host_copies import STAGING_BYTES
from swiftbatch.worker.kv.sparse_cache import CHUNK_SIZE
from tests.readme.command_lines import page, table

GPU_PAGE = page("docs/gpu.md")
PROSE = " ".join(GPU_PAGE.split())


@pytest.mark.long
def test_the_page_has_the_tables_that_the_command_prints() -> None:
    found = tables(run(Options()), is_markdown=True).split("\n\n")
    assert len(found) == 3
    for each in found:
        assert each in GPU_PAGE, "python -m bench sizing --markdown prints the new one"


def jobs_by_hand(weights: float, work: float, position_bytes: int) -> list[int]:
    """Return how many jobs of each length fit beside weights and work space in GB."""
    slots = [math.ceil((length + 127) / 64) * 64 * position_bytes / 1e9 for length in SLOT_LENGTHS]
    return [int(((84 - 0.6) * (1 - SLACK) - weights - work) / slot) for slot in slots]


def test_the_jobs_that_fit_are_those_that_follow_by_hand() -> None:
    """Llama 3.1 70B in int4: 68.5 billion weights of 4.5 bits; embedding, head and norms in bfloat16."""
    rows = {(row[0], row[1]): row for row in table(GPU_PAGE, "weights of")}
    assert len(rows) == len(list(packed_models()))
    layers = 80 * 8192 * (2 * (64 + 8) * 128 + 3 * 28672)
    weights = layers * 4.5 / 8 / 1e9 + (70_553_706_496 - layers) * 2 / 1e9
    row = rows["Llama 3.1 70B", "int4, groups of 128"]
    assert float(row[2]) == round(weights, 1)
    by_hand = [*jobs_by_hand(weights, 0.8, 327_680), *jobs_by_hand(weights, 0.8, 2 * 80 * 8 * 144)]
    assert [int(each) for each in row[3:]] == by_hand
    row = rows["Llama 3.1 8B", "bfloat16"]
    assert float(row[2]) == round(8.030 * 2, 1)
    assert [int(each) for each in row[4:6]] == jobs_by_hand(8.030 * 2, 0.7, 131_072)[1:]


def test_the_words_around_it_are_those_of_the_code() -> None:
    plans = [one_slot(sizes, GPUMemory(0), 100_000) for sizes in MODELS.values()]
    work = [sum(plan.needs[purpose].once for purpose in WORK) for plan in plans]
    assert f"{min(work) / 1e9:.1f} to {max(work) / 1e9:.1f} GB for work space" in PROSE
    assert f"{2 * STAGING_BYTES / 1e6:.0f} MB of pinned buffers" in PROSE
    assert f"a GPU that has {GPU_BYTES / 1e9:.0f} GB of which CUDA keeps {CONTEXT_BYTES / 1e9:.1f}" in PROSE
    assert f"{NUM_ROWS} rows of activations" in PROSE
    assert f"{GRAPH_RESERVE / 1e9:.1f} GB for graphs and workspaces" in PROSE
    assert f"and {SLACK:.1%} of what is free as slack".replace("%", " %") in PROSE
    assert f"{TokenSwiftOptions().budget:,} entries and one for {CHUNK_SIZE} positions" in PROSE
