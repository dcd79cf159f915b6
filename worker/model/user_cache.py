"""Folders of derived files in the user's cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return swiftbatch's folder of this name in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftbatch" / name


@contextlib.contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` at the end unless another process was faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield aside
        with contextlib.suppress(OSError):
            aside.rename(folder)
        if not folder.is_dir():
            raise OSError(f"{folder} can't be made")
    finally:
        shutil.rmtree(aside, ignore_errors=True)
