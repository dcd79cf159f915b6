"""The small files of a model, and what the heads of its weights say: from a folder, or a few KB from the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.files import CONFIG_FILES, EMBEDDED, hub_snapshot, model_folder
from swiftbatch.worker.model.formats.contract import FormatError, StoredTensor
from swiftbatch.worker.model.formats.layout import heads_in
from swiftbatch.worker.model.gguf.links import SUFFIX

SMALL_FILES = ("*config.json", "*.index.json", "*.jinja", "chat_template*.json")


@dataclass(frozen=True)
class Source:
    """A model before its weights are read. `tensors` is None where no weights are known."""

    name: str
    path: Path
    tensors: tuple[tuple[str, StoredTensor], ...] | None  # by their stored names


def source_of(model: str) -> Source:
    """Find `embedded`, a folder or a hub id. Raises ModelError for one that is neither."""
    path = EMBEDDED if model == "embedded" else Path(model)
    if path.suffix == SUFFIX and path.is_file():
        path = model_folder(model, CONFIG_FILES)
    if path.is_dir():
        return Source(model, path, _stored_in(path))
    return Source(model, hub_snapshot(model, SMALL_FILES), _stored_on_hub(model))


def _stored_in(path: Path) -> tuple[tuple[str, StoredTensor], ...] | None:
    files = [file for file in weight_files(path) if file.is_file()]
    try:
        return tuple(pair for file in files for pair in heads_in(file).items()) or None
    except FormatError as error:
        raise ModelError(f"model {path}: {error}") from None


def _stored_on_hub(model: str) -> tuple[tuple[str, StoredTensor], ...] | None:
    """The heads of the files on the hub, by requests of their first bytes; None where it has none or can't be asked."""
    from huggingface_hub import get_safetensors_metadata

    try:
        files = get_safetensors_metadata(model).files_metadata.values()
    except Exception:  # the hub's client raises many kinds; each means: not to be had
        return None
    return tuple(
        (name, StoredTensor(str(each.dtype), tuple(each.shape)))
        for file in files
        for name, each in file.tensors.items()
    )
