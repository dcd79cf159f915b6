"""The trained parts that engines need: where they lie and whose they are, without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from worker.model_files import HEADS_FILE, ModelError, model_folder

FINGERPRINT = "model_fingerprint"  # in a part's safetensors header: of the model that it was trained for
TRAINED_PARTS = {"tokenswift": HEADS_FILE, "tokenswift-paper": HEADS_FILE}


def check_parts(engine: str, model: str, model_fingerprint: str, draft_model: str | None) -> None:
    """Raise ModelError, with what to do, where an engine's part is missing or another model's."""
    if engine not in TRAINED_PARTS:
        return
    path = Path(draft_model or model_folder(model)) / TRAINED_PARTS[engine]
    advice = (
        f"train it with `swiftbatch train tokenswift --model {model} --data DIR --output DIR` "
        "and name that folder with --draft-model"
    )
    if not path.is_file():
        raise ModelError(f"engine {engine}: no file {path}; {advice}")
    found = trained_for(path)
    if found != model_fingerprint:
        raise ModelError(
            f"engine {engine}: {path} belongs to a model with fingerprint {found[:12]}, {model} has "
            f"{model_fingerprint[:12]}; {advice}"
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
