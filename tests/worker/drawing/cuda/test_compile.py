"""Every kernel compiles for A100 and H100, and none spills registers. No GPU is needed for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = pytest.mark.long


def test_kernels_compile_for_both_gpus_without_spills() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.worker.drawing.cuda.compile_run"],
        env=environment | {"TRITON_CACHE_DIR": str(ROOT / "build" / "triton"), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(ran.stdout.splitlines()) == 2 * 18
