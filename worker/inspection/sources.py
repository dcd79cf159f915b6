"""The small files of a model, and what the heads of its weights say: from a folder, or a few KB from the hub."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.files import CONFIG_FILES, EMBEDDED, hub_snapshot, model_folder
from swiftbatch.worker.model.gguf.links import SUFFIX
from swiftbatch.worker.model.stored import forms_in

SMALL_FILES = ("*config.json", "*.index.json", "*.jinja", "chat_template*.json")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the head of its file describes it: `dtype` in safetensors' words."""

    dtype: str
    num_numbers: int


@dataclass(frozen=True)
class Source:
    """A model before its weights are read. `tensors` is None where no weights are known."""

    name: str
    path: Path
    tensors: Mapping[str, StoredTensor] | None


def source_of(model: str) -> Source:
    """Find `embedded`, a folder or a hub id. Raises ModelError for one that is neither."""
    path = EMBEDDED if model == "embedded" else Path(model)
    if path.suffix == SUFFIX and path.is_file():
        path = model_folder(model, CONFIG_FILES)
    if path.is_dir():
        return Source(model, path, _stored_in(path))
    return Source(model, hub_snapshot(model, SMALL_FILES), _stored_on_hub(model))


def _stored_in(path: Path) -> Mapping[str, StoredTensor] | None:
    files = [file for file in weight_files(path) if file.is_file()]
    found: dict[str, StoredTensor] = {}
    for file in files:
        try:
            found |= {name: _tensor(dtype, shape) for name, (dtype, shape) in forms_in(file).items()}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model {path}: {file} is damaged or cut off ({error}); copy it again") from None
    return found or None


def _stored_on_hub(model: str) -> Mapping[str, StoredTensor] | None:
    """The heads of the files on the hub, by requests of their first bytes; None where it has none or can't be asked."""
    from huggingface_hub import get_safetensors_metadata

    try:
        files = get_safetensors_metadata(model).files_metadata.values()
    except Exception:  # the hub's client raises many kinds; each means: not to be had
        return None
    return {name: _tensor(each.dtype, each.shape) for file in files for name, each in file.tensors.items()}


def _tensor(dtype: Any, shape: Sequence[int]) -> StoredTensor:
    return StoredTensor(str(dtype), math.prod(shape))
