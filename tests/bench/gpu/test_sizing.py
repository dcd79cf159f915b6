"""The GPU page has the plan's table and agrees with it."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest

from bench.sizing import LENGTHS, MODELS, Options, gpu_memory, packed_models, run
from bench.tables import tables
from swiftbatch.worker.drafters.tokenswift.tokenswift import TokenSwiftOptions
from swiftbatch.worker.inspection import CONTEXT_BYTES, GPU_BYTES, GPUS, SLOT_LENGTHS
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kv.gpu_memory_plan import CAPACITY_BLOCK, GRAPH_RESERVE, one_slot
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


def test_the_slots_are_those_that_follow_by_hand() -> None:
    rows = {tuple(row[:3]): row for row in table(GPU_PAGE, "model")}
    assert len(rows) == len(MODELS) * len(GPUS) * len(LENGTHS)
    for (model, _, positions), row in rows.items():
        parameters, position_bytes = {"Llama 3.1 8B": (8.030e9, 131_072), "Qwen2.5 32B": (32.764e9, 262_144)}[model]
        slot = math.ceil((int(positions.replace(",", "")) + 127) / 64) * 64 * position_bytes / 1e9
        left = 84 - 0.6 - parameters * 2 / 1e9 - float(row[5])
        assert abs(float(row[4]) - slot) < 0.06
        assert row[6] == (str(int(left / slot)) if left > slot else "none")
        assert row[8] == (str(int(left / float(row[7]))) if left > float(row[7]) else "none")


def test_the_slots_beside_packed_weights_are_those_that_follow_by_hand() -> None:
    """Llama 3.1 70B in int4: 68.5 billion weights of 4.5 bits; embedding, head and norms in bfloat16."""
    rows = {(row[0], row[1], row[3]): row for row in table(GPU_PAGE, "weights of")}
    assert len(rows) == len(list(packed_models())) * len(GPUS)
    layers = 80 * 8192 * (2 * (64 + 8) * 128 + 3 * 28672)
    weights = layers * 4.5 / 8 / 1e9 + (70_553_706_496 - layers) * 2 / 1e9
    row = rows["Llama 3.1 70B", "int4, groups of 128", "A100 80 GB"]
    assert float(row[2]) == round(weights, 1)
    for (position, length), found in zip(product((327_680, 2 * 80 * 8 * 144), SLOT_LENGTHS), row[4:], strict=True):
        slot = math.ceil((length + 127) / 64) * 64 * position / 1e9
        assert int(found) == int((84 - 0.6 - weights - 1.2) / slot)


def test_the_words_around_it_are_those_of_the_code() -> None:
    work = [
        one_slot(sizes, gpu_memory(number, 0), 1000).work_bytes for sizes in MODELS.values() for number in GPUS.values()
    ]
    assert f"{min(work) / 1e9:.1f} to {max(work) / 1e9:.1f} GB for work space" in PROSE
    assert f"{2 * STAGING_BYTES / 1e6:.0f} MB of pinned buffers" in PROSE
    assert f"a GPU that has {GPU_BYTES / 1e9:.0f} GB of which CUDA keeps {CONTEXT_BYTES / 1e9:.1f}" in PROSE
    assert f"whole blocks of {CAPACITY_BLOCK} positions" in PROSE
    assert f"{NUM_ROWS} rows of activations" in PROSE
    assert len(re.findall(rf"{GRAPH_RESERVE / 1e9:.1f} GB for graphs and workspaces", PROSE)) == 2
    assert f"{TokenSwiftOptions.budget:,} entries and one for {CHUNK_SIZE} positions" in PROSE
