"""Every kernel compiles for A100 and H100, and none spills registers. No GPU is needed for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = pytest.mark.long


@pytest.mark.parametrize("capabilities", [("90",), pytest.param(("80", "90"), marks=pytest.mark.slow)])
def test_kernels_compile_for_gpus_without_spills(capabilities: tuple[str, ...]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.worker.drawing.cuda.compile_run", *capabilities],
        env=environment | {"TRITON_CACHE_DIR": str(ROOT / "build" / "triton"), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(ran.stdout.splitlines()) == 20 * len(capabilities)
