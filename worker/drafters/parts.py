"""The trained parts that engines need: where they lie and whose they are, without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

from worker.model.files import (
    DRAFT_FOLDER,
    GRIFFIN_FILE,
    HEADS_FILE,
    ModelError,
    ModelFiles,
    locate_model,
    model_folder,
)

FINGERPRINT = "model_fingerprint"  # in a part's safetensors header: of the model that it was trained for


def check_parts(engine: str, model: str, model_fingerprint: str, draft_model: str | None) -> None:
    """Raise ModelError, with what to do, where an engine's part is missing or does not fit the model."""
    if engine in TRAINED_PARTS:
        TRAINED_PARTS[engine](engine, model, model_fingerprint, draft_model)


def draft_folder(model_path: Path, draft_model: Path | None) -> Path:
    """Folder of a target's draft model: the one named, or `draft` in it or beside the target's own weights."""
    inside = (draft_model or model_path) / DRAFT_FOLDER
    return inside if draft_model is None or inside.is_dir() else draft_model


def _check_heads(engine: str, model: str, model_fingerprint: str, draft_model: str | None) -> None:
    _check_file(engine, "tokenswift", HEADS_FILE, model, model_fingerprint, draft_model)


def _check_griffin(engine: str, model: str, model_fingerprint: str, draft_model: str | None) -> None:
    _check_file(engine, "griffin", GRIFFIN_FILE, model, model_fingerprint, draft_model)


def _check_file(engine: str, kind: str, name: str, model: str, model_fingerprint: str, draft_model: str | None) -> None:
    path = Path(draft_model or model_folder(model)) / name
    advice = _advice(kind, model)
    if not path.is_file():
        raise ModelError(f"engine {engine}: no file {path}; {advice}")
    found = trained_for(path)
    if found != model_fingerprint:
        raise ModelError(
            f"engine {engine}: {path} belongs to a model with fingerprint {found[:12]}, {model} has "
            f"{model_fingerprint[:12]}; {advice}"
        )


def _check_draft_model(engine: str, model: str, model_fingerprint: str, draft_model: str | None) -> None:
    target = locate_model(model)
    folder = draft_folder(target.path, None if draft_model is None else Path(draft_model))
    if not (folder / "config.json").is_file():
        raise ModelError(f"engine {engine}: no draft model in {folder}; {_advice('draft', model)}")
    check_vocabulary(target, locate_model(str(folder)))


def check_vocabulary(target: ModelFiles, draft: ModelFiles) -> None:
    """Raise ModelError where a draft model's tokens are not the target's."""
    if draft.vocab_size == target.vocab_size and _tokens(draft.path) in (None, _tokens(target.path)):
        return
    raise ModelError(
        f"draft model {draft.path}: its vocabulary ({draft.vocab_size:,} tokens) is not that of {target.name} "
        f"({target.vocab_size:,} tokens); a draft model needs the same one: {_advice('draft', target.name)}"
    )


def _tokens(folder: Path) -> object:
    """Tokens and their ids as `tokenizer.json` has them; None where there is no such file. Raises ModelError."""
    path = folder / "tokenizer.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"] if path.is_file() else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} has no vocabulary that can be read: {type(error).__name__}; copy it again") from error


def _advice(kind: str, model: str) -> str:
    return (
        f"train it with `swiftbatch train {kind} --model {model} --data DIR --output DIR` "
        "and name that folder with --draft-model"
    )


def trained_for(path: Path) -> str:
    """The fingerprint in a safetensors header. Raises ModelError where there is none to be read."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size)) if size < path.stat().st_size else {}
        return str(header["__metadata__"][FINGERPRINT])
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(f"{path}: no safetensors file with a `{FINGERPRINT}`; train it anew") from error


TRAINED_PARTS: dict[str, Callable[[str, str, str, str | None], None]] = {
    "tokenswift": _check_heads,
    "tokenswift-paper": _check_heads,
    "triforce": _check_draft_model,
    "griffin": _check_griffin,
    "griffin-paper": _check_griffin,
}
"""How the parts of an engine are checked; engines that are not here have none."""
