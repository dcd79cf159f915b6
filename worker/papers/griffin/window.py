"""The part of a text that GRIFFIN's draft model sees: its first tokens and a window over the newest ones.

Rows stand in entries of a cache, which are the positions that the model sees: the first `NUM_SINKS` tokens in entries
0 to 63, the newest behind them. The window begins anew every `WINDOW` committed tokens. Entries and positions of the
text agree modulo `BLOCK`, so that a draft tree which fits the target's block fits the draft model's.
"""

from __future__ import annotations

from swiftbatch.worker.kernels.sizes import BLOCK

NUM_SINKS = BLOCK
WINDOW = 4 * BLOCK  # newest tokens that are always seen; before it begins anew, up to twice as many
NUM_ENTRIES = NUM_SINKS + 2 * WINDOW


def window_start(num_committed: int) -> int:
    """Position of the first token behind the sinks that is seen, for so many committed tokens."""
    return max(NUM_SINKS, (num_committed // WINDOW - 1) * WINDOW)


def entry_of(position: int, start: int) -> int:
    """The entry of a token that is seen, where the window begins at position `start`."""
    return position if position < NUM_SINKS else position - start + NUM_SINKS


def position_of(entry: int, start: int) -> int:
    """The position of the token in an entry: `entry_of` the other way round."""
    return entry if entry < NUM_SINKS else entry - NUM_SINKS + start
