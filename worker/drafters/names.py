"""Names of the engines and what they need, importable without torch."""

import os

from worker.model_files import HEADS_FILE, ModelError, model_folder

ENGINE_NAMES = (
    "autoregressive",
    "prompt-lookup",
    "suffix",
    "token-recycling",
    "token-recycling-static",
    "token-recycling-static-80",
    "token-recycling-no-noise",
    "tokenswift",
    "tokenswift-paper",
)
TRAINED_PARTS = {"tokenswift": HEADS_FILE, "tokenswift-paper": HEADS_FILE}
"""The file that an engine needs, beside the model's weights or in its draft model's folder."""

DEFAULT_ENGINE = "token-recycling"


def check_parts(engine: str, model: str, draft_model: str | None) -> None:
    """Raise ModelError, with what to do, where an engine's trained parts are missing."""
    part = TRAINED_PARTS.get(engine)
    folder = draft_model or str(model_folder(model))
    if part is not None and not os.path.isfile(os.path.join(folder, part)):
        raise ModelError(
            f"engine {engine}: {folder} has no {part}; train it with `swiftbatch train tokenswift --model {model} "
            f"--data DIR --output DIR` and name that folder with --draft-model"
        )
