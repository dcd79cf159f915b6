"""Scores of a text by a model: nats per token, through the forwards that runs have."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.kernels.sizes import TILE_ROWS
from swiftbatch.worker.model.files import ModelFiles
from swiftbatch.worker.model.text import TextCodec
from swiftbatch.worker.target.target import TargetModel

STRETCH = 1024  # tokens that are read in front of the last one of each piece
MOST_TOKENS = 8192  # of a text: the first ones


def text_token_ids(files: ModelFiles, text: str) -> list[int]:
    """The first tokens of a text. Raises ModelError for one without any to score."""
    token_ids = TextCodec(files).encode(text)[:MOST_TOKENS]
    if len(token_ids) < 2:
        raise ModelError(f"--text: found {len(token_ids)} tokens; expected two or more")
    return token_ids


def text_loss(target: TargetModel, token_ids: list[int]) -> float:
    """Nats per token over pieces of a text, each read from its beginning; the first token of each is not scored."""
    length, total, number = min(STRETCH, target.files.max_positions), 0.0, 0
    for start in range(0, len(token_ids) - 1, length):
        piece = token_ids[start : start + length + 1][: target.files.max_positions + 1]
        if len(piece) > 1:
            total += float(cross_entropy(_logits(target, piece[:-1]), torch.tensor(piece[1:]), reduction="sum"))
            number += len(piece) - 1
    return total / number


def _logits(target: TargetModel, token_ids: list[int]) -> torch.Tensor:
    cache, found = target.new_cache(len(token_ids) + TILE_ROWS), []
    while cache.length < len(token_ids):
        found.append(target.logits(target.read(cache, token_ids[cache.length :])).cpu())
    return torch.cat(found)
