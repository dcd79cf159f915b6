"""The data of sequences on the device: counts of their tokens and their bias by slots, masked tokens by rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swiftbatch.worker.drawing.cuda.buffers import expect
from swiftbatch.worker.drawing.cuda.row_words import NUM_DRAFTED, NUM_MASKED
from swiftbatch.worker.drawing.rules import num_mask_words


@dataclass(frozen=True)
class SlotBuffers:
    """The buffers that penalties, bias and masks are read from; they stay where they are."""

    counts: torch.Tensor  # [num_slots, vocab] int32: of the tokens in the penalty window behind the committed ones
    output: torch.Tensor  # [num_slots, vocab] int32: of all committed tokens behind the prompt
    bias: torch.Tensor  # [num_slots, vocab] float32: added to the logits
    masked: torch.Tensor  # [num_rows, NUM_MASKED] int32: tokens that can't come at a row, as many as the row says
    allowed: torch.Tensor  # [num_rows, num_mask_words] int32: what alone may come at a row that is restricted

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
