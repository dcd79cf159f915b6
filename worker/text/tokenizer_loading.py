"""A model's tokenizer, loaded with the class that its files need."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from swiftbatch.worker.model.architectures.catalogue import architecture_of
from swiftbatch.worker.model.digests import TEKKEN_FILE, has_tekken_alone
from swiftbatch.worker.model.gguf.gguf_model import link_names
from swiftbatch.worker.model.model_files import ModelFiles, read_config
from swiftbatch.worker.text.tekken import TekkenTokenizer

PIECES_FILE = "tokenizer.model"  # models of 2023 may have only this tokenizer
GENERIC = "TokenizersBackend"  # adds no rules to `tokenizer.json`
ABOUT_CONFIGS = ("transformers.configuration_utils", "transformers.modeling_rope_utils")  # loggers
OLD_GENERIC = "PreTrainedTokenizerFast"  # its name before transformers 5; AutoTokenizer asks a model's class about it


def loaded_tokenizer(files: ModelFiles) -> Any:
    """Return the loaded tokenizer, without dropout.

    Raises ImportError if a library is missing, and whatever the library raises.
    """
    if _lacks_sentencepiece(files):
        raise ImportError(
            f"its only tokenizer is {PIECES_FILE}, which the library sentencepiece reads, and sentencepiece is not "
            "installed here; install swiftbatch with its extra `sentencepiece`"
        )
    return _without_dropout(_loaded(files))


def _lacks_sentencepiece(files: ModelFiles) -> bool:
    is_alone = (files.path / PIECES_FILE).is_file() and not (files.path / "tokenizer.json").is_file()
    return is_alone and not has_tekken_alone(files.path) and find_spec("sentencepiece") is None


def _loaded(files: ModelFiles) -> Any:
    if has_tekken_alone(files.path):
        return TekkenTokenizer(files.path)
    # with mistral-common, AutoTokenizer would prefer Mistral's file
    said = {"mistral_format": False} if (files.path / TEKKEN_FILE).is_file() else {}
    loader = _loader(files)
    with _silent_about_configs():
        return loader.from_pretrained(
            files.path, trust_remote_code=False, local_files_only=True, clean_up_tokenization_spaces=False, **said
        )


@contextmanager
def _silent_about_configs() -> Iterator[None]:
    """Hide warnings about a model's config: AutoTokenizer reads it as one of an unknown class."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ABOUT_CONFIGS)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _loader(files: ModelFiles) -> Any:
    """Return the tokenizer's class. Avoids AutoTokenizer if possible, which loads torch (seconds, and 300 MB)."""
    config = read_config(files.name, files.path)
    path = files.path / "tokenizer_config.json"
    said = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    form = architecture_of(config)
    is_plain = form is not None and (form.has_plain_tokenizer or bool(link_names(files.path)))  # as of GGUF files
    generic = (GENERIC, OLD_GENERIC) if form is not None and form.lacks_class else (GENERIC,)
    if is_plain and said.get("tokenizer_class") in generic and "auto_map" not in said:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _without_dropout(tokenizer: Any) -> Any:
    """Disable BPE dropout, which splits texts randomly. Raises ValueError if that is impossible."""
    if getattr(tokenizer, "sp_model_kwargs", {}).get("enable_sampling"):
        raise ValueError("it cuts texts at random (sp_model_kwargs in tokenizer_config.json: enable_sampling)")
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if getattr(model, "dropout", None):
        model.dropout = None
    return tokenizer
