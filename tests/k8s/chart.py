from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

CHART = ROOT / "k8s" / "chart"
OVERLAYS = ("cpu-demo", "gpu-spot", "s3")


def require(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}, to render the manifests")


def rendered(
    overlay: str | None = None, *values: str, given: Any = None, release: str = "swiftbatch"
) -> list[dict[str, Any]]:
    """Render the chart; `values` are NAME=VALUE, `given` is what a file of values has."""
    require("helm")
    command = ["helm", "template", release, str(CHART), "--namespace", "swiftbatch", "--values", "-"]
    if overlay is not None:
        command += ["--values", str(values_file(overlay))]
    for value in values:
        command += ["--set", value]
    process = subprocess.run(command, input=yaml.safe_dump(given or {}), capture_output=True, text=True, timeout=60)
    if process.returncode:
        raise ValueError(process.stderr)
    return [each for each in yaml.safe_load_all(process.stdout) if each is not None]


def values_file(overlay: str) -> Path:
    return ROOT / "k8s" / "overlays" / overlay / "values.yaml"
