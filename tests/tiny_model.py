"""A random small Llama with heads, draft model and a tokenizer of 300 entries."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig, GriffinModel, save_griffin
from swiftbatch.worker.drafters.tokenswift.decoding_heads import save_heads
from swiftbatch.worker.model.model_files import DRAFT_FOLDER, PARTS_FOLDER, locate_model
from swiftbatch.worker.training.train_target import train_tokenizer


def write_tiny_model(folder: Path, num_layers: int) -> Path:
    """The draft model is its first layer."""
    tokenizer = train_tokenizer(["the quick brown fox jumps over the lazy dog. " * 20], 300)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # as the kernels require
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    parts = folder / PARTS_FOLDER
    for path in (folder, parts / DRAFT_FOLDER):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
    fingerprint = locate_model(str(folder)).fingerprint
    save_heads(parts, 0.02 * torch.randn(3, 64, 64), fingerprint)
    save_griffin(parts, GriffinModel(GriffinConfig.for_target(config)), fingerprint)
    return folder
