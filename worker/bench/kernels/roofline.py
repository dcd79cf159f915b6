"""The roof of this machine: bytes that its memory gives and products that its units take, on so many threads."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from swiftbatch.worker.kernels.addresses import address_of

LARGEST, SMALLEST = 1 << 28, 1 << 18  # bytes of memory that are read: from beyond every cache, to all within
NUM_READ = 1 << 26  # bytes of a reading, at least
NUM_MULTIPLIED = 200_000  # times all registers, in a round
NUM_ROUNDS = 20  # short ones, so that some are not disturbed
FLOATS = 64  # that are read at a time
POINTER, INT = ctypes.c_void_p, ctypes.c_int
SIGNATURES = {
    "roof_read": (None, [POINTER, ctypes.c_int64, ctypes.c_int64]),
    "roof_multiply": (ctypes.c_double, [INT, ctypes.c_int64]),
    "roof_matrix_new": (POINTER, [INT, INT, INT, POINTER]),
    "roof_matrix_quantized": (POINTER, [INT, INT, INT, POINTER]),
    "roof_matrix_free": (None, [POINTER]),
    "roof_linear": (None, [POINTER, POINTER, INT, POINTER, POINTER]),
}


def with_roof(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the functions that benchmarks alone use as they are called."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Roof:
    """Measures once and remembers: the best of some rounds."""

    def __init__(self, library: ctypes.CDLL, element: int, num_threads: int) -> None:
        self._library = with_roof(library)
        self._pool = ThreadPoolExecutor(num_threads)
        self._num_threads = num_threads
        self._memory = np.ones(LARGEST // 4, dtype=np.float32)
        self._bytes_per_second: dict[int, float] = {}
        self.flops_per_second = self._multiply(element)

    def bytes_per_second(self, num_bytes: int) -> float:
        """Measure how fast all threads together read so many bytes again and again: few of them lie in a cache."""
        size = min(max(1 << (num_bytes - 1).bit_length(), SMALLEST), LARGEST)
        if size not in self._bytes_per_second:
            self._bytes_per_second[size] = self._read(size)
        return self._bytes_per_second[size]

    def seconds(self, num_bytes: int, num_flops: int, num_bytes_between: int) -> float:
        """Return the least time of an operation that reads these bytes, so many others lying between two times."""
        return max(num_bytes / self.bytes_per_second(num_bytes_between), num_flops / self.flops_per_second)

    def _read(self, size: int) -> float:
        count = size // 4 // self._num_threads // FLOATS * FLOATS
        repeats = max(1, NUM_READ // size)
        start = address_of(self._memory) or 0

        def read(thread: int) -> None:
            self._library.roof_read(start + thread * count * 4, count, repeats)

        return count * 4 * self._num_threads * repeats / self._best_seconds(read)

    def _multiply(self, element: int) -> float:
        num_flops = self._library.roof_multiply(element, 1) * NUM_MULTIPLIED * self._num_threads
        return float(num_flops / self._best_seconds(lambda _: self._library.roof_multiply(element, NUM_MULTIPLIED)))

    def _best_seconds(self, work: Callable[[int], None]) -> float:
        """Return the seconds of the best round, all threads at once."""
        rounds = []
        for _ in range(NUM_ROUNDS):
            started = time.perf_counter()
            list(self._pool.map(work, range(self._num_threads)))
            rounds.append(time.perf_counter() - started)
        return min(rounds)
