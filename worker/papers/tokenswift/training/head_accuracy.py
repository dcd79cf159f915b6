"""The accuracy of decoding heads along texts: top-1, top-2 and top-3 of every head."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swiftbatch.worker.papers.tokenswift.heads import head_states
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.training.own_texts import TextStates

NUM_LOGITS = 2**24  # held at once, whatever the vocabulary
WIDTH = 3  # candidates that count


def chunk_rows(rows: torch.Tensor, vocab_size: int) -> Iterator[torch.Tensor]:
    """Rows in parts whose logits fit in memory."""
    yield from rows.split(max(1, NUM_LOGITS // vocab_size))


@torch.inference_mode()
def head_accuracy(target: TargetModel, weight: torch.Tensor, states: TextStates) -> list[list[float]]:
    """Share of rows whose token is among the first 1, 2, 3 candidates of each head: `[num_heads][WIDTH]`.

    Head i (from 0) predicts the token i + 2 places behind its row. `weight [num_heads, hidden, hidden]`.
    """
    weight = weight.to(target.device, target.dtype)
    num_right = torch.zeros(len(weight), WIDTH)
    for rows in chunk_rows(states.rows, target.vocab_size):
        hidden = states.hidden[rows].to(target.device)
        for head, state in enumerate(head_states(weight, hidden)):
            candidates = target.logits(state).topk(WIDTH).indices.cpu()  # [num_rows, WIDTH]
            right = candidates == states.token_ids[rows + head + 2, None]
            num_right[head] += right.cumsum(dim=1).sum(dim=0)
    shares: list[list[float]] = (num_right / len(states.rows)).tolist()
    return [[round(share, 4) for share in head] for head in shares]
