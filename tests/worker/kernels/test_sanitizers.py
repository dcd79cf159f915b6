"""The kernels under address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.worker.kernels.compiled_once import compiled_once
from tests.worker.kernels.emulation import CAN_EMULATE, EMULATED, FLAGS_OF_EMULATION
from tests.worker.kernels.kernel_parts import VARIANTS, needs_kernels

pytestmark = pytest.mark.long

OWN, *OTHERS = VARIANTS or ["none"]  # this machine's choice, and what else it can run
IN_SOFTWARE = [EMULATED] if CAN_EMULATE else []
# -O1 compiles half as long again and runs no faster, as do checks inlined everywhere
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-Og")
FLAGS += ("--param", "asan-instrumentation-with-call-threshold=0")
# half of the compile time: checks before accesses that the other sanitizer catches
NOT_TWICE = "-fno-sanitize=null,alignment,object-size,pointer-overflow"


def sanitizer() -> tuple[list[str], str] | None:
    """Return a compiler and the library to preload, if any."""
    compiler = os.environ.get("CC") or shutil.which("gcc")
    if not compiler:
        return None
    command = [compiler, "-print-file-name=libasan.so"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ([compiler], path) if Path(path).is_absolute() else None


@needs_kernels
@pytest.mark.parametrize(
    ("variant", "num_rounds"),
    [(OWN, 1), *(pytest.param(each, 6, marks=pytest.mark.slow) for each in (OWN, *IN_SOFTWARE, *OTHERS))],
)
def test_sanitizers_find_nothing(variant: str, num_rounds: int) -> None:
    if (found := sanitizer()) is None:
        pytest.skip("no compiler with sanitizers")
    compiler, preloaded = found
    flags = (*FLAGS, *(FLAGS_OF_EMULATION if variant == EMULATED else ()))
    library = compiled_once(variant, compiler, flags if num_rounds > 1 else (*flags, NOT_TWICE))
    environment = {"LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "tests.worker.kernels.sanitized_run", str(library), str(num_rounds)],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (0, "nothing found\n"), run.stderr[-4000:]
