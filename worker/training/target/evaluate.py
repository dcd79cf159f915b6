"""The scores of a target model on unseen books: bits per byte, and loss by position up to 100,000 tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftbatch.worker.target.loading import resolve_device
from swiftbatch.worker.training.corpus import encode_books, read_books
from swiftbatch.worker.training.target.training_attention import ATTENTION_NAME

STRETCH = 100_000  # tokens of concatenated books that one forward sees
POSITION_RANGES = ((0, 2048), (2048, 8192), (8192, 32_768), (32_768, 100_000))
LOGIT_CHUNK = 4096  # positions whose logits are held at once
NEAR = 2048  # tokens that are surely read in front of a token where the rest of the text is left out


@dataclass(frozen=True)
class Evaluation:
    """Figures over the whole stretches of the test books."""

    num_stretches: int
    num_tokens: int
    bits_per_byte: float
    loss_by_position: dict[str, float]  # range -> nats per token
    near_loss_by_position: dict[str, float]  # the same without the far text, to see what that is worth, or costs


def evaluate_target(model_folder: Path, test_file: Path, max_stretches: int) -> Evaluation:
    """Score concatenated test books in stretches of 100,000 tokens, each in one forward from position 0.

    And once more with nothing but the newest tokens in front of each.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.bfloat16, use_safetensors=True, local_files_only=True
    ).eval()
    model.to(resolve_device("auto"))
    model.set_attn_implementation(ATTENTION_NAME)
    first = np.array([tokenizer.bos_token_id])
    books = encode_books(list(read_books(test_file)), tokenizer)
    stream = np.concatenate([part for book in books for part in (first, book.astype(np.int64))])
    num_stretches = min(max_stretches, len(stream) // STRETCH)
    if num_stretches < 1:
        raise ValueError(f"{test_file}: {len(stream):,} tokens; expected {STRETCH:,} at least to score long positions")
    parts = stream[: num_stretches * STRETCH].reshape(num_stretches, STRETCH)
    stretches = [torch.from_numpy(np.concatenate([first, part])) for part in parts]
    losses = torch.stack([position_losses(model, stretch) for stretch in stretches])  # [num_stretches, STRETCH]
    near_losses = torch.stack([near_position_losses(model, stretch) for stretch in stretches])
    num_bytes = sum(len(tokenizer.decode(stretch[1:]).encode()) for stretch in stretches)
    bits_per_byte = round(float(losses.sum()) / math.log(2) / num_bytes, 4)
    return Evaluation(num_stretches, losses.numel(), bits_per_byte, _by_position(losses), _by_position(near_losses))


def _by_position(losses: torch.Tensor) -> dict[str, float]:
    """Means over ranges of `losses [num_stretches, length]`."""
    return {f"{a}-{b}": round(float(losses[:, a:b].mean()), 4) for a, b in POSITION_RANGES}


@torch.inference_mode()
def position_losses(model: torch.nn.Module, stretch: torch.Tensor) -> torch.Tensor:
    """Loss in nats of every token after the first, `[length]`, for one stretch `[length + 1]`."""
    stretch = stretch.to(model.device)  # type: ignore[arg-type]
    hidden = model.model(input_ids=stretch[None, :-1], use_cache=False).last_hidden_state[0]  # type: ignore[operator]
    losses = [
        cross_entropy(model.lm_head(hidden[i : i + LOGIT_CHUNK]).float(), targets, reduction="none")  # type: ignore[operator]
        for i, targets in zip(range(0, len(hidden), LOGIT_CHUNK), stretch[1:].split(LOGIT_CHUNK), strict=True)
    ]
    return torch.cat(losses).cpu()


def near_position_losses(model: torch.nn.Module, stretch: torch.Tensor) -> torch.Tensor:
    """`position_losses` where only the first token and the newest `NEAR` to 2 `NEAR` - 1 are read, from position 0."""
    first, losses = stretch[:1], []
    for start in range(0, len(stretch) - 1, NEAR):
        end = min(start + NEAR, len(stretch) - 1)
        window = stretch[max(1, start - NEAR + 1) : end + 1]
        losses.append(position_losses(model, torch.cat([first, window]))[-(end - start) :])
    return torch.cat(losses)
