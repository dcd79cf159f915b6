"""How the engine draws: all trees of a step in one native call on a CPU, row by row in torch elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import Any, Protocol

import numpy as np
import torch

from worker.kernels import sampling as native
from worker.kernels.library import chosen_variant
from worker.sampling import TokenSampler
from worker.sequence import Sequence
from worker.target.finite import is_drawable
from worker.tree import DraftTree
from worker.verification import TOP_K, Walk, walk

UNLIKELY = -1e4  # as a log-probability


class Drawing(Protocol):
    """Draws the next tokens of sequences from the target's logits."""

    def sampler(self, sequence: Sequence) -> Any:
        """What draws a sequence's tokens, in `walks`."""

    def walks(self, samplers: Many[Any], trees: Many[DraftTree], logits: Many[torch.Tensor]) -> list[Walk]:
        """Draw from every root on: `logits[i] [1 + num_nodes, vocab] float32`. Samplers stay as they are."""

    def commit(self, sampler: Any, token_ids: list[int]) -> None:
        """These tokens of a walk stand in the sequence now."""

    def top_candidates(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probabilities `[num_rows, TOP_K]` of the best tokens of `[num_rows, vocab]` logits.

        Rows that are verified and not walked may hold NaN: of those, all candidates are as unlikely as can be.
        """


class NativeDrawing:
    """In C."""

    def sampler(self, sequence: Sequence) -> native.NativeSampler:
        return native.NativeSampler(sequence)

    def walks(
        self, samplers: Many[native.NativeSampler], trees: Many[DraftTree], logits: Many[torch.Tensor]
    ) -> list[Walk]:
        return native.walk(samplers, trees, logits)

    def commit(self, sampler: native.NativeSampler, token_ids: list[int]) -> None:
        """It looks at the sequence itself."""

    def top_candidates(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        return native.top_candidates(logits)


class TorchDrawing:
    """In torch, on any device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def sampler(self, sequence: Sequence) -> TokenSampler:
        return TokenSampler(sequence, self._vocab_size, self._device)

    def walks(self, samplers: Many[TokenSampler], trees: Many[DraftTree], logits: Many[torch.Tensor]) -> list[Walk]:
        return [
            walk(tree, rows, sampler.fork().draw, is_drawable)
            for sampler, tree, rows in zip(samplers, trees, logits, strict=True)
        ]

    def commit(self, sampler: TokenSampler, token_ids: list[int]) -> None:
        for token_id in token_ids:
            sampler.push(token_id)

    def top_candidates(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        top = torch.topk(logits, TOP_K)
        logprobs = top.values - torch.logsumexp(logits, dim=-1, keepdim=True)
        logprobs = logprobs.nan_to_num(nan=UNLIKELY, neginf=-math.inf)
        return top.indices.cpu().numpy(), logprobs.cpu().numpy()


def create_drawing(vocab_size: int, device: torch.device) -> Drawing:
    """The fastest one for a device. Raises KernelError for instructions that this machine does not have."""
    if device.type == "cpu" and chosen_variant() is not None and vocab_size >= TOP_K:
        return NativeDrawing()
    return TorchDrawing(vocab_size, device)
