"""The package's own names: what a program may use, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import swiftbatch
from tests.jobs.run.run_parts import MANIFEST


def test_every_name_that_a_program_may_use_is_there() -> None:
    assert all(getattr(swiftbatch, name) is not None for name in swiftbatch.__all__)
    assert swiftbatch.Run.__module__ == "swiftbatch.jobs.run.run"
    with pytest.raises(AttributeError, match="a program may use Progress, Run, UserError"):
        swiftbatch.Job  # noqa: B018


def test_importing_the_package_imports_none_of_its_rooms() -> None:
    """A worker asks it where they are before any of them runs."""
    program = "import sys, swiftbatch; print([name for name in sys.modules if name.startswith('swiftbatch.')])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_a_program_opens_a_run_by_its_folder(tmp_path: Path) -> None:
    swiftbatch.Run.create_or_open(str(tmp_path / "run"), MANIFEST)
    run = swiftbatch.Run.open(str(tmp_path / "run"))
    assert (run.progress(), list(run.joined_lines())) == (None, [])
    with pytest.raises(swiftbatch.UserError, match="nothing"):
        swiftbatch.Run.open(str(tmp_path / "nothing"))
