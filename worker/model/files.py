"""Where a model's files lie and what they are, without loading them."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.errors import UserError
from worker.model.faults import (
    GENERATION_FILE,
    INDEX_FILE,
    config_fault,
    folder_fault,
    weight_names,
    weights_fault,
)
from worker.model.kinds import SUPPORTED_KINDS, what_it_lacks

EMBEDDED = Path(__file__).parent.parent / "embedded"
PARTS_FOLDER = "parts"  # in a model's folder, what engines draft with; a folder, since other programs read all weights
HEADS_FILE = "tokenswift_heads.safetensors"
GRIFFIN_FILE = "griffin.safetensors"
DRAFT_FOLDER = "draft"  # a small model with the same vocabulary
HASHED_FIRST = ("config.json", GENERATION_FILE, INDEX_FILE, "tokenizer.json", "tokenizer_config.json")
TEXT_FILES = (
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*vocab*",
    "*merges*",
    "*token*.json",
    "chat_template*.json",
    "*chat_templates/**/*",
)


class ModelError(UserError):
    """A model that cannot be found, read or used."""


@dataclass(frozen=True)
class ModelFiles:
    """A model folder with `config.json`, safetensors weights and a tokenizer."""

    name: str
    path: Path
    fingerprint: str  # SHA-256 over config, tokenizer and weights: what drafts are trained for
    text_fingerprint: str  # SHA-256 over all else that makes tokens of a text
    max_positions: int
    vocab_size: int


def locate_model(model: str) -> ModelFiles:
    """Find `embedded`, a folder, or a hub id's local snapshot (downloaded where the hub can be reached).

    Raises ModelError with one line that says what was looked for, also for a kind of model that does not run here.
    """
    path = model_folder(model)
    config = read_config(model, path)
    if lack := what_it_lacks(config):
        raise ModelError(f"model {model}: {lack}; kinds that run here: {', '.join(SUPPORTED_KINDS)}")
    if fault := config_fault(config) or folder_fault(path):
        raise ModelError(f"model {model}: {fault}")
    weights = weight_files(path)
    if not weights:
        raise ModelError(f"model {model}: no model.safetensors in {path}, nor an index; other weights are not loaded")
    for file in weights:
        if fault := weights_fault(file):
            raise ModelError(f"model {model}: {fault}")
    fingerprint = _fingerprint(path, [path / name for name in HASHED_FIRST] + weights)
    text_fingerprint = _fingerprint(path, text_files(path))
    positions, vocab_size = config["max_position_embeddings"], config["vocab_size"]
    return ModelFiles(model, path, fingerprint, text_fingerprint, positions, vocab_size)


def weight_files(path: Path) -> list[Path]:
    """The files of a model that hold its weights, of a folder without `folder_fault`; what else lies there is not read.

    As `transformers` chooses: the single file, else those that the index names.
    """
    return sorted(path / name for name in weight_names(path))


def text_files(path: Path) -> list[Path]:
    """The files of a model that make tokens of a text and are not in its `fingerprint`: chat templates among them."""
    found = {file for pattern in TEXT_FILES for file in path.glob(pattern)}
    return sorted(file for file in found if file.name not in HASHED_FIRST)


def model_folder(model: str) -> Path:
    """The folder of a model's files. Raises ModelError as `locate_model` does."""
    path = EMBEDDED if model == "embedded" else Path(model)
    return path if path.is_dir() else _hub_snapshot(model)


def read_config(model: str, path: Path) -> dict[str, Any]:
    """A model's `config.json`. Raises ModelError where there is none."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model {model}: {path / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"model {model}: {path / 'config.json'} is no JSON object")
    return config


def _hub_snapshot(model: str) -> Path:
    """Resolve a hub id; a name that looks like a path is never asked for on the hub."""
    problem = f"model {model}: neither `embedded`, nor a folder here, nor a model that the hub gives"
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelError(problem)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", *TEXT_FILES]))
    except Exception as error:  # the hub's client raises many kinds; each means: not to be had
        raise ModelError(f"{problem} ({type(error).__name__})") from error


def _fingerprint(path: Path, files: list[Path]) -> str:
    """Hash the files that are there, with their places in the folder."""
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            digest.update(file.relative_to(path).as_posix().encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def let_others_read(path: Path) -> None:
    """Give weights the rights of any other new file: safetensors writes them for their owner alone."""
    os.umask(umask := os.umask(0))
    path.chmod(0o666 & ~umask)


def eos_token_ids_of(files: ModelFiles) -> frozenset[int]:
    """End-of-sequence ids: the generation config's, else the model config's."""
    file = files.path / GENERATION_FILE
    said = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    eos = read_config(files.name, files.path).get("eos_token_id") if said is None else said
    return frozenset([eos] if isinstance(eos, int) else eos or [])
