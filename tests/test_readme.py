"""The README's map has every file, and its commands exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from scheduler.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROOMS = ("jobs", "worker", "scheduler", "metrics")
COMMANDS = sorted(
    {
        " ".join(words)
        for words in re.findall(
            r"swiftbatch ([a-z]+)(?: (target|tokenswift|draft|decode|checkpoints|long|ablation [a-z]+))?", README
        )
    }
)


def test_the_map_has_a_line_for_every_file() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path.name != "__init__.py"]
    missing = [
        str(path.relative_to(ROOT))
        for path in files
        if f"`{path.relative_to(ROOT / path.relative_to(ROOT).parts[0])}`" not in README
    ]
    assert missing == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_in_the_readme_exists(command: str) -> None:
    result = CliRunner().invoke(main, [*command.split(), "--help"])
    assert result.exit_code == 0, result.output


def test_no_large_file_but_the_weights_is_tracked() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    sizes = {name: (ROOT / name).stat().st_size for name in tracked if (ROOT / name).is_file()}
    large = {name for name, size in sizes.items() if size > 2**20}
    weights = {"model.safetensors", "draft/model.safetensors", "griffin.safetensors"}
    assert large <= {f"worker/embedded/{name}" for name in weights}
    embedded = sum(size for name, size in sizes.items() if name.startswith("worker/embedded/"))
    assert embedded <= 32 * 2**20
