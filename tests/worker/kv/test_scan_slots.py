"""Scanned texts in GPU slots equal the CPU's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import tests.worker.interpreter  # noqa: F401
from swiftbatch.jobs.run.run_records import AttentionName
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.forward.cuda.cuda_loading import MOST_SCANNED, plan_wanted, with_rounds
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.cuda.scanned_texts import ScannedTexts, ScanScratch
from swiftbatch.worker.kernels.kv_codes import SCAN_CHUNK
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.gpu_memory_plan import NO_DRAFTS, DraftMemory, GPUMemory, SlotsWanted, one_slot, plan_pages
from swiftbatch.worker.kv.model_sizes import ModelSizes, read_sizes
from swiftbatch.worker.kv.scan_cache import SHORTEST_SCANNED, ScanKVCache, ScannedKeys
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.kv.sparse_arena import SparseArena, arena_for, scan_memory
from swiftbatch.worker.kv.sparse_cache import NUM_PINNED
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.model.kind_parts import save_tiny, tiny_config

SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))
SIZES = ModelSizes(1000, SHAPE.bytes_per_position(), 4, 2, 16, 64, 128, 300, 4)
LONGEST, NUM_BEST = 3000, 64


@pytest.fixture
def arena() -> SparseArena:
    return arena_for(ScanKVCache, NUM_BEST, SHAPE, 2, LONGEST)


def full_cache(seed: int) -> FullKVCache:
    slots = KVArena(SHAPE, 2, LONGEST)
    slots.buffer.copy_(torch.randn(slots.buffer.shape, generator=torch.Generator().manual_seed(seed)))
    first, second = slots.new_cache(LONGEST), slots.new_cache(LONGEST)
    assert (first.slot, second.slot) == (0, 1)
    return second


def followed(arena: SparseArena, full: FullKVCache, *lengths: int) -> ScanKVCache:
    sequence = Sequence("a", [0], SamplingParams(max_tokens=LONGEST - 1), 1)
    cache = ScanKVCache(SHAPE, NUM_BEST, sequence, arena.new_entries)
    for length in lengths:
        full.roll_back(0)
        full.advance(length)
        cache.catch_up(full, 8)
        cache.follow(full, lambda position: torch.empty(0))
    return cache


def texts_of(arena: SparseArena) -> ScannedTexts:
    assert arena.texts is not None
    return arena.texts


@needs_kernels
@pytest.mark.parametrize("lengths", [(2900,), (10, 1400, 2300, 2301, 2900)], ids=str)
def test_a_slot_has_what_is_scanned_on_a_cpu(arena: SparseArena, lengths: tuple[int, ...]) -> None:
    texts = texts_of(arena)
    followed(arena, full_cache(1), 2900)  # dropped, so that the next one has its slot
    full = full_cache(0)
    cache = followed(arena, full, *lengths)
    keys = ScannedKeys([full.stored(layer) for layer in range(2)], NUM_PINNED, LONGEST, NUM_BEST)
    keys.extend(NUM_PINNED + 2 * SCAN_CHUNK)
    slot = cache.entries.slot  # type: ignore[attr-defined]
    assert texts.num_chunks[slot] == 2
    assert texts.addresses[:, slot].tolist() == [full.stored(layer)[0].data_ptr() for layer in range(2)]
    assert cache.num_entries == 2900 - 2 * SCAN_CHUNK
    num_bytes = 2 * SCAN_CHUNK * 16 // 4
    is_same = texts.codes[:, slot, :, :num_bytes] == keys._codes[..., :num_bytes]
    assert is_same.float().mean() > 0.999  # except keys at the border of a level
    for name in ("means", "spreads", "moments"):
        found, expected = getattr(texts, name)[:, slot], getattr(keys, f"_{name}")
        if name == "means":
            found, expected = found[:, :, :2], expected[:, :, :2]
        torch.testing.assert_close(found, expected)
    assert texts.flat_deviations[slot] == keys._struct.flat_deviation


def test_a_short_text_in_a_slot_of_a_long_one_has_no_chunks(arena: SparseArena) -> None:
    followed(arena, full_cache(1), 2900)
    cache = followed(arena, full_cache(0), 500)
    slot = cache.entries.slot  # type: ignore[attr-defined]
    assert texts_of(arena).num_chunks[slot] == 0
    assert cache.num_entries == 500


def test_slots_take_what_was_planned_for_them(arena: SparseArena) -> None:
    planned = scan_memory(SIZES, LONGEST, NUM_BEST, 5)
    texts = texts_of(arena)
    assert planned.slot_bytes == (arena.buffer.nbytes + sum(each.nbytes for each in texts.tensors())) // 2
    scratch = ScanScratch.empty(texts.sizes, 4, 5, SHAPE.device)
    assert planned.part_bytes == sum(each.nbytes for each in scratch.tensors())


def test_among_many_jobs_those_that_fit_at_their_longest_have_room_for_their_texts() -> None:
    """The others have only pages, because rounds are for few long jobs."""
    gpu = GPUMemory(10**9, 5)
    wanted = SlotsWanted(LONGEST, scanned_best=NUM_BEST)
    few, many = (with_rounds(NO_DRAFTS, wanted, SIZES, each) for each in (gpu, gpu.with_rows(256)))
    assert (few.num_scanned, many.num_scanned, many.slot_bytes) == (None, MOST_SCANNED, 0)
    scan = scan_memory(SIZES, 3008, NUM_BEST, 1, 256)
    assert many.part_bytes == scan.part_bytes + MOST_SCANNED * scan.slot_bytes
    plan = plan_pages(SIZES, gpu.with_rows(256), LONGEST, None, many)
    assert (plan.num_slots, plan.num_drafted) == (256, MOST_SCANNED)
    wide = gpu.with_rows(256)
    one = one_slot(SIZES, wide, LONGEST, DraftMemory(scan.part_bytes, scan.slot_bytes))
    tight = dataclasses.replace(wide, free_bytes=wide.free_bytes - one.left_bytes + 3 * one.bytes_per_slot)
    assert with_rounds(NO_DRAFTS, wanted, SIZES, tight).num_scanned == 3


def test_texts_to_scan_leave_room_for_the_slots_that_were_asked_for() -> None:
    wide = GPUMemory(10**9, 5, "flash").with_rows(128)
    wanted = SlotsWanted(LONGEST, num_slots=5, scanned_best=NUM_BEST)
    scan = scan_memory(SIZES, 3008, NUM_BEST, wide.num_splits, 128)
    one = plan_wanted(dataclasses.replace(wanted, num_slots=1), SIZES, wide, 1)
    least = one.used_bytes + 4 * one.bytes_per_slot
    found = []
    for number in range(6):
        tight = dataclasses.replace(wide, free_bytes=least + number * scan.slot_bytes)
        plan = plan_wanted(wanted, SIZES, tight)
        assert plan.used_bytes <= tight.free_bytes
        found.append(plan.num_drafted)
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 5)


@pytest.mark.parametrize(("attention", "own"), [("triton", 0), ("flash", 1)])
def test_a_plan_counts_scans_only_where_texts_are_scanned(attention: AttentionName, own: int) -> None:
    gpu = GPUMemory(10**9, 5, attention)
    wanted = SlotsWanted(LONGEST, scanned_best=NUM_BEST)
    planned, scan = with_rounds(NO_DRAFTS, wanted, SIZES, gpu), scan_memory(SIZES, 3008, NUM_BEST, 5)
    assert planned.slot_bytes == scan.slot_bytes > 0
    assert planned.part_bytes == scan.part_bytes + own * gpu.scratch_bytes(SIZES)  # of Triton's beside flash-attn's
    assert with_rounds(NO_DRAFTS, dataclasses.replace(wanted, host_bytes=10**9), SIZES, gpu) == planned
    for other in (SlotsWanted(LONGEST), SlotsWanted(SHORTEST_SCANNED - 100, scanned_best=NUM_BEST)):
        assert with_rounds(NO_DRAFTS, other, SIZES, gpu) == NO_DRAFTS
    assert with_rounds(NO_DRAFTS, wanted, dataclasses.replace(SIZES, is_scannable=False), gpu) == NO_DRAFTS


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_a_plan_knows_which_models_are_scanned(kind: str, tmp_path: Path) -> None:
    save_tiny(tiny_config(kind, has_wide_heads=True), tmp_path)
    files = locate_model(str(tmp_path))
    sizes = read_sizes(files, "float32")
    assert sizes is not None
    assert sizes.is_scannable == (not TargetModel.load(files, "float32", "cpu").forwards.has_windows)
