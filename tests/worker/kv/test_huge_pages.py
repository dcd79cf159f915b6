from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftbatch.worker.kv.cache_rows import CacheShape, ask_for_huge_pages
from swiftbatch.worker.kv.full_cache import FullKVCache, new_cache_of

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def num_huge_kib() -> int:
    match = re.search(r"AnonHugePages:\s*(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(match[1]) if match else 0


def num_resident_kib() -> int:
    match = re.search(r"Rss:\s*(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert match is not None
    return int(match[1])


@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this system has no large pages")
def test_what_a_cache_has_filled_comes_to_lie_in_large_pages_and_keeps_its_bits() -> None:
    before = num_huge_kib()
    cache = FullKVCache(CacheShape(2, 2, 64, torch.bfloat16, torch.device("cpu")), 100_000)
    for start, end in ((0, 40_000), (40_000, 60_000)):
        cache.load(np.full((8, end - start, 64), start + 1, np.uint16))
    assert num_huge_kib() > before
    assert (cache.kv(0, 40_000) == 1).all()
    assert (cache.kv(40_000, 60_000) == 40_001).all()


def test_a_cache_takes_no_more_memory_than_its_positions() -> None:
    """Memory counts in 4 KB pages of each layer's and head's keys and values."""
    kv = np.zeros((64, 2000, 64), np.uint16)
    cache = FullKVCache(CacheShape(8, 4, 64, torch.bfloat16, torch.device("cpu")), 100_000)
    before = num_resident_kib()
    cache.load(kv)
    assert num_resident_kib() - before < 2 * 64 * 2000 * 128 / 1024


def test_the_memory_of_layers_with_a_window_is_given_back_as_the_text_grows() -> None:
    shape = CacheShape(8, 4, 64, torch.float32, torch.device("cpu"), windows=(*(40,) * 7, None))
    held = shape.held_positions(num_unwritten=0)
    assert held is not None
    before = num_resident_kib()
    cache = new_cache_of(shape, 100_000)
    for _ in range(10):
        cache.load(np.ones((64, 800, 64), np.float32))
    assert cache.num_held <= held.of(8000)
    most = (held.of(8000) + 800) * shape.bytes_per_position() / 1024 + 2 * 64 * 4  # plus two pages per head
    assert num_resident_kib() - before < 1.3 * most
    assert most < 0.4 * 8000 * shape.bytes_per_position() / 1024


def test_a_cache_leaves_room_for_others_in_the_system_s_table_of_areas() -> None:
    """A process has about 65,000 areas; one per head and layer would use them up."""

    def num_areas() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = num_areas()
    caches = [
        new_cache_of(CacheShape(4, 64, 64, torch.float32, torch.device("cpu"), windows=(40, None) * 2), 20_000)
        for _ in range(2)
    ]
    assert len(caches) == 2
    assert num_areas() - before < 100


@pytest.mark.parametrize("size", [0, 1, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 5])
def test_buffers_of_any_size_may_ask(size: int) -> None:
    buffer = torch.zeros(size, dtype=torch.uint8)
    ask_for_huge_pages(buffer)
    assert not buffer.any()
