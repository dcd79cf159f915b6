"""The buffers that launches are given: their sizes, their checks, and those that hold counts, bias and masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swiftbatch.worker.drawing.cuda.row_words import NUM_DRAFTED, NUM_MASKED
from swiftbatch.worker.drawing.token_rules import num_mask_words

BLOCK = 1024  # tokens of one program; a multiple of 4, which share a counter of the noise
MAX_VOCAB = 2**19 - 1  # weights of that many tokens are summed as whole numbers of 2^-44 in 63 bits


def expect(tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError for a buffer of another shape or dtype, or whose numbers do not lie side by side."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: found {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}, expected "
            f"{dtype} {list(shape)} side by side"
        )


def expect_logits(logits: torch.Tensor, num_rows: int, least: int = 1) -> None:
    """Raise ValueError for anything but `[num_rows, vocab] float32`, each row's numbers side by side."""
    fits = logits.dim() == 2 and len(logits) == num_rows and logits.dtype == torch.float32
    if not fits or logits.stride(1) != 1 or not least <= logits.shape[1] <= MAX_VOCAB:
        raise ValueError(
            f"logits: found {logits.dtype} {list(logits.shape)} with strides {list(logits.stride())}, expected "
            f"torch.float32 [{num_rows}, {least} to {MAX_VOCAB}], each row's numbers side by side"
        )


@dataclass(frozen=True)
class SlotBuffers:
    """The data of sequences on the device, from which penalties, bias and masks are read; they stay where they are.

    Counts of tokens and the bias lie by slots, masked tokens by rows.
    """

    counts: torch.Tensor  # [num_slots, vocab] int32: of the tokens in the penalty window behind the committed ones
    output: torch.Tensor  # [num_slots, vocab] int32: of all committed tokens behind the prompt
    bias: torch.Tensor  # [num_slots, vocab] float32: added to the logits
    masked: torch.Tensor  # [num_rows, NUM_MASKED] int32: tokens that can't come at a row, as many as the row says
    allowed: torch.Tensor  # [num_rows, num_mask_words] int32: the only tokens that may come at a restricted row

    @classmethod
    def empty(cls, num_slots: int, num_rows: int, vocab_size: int, device: torch.device) -> SlotBuffers:
        """Allocate buffers of zeros."""
        by_slot = (num_slots, vocab_size)
        return cls(
            torch.zeros(by_slot, dtype=torch.int32, device=device),
            torch.zeros(by_slot, dtype=torch.int32, device=device),
            torch.zeros(by_slot, device=device),
            torch.zeros(num_rows, NUM_MASKED, dtype=torch.int32, device=device),
            torch.zeros(num_rows, num_mask_words(vocab_size), dtype=torch.int32, device=device),
        )

    def check(self, num_rows: int, vocab_size: int, leaving: torch.Tensor) -> None:
        """Raise ValueError for buffers that do not fit; `leaving [num_slots, NUM_DRAFTED] int32` is beside them."""
        num_slots = len(self.counts)
        expect(self.counts, "counts", (num_slots, vocab_size), torch.int32)
        expect(self.output, "output", (num_slots, vocab_size), torch.int32)
        expect(self.bias, "bias", (num_slots, vocab_size), torch.float32)
        expect(self.masked, "masked", (num_rows, NUM_MASKED), torch.int32)
        expect(self.allowed, "allowed", (num_rows, num_mask_words(vocab_size)), torch.int32)
        expect(leaving, "leaving", (num_slots, NUM_DRAFTED), torch.int32)
