"""Scores a target model on unseen books, and measures its use of far text.

The use of far text is measured by losses by window length, and by passages that return.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftbatch.worker.forward.hardware import resolve_device
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.training.corpus import read_books
from swiftbatch.worker.training.training_layers import ATTENTION_NAME, use_chunks
from swiftbatch.worker.training.training_texts import encode_books

STRETCH = 100_000  # tokens of concatenated books per forward
POSITION_RANGES = ((0, 2048), (2048, 8192), (8192, 32_768), (32_768, 100_000))
LOGIT_CHUNK = 4096  # positions whose logits are in memory at the same time
NEAR = 2048  # least number of tokens that the near view has before each token
WINDOWS = (512, 2048, 8192, 32_768)  # window lengths to compare
SCORED_FROM = 32_768  # tokens of the book before the first scored one
NUM_SCORED = 256
NUM_PLACES = 24
DISTANCES = (1024, 8192, 30_000)
NUM_NEEDLES = 24
NEEDLE = 16
CUE = 8  # tokens of a passage that are repeated, after which the model should continue it


@dataclass(frozen=True)
class Evaluation:
    """Figures over the whole stretches of the test books."""

    num_stretches: int
    num_tokens: int
    bits_per_byte: float
    loss_by_position: dict[str, float]  # range of positions -> nats per token
    near_loss_by_position: dict[str, float]  # the same without far text, for comparison


def evaluate_target(model_folder: Path, test_file: Path, max_stretches: int) -> Evaluation:
    """Score test books in stretches of 100,000 tokens, and again without far text."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.bfloat16, use_safetensors=True, local_files_only=True
    ).eval()
    model.to(resolve_device("auto"))
    model.set_attn_implementation(ATTENTION_NAME)
    use_chunks(model)
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
    return {f"{a}-{b}": round(float(losses[:, a:b].mean()), 4) for a, b in POSITION_RANGES}


@torch.inference_mode()
def position_losses(model: torch.nn.Module, stretch: torch.Tensor) -> torch.Tensor:
    """Return the loss in nats of each token after the first, for a stretch `[length + 1]`."""
    stretch = stretch.to(model.device)  # type: ignore[arg-type]
    hidden = model.model(input_ids=stretch[None, :-1], use_cache=False).last_hidden_state[0]  # type: ignore[operator]
    losses = [
        cross_entropy(model.lm_head(hidden[i : i + LOGIT_CHUNK]).float(), targets, reduction="none")  # type: ignore[operator]
        for i, targets in zip(range(0, len(hidden), LOGIT_CHUNK), stretch[1:].split(LOGIT_CHUNK), strict=True)
    ]
    return torch.cat(losses).cpu()


def near_position_losses(model: torch.nn.Module, stretch: torch.Tensor) -> torch.Tensor:
    """Return `position_losses` if the model sees only the first token and the last `NEAR` to 2 * `NEAR` - 1 tokens."""
    first, losses = stretch[:1], []
    for start in range(0, len(stretch) - 1, NEAR):
        end = min(start + NEAR, len(stretch) - 1)
        window = stretch[max(1, start - NEAR + 1) : end + 1]
        losses.append(position_losses(model, torch.cat([first, window]))[-(end - start) :])
    return torch.cat(losses)


@dataclass(frozen=True)
class LongContext:
    """Figures on unseen texts."""

    loss_by_window: dict[str, float]  # window length -> nats per token
    continued_by_distance: dict[str, float]  # share of a returning passage's tokens that are the likeliest


def measure_long_context(target: TargetModel, books: Sequence[np.ndarray], first_token_id: int) -> LongContext:
    """Measure on whole books' token ids without the first token."""
    random = np.random.default_rng(0)
    stream = np.concatenate(books).astype(np.int64)
    passages = _passages(books, random)
    losses = {f"{window}": _loss(target, passages, window, first_token_id) for window in WINDOWS}
    rates = {f"{distance}": _continued(target, stream, distance, first_token_id, random) for distance in DISTANCES}
    return LongContext(losses, rates)


def _passages(books: Sequence[np.ndarray], random: np.random.Generator) -> list[np.ndarray]:
    """Return passages of `SCORED_FROM + NUM_SCORED` tokens, of single books if these are long enough."""
    length = SCORED_FROM + NUM_SCORED
    long = [book for book in books if len(book) >= length] or [np.concatenate(books)]
    chosen = (long[int(random.integers(len(long)))] for _ in range(NUM_PLACES))
    starts = ((book, int(random.integers(0, len(book) - length + 1))) for book in chosen)
    return [book[start : start + length].astype(np.int64) for book, start in starts]


def _loss(target: TargetModel, passages: list[np.ndarray], window: int, first_token_id: int) -> float:
    """Return the mean loss of the passages' last tokens, with at least `window` tokens before each."""
    losses = []
    for passage in passages:
        text = np.concatenate([[first_token_id], passage[-window - NUM_SCORED :]])
        logits = logits_of_last(target, text[:-1].tolist(), NUM_SCORED)
        losses.append(float(cross_entropy(logits, torch.from_numpy(text[-NUM_SCORED:]))))
    return round(float(np.mean(losses)), 4)


def _continued(
    target: TargetModel, stream: np.ndarray, distance: int, first_token_id: int, random: np.random.Generator
) -> float:
    """Return the share of right tokens in passages that return after `distance` tokens."""
    right = 0
    for _ in range(NUM_NEEDLES):
        start = int(random.integers(0, len(stream) - distance))
        elsewhere = int(random.integers(0, len(stream) - NEEDLE))
        needle = stream[elsewhere : elsewhere + NEEDLE]
        text = np.concatenate([[first_token_id], needle, stream[start : start + distance - NEEDLE], needle])
        logits = logits_of_last(target, text[:-1].tolist(), NEEDLE - CUE)
        right += int((logits.argmax(dim=-1).numpy() == needle[CUE:]).sum())
    return round(right / (NUM_NEEDLES * (NEEDLE - CUE)), 4)


def logits_of_last(target: TargetModel, token_ids: list[int], num_rows: int) -> torch.Tensor:
    """Return logits `[num_rows, vocab] float32` after the last rows of a text."""
    cache = target.new_cache(len(token_ids))
    rows: list[torch.Tensor] = []
    while cache.length < len(token_ids):
        start = cache.length
        hidden = target.read(cache, token_ids[start:])
        kept = max(0, len(token_ids) - num_rows - start)
        rows.append(hidden[kept:])
    return target.logits(torch.cat(rows)[-num_rows:]).cpu()
