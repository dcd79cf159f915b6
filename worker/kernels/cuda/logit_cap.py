"""The soft cap of logits, in place: a launch behind the head of those few models that have it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.prefix_attention import LOG2_E

CAPPED_COLUMNS = 1024  # of a program


@triton.jit
def cap_row(logits_ptr, VOCAB: tl.constexpr, COLUMNS: tl.constexpr, CAP: tl.constexpr):
    """Program (row, columns): cap * tanh(logit / cap)."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    logits_ptr += tl.program_id(0).to(tl.int64) * VOCAB + columns
    logits = tl.load(logits_ptr, mask=columns < VOCAB, other=0.0)
    power = tl.exp2(tl.abs(logits) * (-2 * LOG2_E / CAP))
    capped = CAP * (1 - power) / (1 + power)
    tl.store(logits_ptr, tl.where(logits < 0, -capped, capped), mask=columns < VOCAB)


def cap_logits(logits: Tensor, cap: float) -> None:
    """Cap `[num_rows, vocab] float32`."""
    num_rows, vocab = logits.shape
    grid = (num_rows, triton.cdiv(vocab, CAPPED_COLUMNS))
    cap_row[grid](logits, VOCAB=vocab, COLUMNS=CAPPED_COLUMNS, CAP=cap)
