"""A GPU is divided before any allocation."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.sizing import MODELS
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.inspection import CONTEXT_BYTES, GPU_BYTES
from swiftbatch.worker.kernels.cuda.cuda_row_table import TableLayout
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, HEAD_BLOCKS, MOST_SLOTS, NUM_ROWS, num_splits
from swiftbatch.worker.kernels.quantized_weights import Code
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.gpu_memory_plan import (
    DRAFTS,
    KEPT,
    ROWS,
    SUMS,
    WEIGHTS,
    DraftMemory,
    GPUMemory,
    draft_model_memory,
    one_slot,
    plan_pages,
    slot_capacity,
)
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES, KVRoomError
from swiftbatch.worker.kv.model_sizes import ModelSizes, PackedPart, read_sizes, sizes_of
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.kv.sparse_cache import SummaryKVCache, partial_positions
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests import ROOT
from tests.worker.kernels.kernel_parts import Shape
from tests.worker.kernels.packed_parts import packed_weights

LLAMA, QWEN = MODELS["Llama 3.1 8B"], MODELS["Qwen2.5 32B"]
GPU = GPUMemory(GPU_BYTES - CONTEXT_BYTES)
LONGEST = 102_400 - MAX_TREE_NODES  # a capacity of 102,400
BUDGET = 2048  # of the summary cache


def parameters(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, has_bias: bool
) -> int:
    """Count an untied decoder with heads of 128."""
    query, key = heads * 128, kv_heads * 128
    attention = 2 * query * hidden + 2 * key * hidden + (query + 2 * key if has_bias else 0)
    return layers * (attention + 3 * hidden * intermediate + 2 * hidden) + hidden + 2 * vocab * hidden


def test_the_two_models_have_the_sizes_that_follow_from_their_configs() -> None:
    assert LLAMA.num_parameters == parameters(32, 4096, 32, 8, 14336, 128_256, has_bias=False)
    assert QWEN.num_parameters == parameters(64, 5120, 40, 8, 27648, 152_064, has_bias=True)
    assert LLAMA.bytes_per_position == 2 * 32 * 8 * 128 * 2
    assert QWEN.bytes_per_position == 2 * 64 * 8 * 128 * 2
    assert (LLAMA.hidden, LLAMA.intermediate, QWEN.hidden, QWEN.intermediate) == (4096, 14336, 5120, 27648)


def test_four_slots_of_100k_take_what_they_take_by_hand() -> None:
    """In GB: weights 16.1, keys and values 4 x 102,400 x 131,072 bytes = 53.7, drafts 4.7, slack 1.25, the rest 0.7."""
    drafts = DraftMemory(slot_bytes=partial_positions(BUDGET, LONGEST) * LLAMA.bytes_per_position)
    plan = replace(one_slot(LLAMA, GPU, LONGEST, drafts), num_slots=4)
    taken = {purpose: (need.once + 4 * need.per_slot) / 1e9 for purpose, need in plan.needs.items()}
    assert taken[WEIGHTS] == pytest.approx(16.06, abs=0.01)
    assert taken[KEPT] == pytest.approx(53.69, abs=0.01)
    assert taken[DRAFTS] == pytest.approx(4.7, abs=0.1)
    assert plan.needs[SUMS] == (64 * 64 * 32 * 129 * 4, 0)
    assert taken[SUMS] == pytest.approx(0.068, abs=0.001)
    angles, rows = (102_400 * 128 * 4) / 1e9, 64 * (128_256 * 13 + 48_000) / 1e9
    assert taken[ROWS] == pytest.approx(rows + angles + 33 * 128_256 * 12 / 1e9 + 0.017, abs=0.001)
    assert plan.used_bytes / 1e9 == pytest.approx(76.4, abs=0.1)
    assert plan.used_bytes / 1e9 == pytest.approx(sum(taken.values()))
    assert plan.num_fitting == 4


@pytest.mark.parametrize("num_slots", [1, 4, 32])
@pytest.mark.parametrize("heads_per_kv", [1, 3, 4, 16])
def test_flash_attn_s_partial_results_have_room_for_every_group_s_whole_tile(num_slots: int, heads_per_kv: int) -> None:
    sizes = replace(LLAMA, num_kv_heads=2, num_heads=2 * heads_per_kv)
    plan = one_slot(sizes, replace(GPU, attention="flash"), 1000)
    layout = TableLayout(num_slots, slot_capacity(1000), NUM_ROWS // heads_per_kv, 1000, 9)
    num_places = layout.num_groups * layout.rows_per_group
    planned = plan.needs[SUMS].once + num_slots * plan.needs[SUMS].per_slot
    splits = num_splits(slot_capacity(1000), HEAD_BLOCKS)
    assert planned >= splits * num_places * sizes.num_heads * (128 + 1) * 4
    assert planned - one_slot(sizes, GPU, 1000).needs[SUMS].once < 2 * num_slots * splits * 64 * 2 * 129 * 4


def test_a_job_that_has_no_room_is_refused_with_the_numbers_and_what_to_do() -> None:
    with pytest.raises(KVRoomError) as caught:
        plan_pages(QWEN, GPU, 100_000)
    assert str(caught.value) == (
        "the longest job, 100,000 positions, has no room on the GPU: weights 65.5, its keys and values 26.3, its "
        "drafts 0.0 and work space 2.0 need 93.8 GB, 83.4 GB are free; use fewer max_tokens, --kv-dtype fp8 or "
        "int8, more --gpus-per-worker, or a GPU with more memory"
    )


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded() -> None:
    with pytest.raises(KVRoomError, match=r"weights 65\.5, .* 24\.0 GB are free"):
        plan_pages(QWEN, replace(GPU, free_bytes=24 * 10**9), 1000)


def test_trained_parts_come_once_and_what_drafts_keep_with_every_slot() -> None:
    plain, parts, kept = (
        replace(one_slot(LLAMA, GPU, 100_000, drafts), num_slots=3)
        for drafts in (DraftMemory(), DraftMemory(part_bytes=10**9), DraftMemory(slot_bytes=10**9))
    )
    assert parts.used_bytes - plain.used_bytes == 10**9
    assert kept.used_bytes - plain.used_bytes == 3 * 10**9
    large = DraftMemory(part_bytes=3 * plain.bytes_per_slot)
    assert one_slot(LLAMA, GPU, 100_000, large).num_fitting == plain.num_fitting - 3
    with pytest.raises(KVRoomError, match=r"its drafts 70\.0 and work space"):
        plan_pages(LLAMA, GPU, 100_000, None, DraftMemory(part_bytes=7 * 10**10))


def test_a_draft_model_comes_once_and_its_slots_with_every_slot_and_one_more() -> None:
    small = replace(LLAMA, num_parameters=10**8, bytes_per_position=24_576, num_heads=12, num_kv_heads=12, head_dim=64)
    small = replace(small, hidden=768, intermediate=2048)
    drafts = draft_model_memory(small, 592)
    assert drafts.slot_bytes == slot_capacity(592) * 24_576
    scratch, rows = 2 * 64 * 12 * 65 * 4, 64 * ((4 * 768 + 5 * 768 + 3 * 2048) * 2 + 8 * 768 * 4 + 128_256 * 4)
    angles = slot_capacity(592) * 64 * 4
    assert drafts.part_bytes == 2 * 10**8 + scratch + rows + angles + drafts.slot_bytes


@pytest.mark.parametrize("max_length", [1, 64, 65, 1000, 100_000])
def test_a_slot_has_room_for_a_job_and_its_tree_in_whole_blocks(max_length: int) -> None:
    capacity = slot_capacity(max_length)
    assert capacity % BLOCK == 0
    assert 0 <= capacity - max_length - MAX_TREE_NODES < BLOCK


def test_an_arena_takes_what_the_plan_says() -> None:
    shape = CacheShape(4, 2, 32, torch.bfloat16, torch.device("meta"))
    sizes = ModelSizes(0, shape.bytes_per_position(), 4, 2, 32, 64, 128, 100, 2)
    plan = one_slot(sizes, GPUMemory(10**9), 1000)
    arena = KVArena(shape, 3, plan.longest_job)
    assert arena.buffer.nbytes == 3 * plan.needs[KEPT].per_slot


@pytest.mark.parametrize("max_length", [1000, 4000, 20_000, 100_000])
def test_a_summary_cache_takes_what_the_plan_counts_for_it(max_length: int) -> None:
    shape = CacheShape(2, 2, 64, torch.bfloat16, torch.device("meta"))
    sequence = Sequence("a", [0], SamplingParams(max_tokens=max_length - 1), 1)
    cache = SummaryKVCache(shape, BUDGET, sequence)
    buffers = (cache._buffer, cache._mean_keys._means, cache._mean_values._means)
    expected = partial_positions(BUDGET, sequence.max_length) * shape.bytes_per_position()
    assert sum(buffer.nbytes for buffer in buffers) == expected


def test_what_is_read_from_a_folder_is_what_is_loaded(tiny_model: Path) -> None:
    for model in ("embedded", str(tiny_model)):
        files = locate_model(model)
        target = TargetModel.load(files, "float32", "cpu")
        sizes = read_sizes(files, "float32")
        assert sizes is not None
        parts = {each.data_ptr(): each.nbytes for each in target.model.parameters()}  # a tied head once
        assert sizes.weight_bytes == sum(parts.values())
        assert sizes.bytes_per_position == target.cache_shape.bytes_per_position()
        assert (sizes.hidden, sizes.vocab, sizes.item_size) == (target.hidden_size, target.vocab_size, 4)
        assert (sizes.num_kv_heads, sizes.head_dim) == (target.cache_shape.num_kv_heads, target.cache_shape.head_dim)


@pytest.mark.parametrize(("code", "bits", "has_offsets"), [("uint4", 4, True), ("e2m1", 4, False), ("e4m3", 8, False)])
def test_packed_weights_take_what_the_plan_counts_for_them(code: Code, bits: int, has_offsets: bool) -> None:
    shape, config = Shape(is_tied=False), {"num_attention_heads": 2, "hidden_size": 48, "intermediate_size": 80}
    config |= {"num_hidden_layers": 2, "head_dim": 64, "num_key_value_heads": 1, "vocab_size": 100}
    weights = stacked_weights(packed_weights(shape, code, 16, has_offsets=has_offsets), torch.device("cpu"))
    packed = sum(math.prod(product.weight.shape) for product in weights.products)
    others = weights.embedding.numel() + 5 * shape.hidden
    shapes = [product.weight.shape for product in weights.products]
    parts = tuple(PackedPart(math.prod(each), bits, 16, has_offsets, each[1]) for each in shapes)
    sizes = sizes_of(config, packed + others, "bfloat16", parts)
    assert sizes is not None
    assert sizes.weight_bytes == sum(product.weight.nbytes for product in weights.products) + 2 * others
    assert one_slot(sizes, GPU, 1000).needs[WEIGHTS] == (sizes.weight_bytes, 0)
    dequantized = sizes_of(config, packed + others, "float32", parts)
    assert dequantized is not None
    assert dequantized.weight_bytes == 4 * (packed + others)


def test_the_plan_is_made_without_torch() -> None:
    program = (
        "import sys, swiftbatch.worker.kv.gpu_memory_plan, swiftbatch.worker.kv.model_sizes\n"
        "print('torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"


def test_what_rows_take_grows_with_what_a_row_holds() -> None:
    """Logits, scores and tempered scores; activations in the model's dtype; a delta's parts in float32."""

    def row_bytes(sizes: ModelSizes) -> float:
        jobs = (MOST_SLOTS + 1) * sizes.vocab * 12
        return (one_slot(sizes, GPU, 1000).needs[ROWS].once - jobs) / NUM_ROWS

    more_vocab, more_hidden = replace(LLAMA, vocab=LLAMA.vocab + 1), replace(LLAMA, hidden=LLAMA.hidden + 1)
    assert math.isclose(row_bytes(more_vocab) - row_bytes(LLAMA), 4 + 4 + 4 + 1)
    assert math.isclose(row_bytes(more_hidden) - row_bytes(LLAMA), 4 * 2 + 8 * 4)
