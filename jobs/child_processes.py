"""Commands for Python processes that run the code of this one: with `-m` alone the current folder's comes first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import swiftbatch

INSTALLED = ("site-packages", "dist-packages")  # which every Python knows by itself


def module_command(module: str, *arguments: str) -> list[str]:
    """A command that runs a module of this program; it needs `environment_of_code`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment_of_code() -> dict[str, str]:
    """This process's environment, in which a checkout that nobody has installed is found, too."""
    root = Path(swiftbatch.__file__).resolve().parents[1]
    if root.name in INSTALLED:
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])}
