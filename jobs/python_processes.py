"""Commands that start Python processes with this code, and a garbage collector that looks seldom."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import swiftbatch

INSTALLED = ("site-packages", "dist-packages")  # which every Python knows by itself


def module_command(module: str, *arguments: str) -> list[str]:
    """A command that runs a module of this program; it needs `environment_of_code`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment_of_code() -> dict[str, str]:
    """This process's environment, in which a checkout that nobody has installed is found, too."""
    root = Path(swiftbatch.__file__).resolve().parents[1]
    if root.name in INSTALLED:
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])}


# Python's search for cycles of garbage, made seldom where many objects are made and cycles are none of them.


MANY_OBJECTS = 100_000  # that have come and not gone between two looks; Python's own number is 700


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Look for garbage seldom in the block: a tenth of the time of who handles a million jobs would go there.

    Blocks in other threads may overlap: then what is set at the end of the last one is what was set before one of them.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], MANY_OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
