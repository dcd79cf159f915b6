"""Caches ask for large pages, and are whole where the system gives none."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from swiftbatch.worker.caches.full import CacheShape, FullKVCache
from swiftbatch.worker.caches.huge_pages import ask_for_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def num_huge_kib() -> int:
    """Kibibytes of this process in large pages."""
    match = re.search(r"AnonHugePages:\s*(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(match[1]) if match else 0


@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this system has no large pages")
def test_a_filled_cache_lies_in_large_pages() -> None:
    before = num_huge_kib()
    cache = FullKVCache(CacheShape(2, 2, 64, torch.bfloat16, torch.device("cpu")), 100_000)
    cache.clear()
    assert num_huge_kib() > before


@pytest.mark.parametrize("size", [0, 1, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 5])
def test_buffers_of_any_size_may_ask(size: int) -> None:
    buffer = torch.zeros(size, dtype=torch.uint8)
    ask_for_huge_pages(buffer)
    assert not buffer.any()
