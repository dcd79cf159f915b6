"""Random stretches of a text, and where a text begins to repeat itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from swiftbatch.worker.decode_bench import BenchError, encode, read_text
from swiftbatch.worker.model.model_files import ModelFiles

MOST_PERIOD = 256  # tokens of a repeated passage
LEAST_LOOP = 64  # tokens of a loop, in which the passage stands at least three times


def sampled_tokens(path: Path, files: ModelFiles, num_tokens: int, seed: int) -> list[int]:
    """Return a stretch that begins anywhere in a text, as the seed says. Raises BenchError for a short text."""
    ids = encode(files, read_text(path))
    if len(ids) < num_tokens:
        raise BenchError(f"text {path}: it has {len(ids)} tokens, the highest position needs {num_tokens}")
    start = int(np.random.default_rng(seed).integers(len(ids) - num_tokens + 1))
    return ids[start : start + num_tokens]


def loop_start(token_ids: np.ndarray) -> int | None:
    """Return the first position of `token_ids [num_tokens]` where a loop begins, or None without a loop."""
    found = []
    for period in range(1, min(MOST_PERIOD, len(token_ids) // 3) + 1):
        differs = np.flatnonzero(token_ids[period:] != token_ids[:-period])
        ends = np.concatenate([[-1], differs, [len(token_ids) - period]])
        loops = np.flatnonzero(np.diff(ends) - 1 >= max(2 * period, LEAST_LOOP - period))
        if len(loops):
            found.append(int(ends[loops[0]]) + 1)
    return min(found, default=None)
