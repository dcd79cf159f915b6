from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the lazy fox number {n} jumps over the dog. " for n in range(40)))
    return path
