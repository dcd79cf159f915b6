"""The Helm chart, and the overlays' objects, which are the chart's with their values.

`python -m tests.k8s.chart` writes them anew; it needs helm. Each file begins with a digest of what it was made from, so
that a chart that has changed since is found without helm.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT

CHART = ROOT / "k8s" / "chart"
OVERLAYS = ("cpu-demo", "gpu-spot", "s3")


def rendered(overlay: str | None = None, *values: str, release: str = "swiftbatch") -> list[dict[str, Any]]:
    """The chart's objects, with an overlay's values or the chart's own, and single `values` (NAME=VALUE)."""
    command = ["helm", "template", release, str(CHART), "--namespace", "swiftbatch"]
    if overlay is not None:
        command += ["--values", str(values_file(overlay))]
    for value in values:
        command += ["--set", value]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if process.returncode:
        raise ValueError(process.stderr)
    return [each for each in yaml.safe_load_all(process.stdout) if each is not None]


def values_file(overlay: str) -> Path:
    return ROOT / "k8s" / "overlays" / overlay / "values.yaml"


def objects_file(overlay: str) -> Path:
    return ROOT / "k8s" / "overlays" / overlay / "objects.yaml"


def digest(overlay: str) -> str:
    """The SHA-256 of all that an overlay's objects are made from. Dashboards and alerts are not among them."""
    sources = [*sorted((CHART / "templates").iterdir()), CHART / "values.yaml", values_file(overlay)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def head_line(overlay: str) -> str:
    return f"# Of k8s/chart with values.yaml, by `python -m tests.k8s.chart`; made from {digest(overlay)}\n"


def write(overlay: str) -> None:
    """Write an overlay's objects: they have no namespace, kustomize gives them one."""
    text = yaml.safe_dump_all(rendered(overlay), sort_keys=False, width=120)
    objects_file(overlay).write_text(head_line(overlay) + text, encoding="utf-8")


if __name__ == "__main__":
    assert shutil.which("helm"), "helm is not there: https://helm.sh/docs/intro/install"
    for each in OVERLAYS:
        write(each)
