"""Libraries for tests, compiled once per state of the source below `build`."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Sequence
from pathlib import Path

from swiftbatch.worker.kernels.build import compile_library, is_whole, source_digest
from tests import ROOT
from tests.worker.kernels.emulation import EMULATED_TILES

FOLDER = ROOT / "build" / "tested_kernels"


def compiled_once(variant: str, compiler: list[str], flags: Sequence[str]) -> Path:
    """Compile once per state of the source."""
    parts = (source_digest(), EMULATED_TILES.read_text(encoding="utf-8"), *compiler, *flags)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = FOLDER / f"{variant}-{digest[:16]}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others find what the first one compiled
        if not (path.is_file() and is_whole(path)):
            compile_library(variant, path, compiler, flags)
    return path
