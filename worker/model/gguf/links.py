"""A folder whose weights lie in GGUF files elsewhere: `gguf.json` names the links to them, and the architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swiftbatch.worker.model.gguf.architectures import ARCHITECTURES, Architecture

SUFFIX = ".gguf"
INDEX_FILE = "gguf.json"


def link_names(folder: Path) -> list[str]:
    """The links of a folder in order; none for any other one, whatever its own file of that name says."""
    try:
        said = _said(folder)
        names = [link_name(number, len(said["files"])) for number in range(len(said["files"]))]
        return names if names == said["files"] and said["architecture"] in ARCHITECTURES else []
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return []


def architecture_of(link: Path) -> Architecture:
    """The architecture of the model that a link belongs to."""
    return ARCHITECTURES[_said(link.parent)["architecture"]]


def write_index(folder: Path, architecture: str, files: list[str]) -> None:
    said = {"architecture": architecture, "files": files}
    (folder / INDEX_FILE).write_text(json.dumps(said) + "\n", encoding="utf-8")


def link_name(number: int, count: int) -> str:
    """The link to one of so many files, by its place alone: a model is the same one under another name."""
    return f"model{SUFFIX}" if count == 1 else f"model-{number + 1:05}-of-{count:05}{SUFFIX}"


def _said(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    return said
