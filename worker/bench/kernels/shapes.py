"""Shapes of published models, to be measured with weights of zeros: no weights need to be there."""

from __future__ import annotations

import torch

from swiftbatch.worker.kernels.decoder_weights import DecoderSizes

SHAPES = {  # num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151_936),
    "llama-3.1-8b": (32, 4096, 32, 8, 128, 14_336, 128_256),
}


def sizes_named(name: str, dtype: torch.dtype) -> DecoderSizes:
    """The sizes of a decoder of that name."""
    counts = SHAPES[name]
    return DecoderSizes(*counts, epsilon=1e-6, scale=counts[4] ** -0.5, dtype=dtype)
