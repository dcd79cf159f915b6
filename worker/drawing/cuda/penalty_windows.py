"""The tokens that come into a penalty window and those that leave it, in the form that the kernels take."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swiftbatch.worker.drawing.cuda.row_words import NUM_DRAFTED, PADDING


def leaving_tokens(token_ids: NDArray[np.int64], window: int) -> NDArray[np.int32]:
    """The committed tokens that leave the window with each further token, `[NUM_DRAFTED]`; -1 where none does."""
    leaving = np.full(NUM_DRAFTED, PADDING, dtype=np.int32)
    first = len(token_ids) - window  # leaves with the next token
    tokens = token_ids[max(first, 0) : max(first + NUM_DRAFTED, 0)]
    start = max(-first, 0)
    leaving[start : start + len(tokens)] = tokens[: NUM_DRAFTED - start]
    return leaving


def committed_tokens(
    token_ids: NDArray[np.int64], num_new: int, window: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The last `num_new` tokens, and those that have left the window as they came; no more of these than of those."""
    length = len(token_ids)
    return token_ids[length - num_new :], token_ids[max(length - num_new - window, 0) : max(length - window, 0)]
