"""Plain decoding at sampled positions of a long generation: its time there, and that it says the same tokens."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from swiftbatch.jobs.frozen_records import Frozen
from swiftbatch.worker.bench.bench_engine import BenchEngine
from swiftbatch.worker.caches.full_cache import FullKVCache
from swiftbatch.worker.drafters.autoregressive import AutoregressiveDrafter
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.target.target import TargetModel


class PlainWindow(Frozen):
    """Plain decoding behind `num_tokens` generated tokens. `same_tokens` is None until the generation got past it."""

    num_tokens: int
    num_plain_tokens: int
    ms_per_token: float  # median
    same_tokens: bool | None


@dataclass(frozen=True)
class _Measured:
    num_tokens: int
    ms_per_token: float
    token_ids: np.ndarray  # [num_plain_tokens]


class PlainWindows:
    """Takes a generation's place for `size` tokens now and then. Its cache and its sequence stay as they are."""

    def __init__(self, target: TargetModel, size: int) -> None:
        self._target = target
        self._size = size
        self._engine = BenchEngine(target, AutoregressiveDrafter())
        self._measured: list[_Measured] = []

    def measure(self, sequence: Sequence, cache: FullKVCache) -> None:
        """Decode plainly from where the sequence stands; nothing where it has ended or was measured already."""
        num_tokens = sequence.num_generated_tokens
        size = min(self._size, sequence.num_remaining_tokens)
        if size == 0 or (self._measured and self._measured[-1].num_tokens == num_tokens):
            return
        plain = sequence.with_output(sequence.output_ids.tolist())
        plain.max_length = len(plain) + size
        self._engine.start(plain, cache.prefix(cache.length))
        seconds = []
        while plain.finish_reason is None:
            started = time.perf_counter()
            [(_, step)] = self._engine.step()  # ends with the token on the host, so a clock is right on a GPU too
            seconds += [(time.perf_counter() - started) / step.num_steps] * step.num_steps
        self._engine.stop(plain)
        self._measured.append(_Measured(num_tokens, 1000 * statistics.median(seconds), plain.output_ids[num_tokens:]))

    def compared(self, output_ids: np.ndarray) -> list[PlainWindow]:
        """All windows, compared with the generation's tokens so far, `[num_generated]`."""
        windows = []
        for measured in self._measured:
            generated = output_ids[measured.num_tokens :][: len(measured.token_ids)]
            is_past = len(generated) == len(measured.token_ids)
            windows.append(
                PlainWindow(
                    num_tokens=measured.num_tokens,
                    num_plain_tokens=len(measured.token_ids),
                    ms_per_token=round(measured.ms_per_token, 3),
                    same_tokens=np.array_equal(generated, measured.token_ids) if is_past else None,
                )
            )
        return windows

    def seconds(self, first: int, last: int) -> float:
        """Return the seconds of plain decoding of generated tokens `[first, last)`: the windows' times, integrated."""
        positions = [measured.num_tokens for measured in self._measured]
        return integral(positions, [measured.ms_per_token for measured in self._measured], first, last) / 1000


def integral(positions: list[int], values: list[float], first: int, last: int) -> float:
    """Integrate the curve through points of ascending positions over `[first, last]`: lines, level at both ends."""
    grid = [first, *(position for position in positions if first < position < last), last]
    return float(np.trapezoid(np.interp(grid, positions, values), grid))
