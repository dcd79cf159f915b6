"""Finds faults in a model's folder, by its small files and the heads of its weights. No torch: the driver asks.

`transformers` takes much of this in silence, and runs another model than the one that is meant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swiftbatch.worker.model.config_value_rules import shown
from swiftbatch.worker.model.gguf.links import link_names

ADAPTER_FILE = "adapter_config.json"
GENERATION_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def adapter_fault(path: Path) -> str | None:
    """Say that a folder holds an adapter, which has no config of its own most often; None for any other."""
    if (path / ADAPTER_FILE).exists():
        return f"{path / ADAPTER_FILE} says that it is an adapter; merge it into its base model, and give that folder"
    return None


def folder_fault(path: Path) -> str | None:
    """Say what beside `config.json` makes a folder another model than it seems; None where nothing does."""
    if fault := small_files_fault(path) or _shards_fault(path):
        return fault
    if weight_names(path):
        return None
    return f"no model.safetensors in {path}, nor an index; other weights are not loaded"


def small_files_fault(path: Path) -> str | None:
    """Say the same of the small files alone, where the weights are not there to be looked at."""
    return _generation_fault(path) or _index_fault(path)


def _generation_fault(path: Path) -> str | None:
    """`transformers` passes over a file that it cannot read, and with it over the tokens that end a text."""
    file = path / GENERATION_FILE
    if not file.exists():
        return None
    settings, fault = _json_object(file)
    return fault or eos_fault(str(file), settings)


def eos_fault(source: str, settings: Mapping[str, Any]) -> str | None:
    """Say that the tokens which end a text are none."""
    eos = settings.get("eos_token_id")
    if eos is None or all(type(each) is int for each in (eos if isinstance(eos, list) else [eos])):
        return None
    return f"{source} has eos_token_id = {eos!r:.80}; expected a token id or a list of them"


def weight_names(path: Path) -> set[str]:
    """Names of the files that hold a folder's weights; none where neither a single file nor a sound index is there."""
    if links := link_names(path):
        return set(links)
    if (path / SINGLE_FILE).exists():
        return {SINGLE_FILE}
    index, _ = _json_object(path / INDEX_FILE)
    shards = index.get("weight_map")
    return set(map(str, shards.values())) if isinstance(shards, dict) else set()


def _index_fault(path: Path) -> str | None:
    """Say that an index which counts is none."""
    file = path / INDEX_FILE
    if (path / SINGLE_FILE).exists() or not file.exists():
        return None
    _, fault = _json_object(file)
    if fault:
        return fault
    return None if weight_names(path) else f"{file} has no `weight_map` from tensors to files; copy it again"


def _shards_fault(path: Path) -> str | None:
    """An index may name files of other folders, which no fingerprint covers."""
    if (path / SINGLE_FILE).exists() or not (path / INDEX_FILE).exists():
        return None
    for name in sorted(weight_names(path)):
        if Path(name).name != name or not _is_file(path / name):
            return f"{path / INDEX_FILE} names {shown(name)}, which is no file of this folder; copy all files again"
    return None


def _is_file(file: Path) -> bool:
    """Tell whether it is one; no name that the file system cannot have is."""
    try:
        return file.is_file()
    except (OSError, ValueError):
        return False


def _json_object(file: Path) -> tuple[dict[str, Any], str | None]:
    """A file's object, or what is wrong with it."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{file} cannot be read: {error}"
    return (value, None) if isinstance(value, dict) else ({}, f"{file} is no JSON object")
