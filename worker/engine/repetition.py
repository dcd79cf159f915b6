"""Tells, token by token, whether an output ends in a loop, and where the loop began."""

from __future__ import annotations

import numpy as np

from swiftbatch.jobs.repetition import RepetitionDetection

ROOM = 4096  # tokens between two moves of the window


class LoopDetector:
    """Keeps, for every size of a pattern, the last output token that differed from the one `size` tokens before it.

    A pattern of `size` tokens stands `min_count` times in a row at the end where `size * (min_count - 1)` tokens came
    behind that one. Sizes stand in falling order in all arrays `[num_sizes]`, as the tokens that a new one is compared
    with do in the text. A token costs few microseconds: most are compared with those before them, and no more.
    """

    def __init__(self, detection: RepetitionDetection, output_ids: np.ndarray) -> None:
        """Begin behind `output_ids [num_generated] int64`."""
        most, least = detection.max_pattern_size, detection.smallest_pattern
        sizes = np.arange(most, least - 1, -1)
        self._num_tokens = len(output_ids)
        self._needed = sizes * (detection.min_count - 1)
        self._last_others = np.array([self._num_tokens - _num_alike(output_ids, size) for size in sizes.tolist()])
        self._differs = np.empty(len(sizes), dtype=bool)
        self._earliest = 0  # number of tokens before which there can be no loop
        self._window = np.full(most + ROOM, -1, dtype=np.int64)  # -1 is no token
        self._end, self._most, self._least = most, most, least
        last = output_ids[-most:]
        self._window[most - len(last) : most] = last

    def push(self, token_id: int) -> None:
        """Take in the next output token."""
        if self._end == len(self._window):
            self._window[: self._most] = self._window[-self._most :]
            self._end = self._most
        self._num_tokens += 1
        before = self._window[self._end - self._most : self._end - self._least + 1]
        np.putmask(self._last_others, np.not_equal(before, token_id, out=self._differs), self._num_tokens)
        self._window[self._end] = token_id
        self._end += 1

    def is_loop(self) -> bool:
        """Return whether the output ends in a loop."""
        if self._num_tokens >= self._earliest:  # what is needed only moves away
            self._earliest = int((self._last_others + self._needed).min())
        return self._num_tokens >= self._earliest


def first_repetition(detection: RepetitionDetection, output_ids: np.ndarray) -> int:
    """Count the tokens of `output_ids [num_generated] int64`, which end in a loop, in front of what is repeated.

    The loop's pattern is the shortest that it consists of, also where none so short is looked for.
    """
    sizes = range(detection.smallest_pattern, detection.max_pattern_size + 1)
    loops = (size for size in sizes if _num_alike(output_ids, size) >= size * (detection.min_count - 1))
    length = detection.min_count * next(loops)
    runs = ((size, _num_alike(output_ids, size)) for size in range(1, length))
    return len(output_ids) - next(run for size, run in runs if run >= length - size)


def _num_alike(token_ids: np.ndarray, size: int) -> int:
    """Count the last tokens that are the same as those `size` tokens before them."""
    differs = token_ids[size:] != token_ids[:-size]
    return int(differs[::-1].argmax()) if differs.any() else len(differs)
