"""A tiny model with gated delta nets in a folder of its own, for tests of sessions."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swiftbatch.worker.training.target.training import train_tokenizer
from tests.worker.model.kind_parts import RECURRENT, SIZES


def save_recurrent_model(folder: Path) -> Path:
    """Write a random model of Qwen3.5's kind and a tokenizer of 300 entries."""
    tokenizer = train_tokenizer(["the quick brown fox jumps over the lazy dog. " * 20], 300)
    torch.manual_seed(0)
    sizes = SIZES | RECURRENT | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
