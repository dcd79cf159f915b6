"""Python's search for cycles of garbage, made seldom where many objects are made and cycles are none of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY_OBJECTS = 100_000  # that have come and not gone between two looks; Python's own number is 700


@contextmanager
def looked_for_seldom() -> Iterator[None]:
    """Look for garbage seldom in the block: a tenth of the time of who handles a million jobs would go there.

    Blocks in other threads may overlap: then what is set at the end of the last one is what was set before one of them.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], MANY_OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
