"""Commands that start Python processes with this code, and rare garbage collection."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import swiftbatch

INSTALLED = ("site-packages", "dist-packages")  # Python finds code there by itself


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a module; it needs `environment_of_code`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment_of_code() -> dict[str, str]:
    """Return the environment, extended so that Python finds an uninstalled checkout."""
    root = Path(swiftbatch.__file__).resolve().parents[1]
    if root.name in INSTALLED:
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])}


# Rare garbage collection where many objects are made without cycles.


MANY_OBJECTS = 100_000  # objects allocated between collections; Python's default is 700


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect cyclic garbage seldom inside the block: a million jobs would spend a tenth of their time on it.

    Blocks of several threads may overlap.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], MANY_OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
