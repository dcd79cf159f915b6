from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import swiftbatch
from swiftbatch.jobs.run.run import Run
from tests import ROOT
from tests.jobs.run.run_parts import MANIFEST
from tests.test_rooms import ROOMS


def test_every_name_that_a_program_may_use_is_there() -> None:
    assert all(getattr(swiftbatch, name) is not None for name in swiftbatch.__all__)
    assert swiftbatch.Run.__module__ == "swiftbatch.scheduler.api.run_handle"
    with pytest.raises(AttributeError, match="a program may use Progress, Run, UserError"):
        swiftbatch.Job  # noqa: B018


def test_importing_the_package_imports_none_of_its_rooms() -> None:
    """A worker asks it for their places before any of them runs."""
    program = "import sys, swiftbatch; print([name for name in sys.modules if name.startswith('swiftbatch.')])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_a_program_opens_a_run_by_its_folder(tmp_path: Path) -> None:
    Run.planned(str(tmp_path / "run"), MANIFEST).made()
    run = swiftbatch.Run.open(str(tmp_path / "run"))
    assert (run.progress().state, list(run.lines())) == ("interrupted", [])
    with pytest.raises(swiftbatch.UserError, match="nothing"):
        swiftbatch.Run.open(str(tmp_path / "nothing"))


@pytest.mark.long
def test_a_wheel_has_every_module_and_what_goes_with_the_code_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    building = os.environ | {"PYTHONPATH": str(ROOT / "build/backend")}
    built = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, env=building)
    assert built.returncode == 0, built.stderr
    assert "Package" not in built.stderr  # setuptools names each folder that it finds unclear
    (wheel,) = tmp_path.glob("*.whl")
    held = {name.partition("/purelib/")[2] for name in zipfile.ZipFile(wheel).namelist()} - {""}
    modules = {f"swiftbatch/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    modules |= {"swiftbatch/__init__.py", "swiftbatch/__main__.py"}
    assert {name for name in held if name.endswith(".py")} == modules
    data = {name for name in held if not name.endswith(".py")}
    data.remove("swiftbatch/py.typed")
    assert {name.split("/")[2] for name in data} == {"embedded", "kernels", "report", "serve"}
    assert {"swiftbatch/worker/embedded/model.safetensors", "swiftbatch/worker/kernels/source/rows.c"} <= data
    assert not [name for name in data if name.endswith(".jsonl")]  # a training's log
