"""What a new run says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jobs.run.records import Exactness
from scheduler.runs.manifest import kept_or_new_manifest, with_model
from scheduler.runs.settings import Settings
from tests import ROOT
from tests.worker.kernels.kernel_parts import VARIANTS, needs_kernels
from worker.config import Computation
from worker.exactness.doctor import diagnose
from worker.kernels.variants import OVERRIDE
from worker.model.files import locate_model
from worker.target.hardware import has_cuda

PROGRAM = """
import sys
from scheduler.runs.manifest import kept_or_new_manifest, with_model
from scheduler.runs.settings import Settings
from worker.model.files import locate_model

manifest = kept_or_new_manifest(sys.argv[1] + "/absent", Settings(said={"device": "auto"}))
print(with_model(manifest, locate_model("embedded")).device, "torch" in sys.modules)
"""


@pytest.mark.skipif(has_cuda(), reason="a machine with a GPU needs torch to tell")
def test_a_new_run_is_described_without_torch(tmp_path: Path) -> None:
    """So that `submit` starts seconds sooner."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "cpu False\n"


@needs_kernels
def test_a_verdict_is_known_to_runs_on_the_same_kernels_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(OVERRIDE, VARIANTS[0])
    said = {"model": str(tiny_model), "device": "cpu", "num_threads": 1}

    def exactness() -> Exactness:
        manifest = kept_or_new_manifest(str(tmp_path / "absent"), Settings(said=said))
        return with_model(manifest, locate_model(str(tiny_model))).exactness

    assert exactness() == "not probed"
    verdict = diagnose(Computation(**said), num_rows=64).verdict
    assert exactness() == verdict
    monkeypatch.setattr("worker.kernels.variants.NUMERICS_VERSION", 0)
    assert exactness() == "not probed"
