from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

CHART = ROOT / "k8s" / "chart"
OVERLAYS = ("cpu-demo", "gpu-spot", "s3")


HELM = shutil.which("helm", path=Path(sys.executable).parent) or shutil.which("helm")


def run_helm(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    if HELM is None:
        pytest.skip("needs helm; on x86-64 Linux it is among the requirements for development")
    return subprocess.run([HELM, *arguments], input=text, capture_output=True, text=True, timeout=60)


def rendered(
    overlay: str | None = None, *values: str, given: Any = None, release: str = "swiftbatch"
) -> list[dict[str, Any]]:
    """Render the chart; `values` are NAME=VALUE, `given` is what a file of values has."""
    arguments = ["template", release, str(CHART), "--namespace", "swiftbatch", "--values", "-"]
    if overlay is not None:
        arguments += ["--values", str(values_file(overlay))]
    for value in values:
        arguments += ["--set", value]
    process = run_helm(*arguments, text=yaml.safe_dump(given or {}))
    if process.returncode:
        raise ValueError(process.stderr)
    return [each for each in yaml.safe_load_all(process.stdout) if each is not None]


def values_file(overlay: str) -> Path:
    return ROOT / "k8s" / "overlays" / overlay / "values.yaml"
