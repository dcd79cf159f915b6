"""The scores of a target model on unseen books, and the worth of far text to it.

Scores are bits per byte, and loss by position up to 100,000 tokens. The worth of far text are losses with windows of
several lengths, and passages that come back, by those forwards that swiftbatch decodes with: such a figure holds for
what a user gets."""

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
from swiftbatch.worker.training.training_layers import ATTENTION_NAME, use_chunks
from swiftbatch.worker.training.training_texts import encode_books, read_books

STRETCH = 100_000  # tokens of concatenated books that one forward sees
POSITION_RANGES = ((0, 2048), (2048, 8192), (8192, 32_768), (32_768, 100_000))
LOGIT_CHUNK = 4096  # positions whose logits are held at once
NEAR = 2048  # tokens that are surely read in front of a token where the rest of the text is left out
WINDOWS = (512, 2048, 8192, 32_768)  # newest tokens that are read
SCORED_FROM = 32_768  # tokens of its book in front of the first that is scored
NUM_SCORED = 256  # tokens of one place
NUM_PLACES = 24
DISTANCES = (1024, 8192, 30_000)
NUM_NEEDLES = 24  # for each distance
NEEDLE = 16  # tokens of a passage that comes back
CUE = 8  # tokens of the needle that are said again, so that the others may follow


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


@dataclass(frozen=True)
class LongContext:
    """Figures on texts that were not trained on."""

    loss_by_window: dict[str, float]  # nats per token with so many newest tokens in front
    continued_by_distance: dict[str, float]  # share of a passage's tokens that are the likeliest when it comes back


def measure_long_context(target: TargetModel, books: Sequence[np.ndarray], first_token_id: int) -> LongContext:
    """Measure on token ids of whole books, without their first token; a fixed seed draws each place and passage."""
    random = np.random.default_rng(0)
    stream = np.concatenate(books).astype(np.int64)
    passages = _passages(books, random)
    losses = {f"{window}": _loss(target, passages, window, first_token_id) for window in WINDOWS}
    rates = {f"{distance}": _continued(target, stream, distance, first_token_id, random) for distance in DISTANCES}
    return LongContext(losses, rates)


def _passages(books: Sequence[np.ndarray], random: np.random.Generator) -> list[np.ndarray]:
    """Some of `SCORED_FROM + NUM_SCORED` tokens, each of one book; of all books in a row where none is so long."""
    length = SCORED_FROM + NUM_SCORED
    long = [book for book in books if len(book) >= length] or [np.concatenate(books)]
    chosen = (long[int(random.integers(len(long)))] for _ in range(NUM_PLACES))
    starts = ((book, int(random.integers(0, len(book) - length + 1))) for book in chosen)
    return [book[start : start + length].astype(np.int64) for book, start in starts]


def _loss(target: TargetModel, passages: list[np.ndarray], window: int, first_token_id: int) -> float:
    """Mean over the last tokens of passages, where at least `window` tokens are read in front of each."""
    losses = []
    for passage in passages:
        text = np.concatenate([[first_token_id], passage[-window - NUM_SCORED :]])
        logits = logits_of_last(target, text[:-1].tolist(), NUM_SCORED)
        losses.append(float(cross_entropy(logits, torch.from_numpy(text[-NUM_SCORED:]))))
    return round(float(np.mean(losses)), 4)


def _continued(
    target: TargetModel, stream: np.ndarray, distance: int, first_token_id: int, random: np.random.Generator
) -> float:
    """Return the share of right tokens behind the repeated beginning of a passage `distance` tokens back."""
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
    """Logits `[num_rows, vocab] float32` behind the last rows of a text."""
    cache = target.new_cache(len(token_ids))
    rows: list[torch.Tensor] = []
    while cache.length < len(token_ids):
        start = cache.length
        hidden = target.read(cache, token_ids[start:])
        kept = max(0, len(token_ids) - num_rows - start)
        rows.append(hidden[kept:])
    return target.logits(torch.cat(rows)[-num_rows:]).cpu()
