"""The tokens in each slot's penalty window and in its output: what a commit brings in and what it moves out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from swiftbatch.worker.drawing.cuda.buffers import expect

BLOCK = 64  # tokens of one program
NUM_WARPS = 1


@triton.jit
def count_tokens(counts_ptr, output_ptr, arriving_ptr, leaving_ptr, vocab, width, BLOCK: tl.constexpr):
    """Add one for each arriving token and take one for each leaving; whole numbers: their order is no matter."""
    slot = tl.program_id(0)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counts, output = counts_ptr + slot.to(tl.int64) * vocab, output_ptr + slot.to(tl.int64) * vocab
    arriving = tl.load(arriving_ptr + slot * width + places, mask=places < width, other=-1)
    leaving = tl.load(leaving_ptr + slot * width + places, mask=places < width, other=-1)
    tl.atomic_add(counts + arriving, 1, mask=arriving >= 0, sem="relaxed")
    tl.atomic_add(output + arriving, 1, mask=arriving >= 0, sem="relaxed")
    tl.atomic_add(counts + leaving, -1, mask=leaving >= 0, sem="relaxed")


def update_counts(counts: torch.Tensor, output: torch.Tensor, arriving: torch.Tensor, leaving: torch.Tensor) -> None:
    """Bring `counts` and `output [num_slots, vocab] int32` up to what was committed since; from the latter none leaves.

    `arriving` and `leaving [num_slots, width] int32`: tokens below `vocab` (this is not checked), -1 for none; a token
    that leaves in the same step comes in as well. Raises ValueError for buffers that do not fit.
    """
    num_slots, vocab_size = counts.shape
    width = arriving.shape[-1]
    expect(counts, "counts", (num_slots, vocab_size), torch.int32)
    expect(output, "output", (num_slots, vocab_size), torch.int32)
    expect(arriving, "arriving", (num_slots, width), torch.int32)
    expect(leaving, "leaving", (num_slots, width), torch.int32)
    grid = (num_slots, triton.cdiv(width, BLOCK))
    count_tokens[grid](counts, output, arriving, leaving, vocab_size, width, BLOCK=BLOCK, num_warps=NUM_WARPS)
