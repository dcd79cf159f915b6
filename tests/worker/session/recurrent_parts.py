"""A tiny model of a kind, for tests of sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swiftbatch.worker.training.train_target import train_tokenizer
from tests.worker.model.kind_parts import save_tiny, tiny_config


def save_recurrent_model(folder: Path, kind: str = "qwen3_5_text", **changes: Any) -> Path:
    """Fit the kernels; `changes` are the config's."""
    tokenizer = train_tokenizer(["the quick brown fox jumps over the lazy dog. " * 20], 300)
    config = tiny_config(kind, has_wide_heads=True)
    config.vocab_size, config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    config.update(changes)
    save_tiny(config, folder)
    tokenizer.save_pretrained(folder)
    return folder
