"""Pages of caches in a CPU's memory: large ones, with which a row that reads 100,000 positions is a sixth sooner, and
those that are given back."""

from __future__ import annotations

import ctypes
import mmap

import torch

HUGE = 1 << 21  # bytes of a large page
COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1 and later


def ask_for_huge_pages(buffer: torch.Tensor) -> None:
    """Tell the system that large pages would do for all of a tensor's memory. A wish: it may say no, or not know them.

    Memory is then taken in pages of 2 MB as it is filled.
    """
    _advise_within(buffer, _huge_advice(buffer))


def ask_for_small_pages(buffer: torch.Tensor) -> None:
    """Tell the system that parts of a tensor's memory are to be given back one by one."""
    _advise_within(buffer, getattr(mmap, "MADV_NOHUGEPAGE", None))


def give_back(buffer: torch.Tensor) -> None:
    """Give back the memory of all pages that hold nothing but numbers of this tensor; who reads them finds zeros."""
    _advise_within(buffer, getattr(mmap, "MADV_DONTNEED", None))


class FilledPages:
    """Makes large pages of small ones where a cache has filled them: so it takes no more memory than its positions.

    A buffer `[..., capacity, head_dim]` is filled in each of its stripes at once, from the first position on.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._row_bytes = buffer.shape[-1] * buffer.element_size()
        self._stripe_bytes = buffer.shape[-2] * self._row_bytes
        self._first, self._end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        self._advice = _huge_advice(buffer)
        self._num_filled = 0

    def fill(self, num_positions: int) -> None:
        """Tell that so many first positions are filled."""
        if self._advice is None or (num_positions - self._num_filled) * self._row_bytes < HUGE:
            return
        for stripe in range(self._first, self._end, self._stripe_bytes):
            start = max(-(-stripe // HUGE), (stripe + self._num_filled * self._row_bytes) // HUGE) * HUGE
            size = (stripe + num_positions * self._row_bytes - start) // HUGE * HUGE
            if size > 0 and not _advise(start, size, COLLAPSE):
                _advise(start, size, self._advice)  # an older system does it some time
        self._num_filled = num_positions


def _huge_advice(buffer: torch.Tensor) -> int | None:
    """Return the number of the wish for large pages; None where there are none, as on systems other than Linux."""
    return getattr(mmap, "MADV_HUGEPAGE", None) if buffer.device.type == "cpu" else None


def _advise_within(buffer: torch.Tensor, advice: int | None) -> None:
    """Advise the whole pages within a tensor; without a number of the advice the system does not know it."""
    start = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (buffer.data_ptr() + buffer.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if advice is not None and size > 0:
        _advise(start, size, advice)


def _advise(start: int, size: int, advice: int) -> bool:
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) == 0)
