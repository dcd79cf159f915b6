"""The folder in the user's cache that makes a GGUF file a model folder: small derived files, and links to weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.model.config_values import line_of
from swiftbatch.worker.model.gguf.gguf_config import config_of
from swiftbatch.worker.model.gguf.gguf_model import (
    FREQUENCIES,
    INDEX_FILE,
    GGUFModel,
    link_name,
    read_gguf,
    transformers_name,
    write_index,
)
from swiftbatch.worker.model.gguf.gguf_tokenizer import (
    TOKENIZER_FILES,
    generation_of,
    refuse_unknown_split,
    save_tokenizer,
)
from swiftbatch.worker.model.gguf.header import GGUFError

FORM = 2  # version of the derived files
NAME_LENGTH = 32
MAX_WORDS = 500  # characters of an error
LIBRARIES = ("transformers", "tokenizers")  # versions of these affect the tokenizer's files


def gguf_folder(model: str, file: Path, with_tokenizer: bool) -> Path:
    """Return the folder of the model whose first weight file is `file`. Raises ModelError."""
    try:
        read = read_gguf(file)
        folder = _base() / _key(read)
        if not (folder / INDEX_FILE).exists():
            _refuse_unknown_tensors(read)
            refuse_unknown_split(read)
            with _made_whole(folder) as aside:
                _write_small_files(read, aside)
    except GGUFError as error:
        raise ModelError(f"model {model}: {file} is no GGUF file that runs here: {line_of(error, MAX_WORDS)}") from None
    except OSError as error:
        raise ModelError(
            f"model {model}: its small files can't be kept in {_base()} ({error}); set XDG_CACHE_HOME"
        ) from None
    if with_tokenizer and not all((folder / name).exists() for name in TOKENIZER_FILES):
        _add_tokenizer(model, folder, read)
    return folder


def _base() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftbatch" / "gguf"


def _key(model: GGUFModel) -> str:
    """Return a hash of everything that determines the content of the folder."""
    parts = [FORM, *map(version, LIBRARIES), *(head.sha256 for head in model.heads), *map(os.path.abspath, model.files)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:NAME_LENGTH]


def _refuse_unknown_tensors(model: GGUFModel) -> None:
    for name in model.tensors:
        if name != FREQUENCIES:
            transformers_name(name, model.form)


def _write_small_files(model: GGUFModel, folder: Path) -> None:
    _write_json(folder / "config.json", config_of(model))
    _write_json(folder / "generation_config.json", generation_of(model))
    if isinstance(template := model.metadata.get("tokenizer.chat_template"), str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    links = {link_name(number, len(model.files)): file for number, file in enumerate(model.files)}
    for name, file in links.items():
        (folder / name).symlink_to(os.path.abspath(file))
    write_index(folder, model.name, list(links))


@contextlib.contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` at the end unless another process was faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield aside
        with contextlib.suppress(OSError):
            aside.rename(folder)
        if not folder.is_dir():
            raise OSError(f"{folder} can't be made")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _add_tokenizer(model: str, folder: Path, read: GGUFModel) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as aside:
        try:
            save_tokenizer(read, Path(aside))
        except Exception as error:  # any kind: the library raises plain exceptions
            said = f"{type(error).__name__}: {line_of(error, MAX_WORDS)}"
            raise ModelError(f"model {model}: no tokenizer comes of its metadata: {said}") from error
        for name in TOKENIZER_FILES:
            os.replace(Path(aside) / name, folder / name)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
