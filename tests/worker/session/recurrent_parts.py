"""A tiny model whose layers have states in a folder of its own, for tests of sessions."""

from __future__ import annotations

from pathlib import Path

from swiftbatch.worker.training.target.training import train_tokenizer
from tests.worker.model.kind_parts import tiny_config, tiny_model


def save_recurrent_model(folder: Path, kind: str = "qwen3_5_text") -> Path:
    """Write a random model and a tokenizer of 300 entries."""
    tokenizer = train_tokenizer(["the quick brown fox jumps over the lazy dog. " * 20], 300)
    config = tiny_config(kind)
    config.vocab_size, config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    tiny_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
