"""The best candidates of every row: what drafters learn of the target, `TOP_K` of each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from swiftbatch.worker.drawing.cuda.buffers import BLOCK, expect, expect_logits
from swiftbatch.worker.drawing.cuda.candidate_kernels import candidates_of_blocks, candidates_of_rows
from swiftbatch.worker.drawing.cuda.row_words import NUM_WORDS
from swiftbatch.worker.drawing.drawing import UNLIKELY
from swiftbatch.worker.drawing.verification import TOP_K

BLOCK_WARPS = 4
ROW_WARPS = 8


@dataclass(frozen=True)
class CandidateBuffers:
    """The buffers that `TopCandidates` reads and writes; they stay where they are."""

    logits: torch.Tensor  # [num_rows, vocab] float32
    rows: torch.Tensor  # [num_rows, NUM_WORDS] int32: the table of row_words.py; of a padding row nothing is read
    ids: torch.Tensor  # [num_rows, TOP_K] int32, written: best first, equals in the order of their ids
    logprobs: torch.Tensor  # [num_rows, TOP_K] float32, written; of a row with NaN all as unlikely as can be

    def check(self) -> None:
        """Raise ValueError for buffers that do not fit each other."""
        num_rows = len(self.rows)
        expect_logits(self.logits, num_rows, least=TOP_K)
        expect(self.rows, "rows", (num_rows, NUM_WORDS), torch.int32)
        expect(self.ids, "ids", (num_rows, TOP_K), torch.int32)
        expect(self.logprobs, "logprobs", (num_rows, TOP_K), torch.float32)


class TopCandidates:
    """Finds the best tokens in two launches, of the same shape whatever the rows are."""

    def __init__(self, buffers: CandidateBuffers) -> None:
        """Allocate what lies between the launches. Raises ValueError for buffers that do not fit each other."""
        buffers.check()
        self._buffers = buffers
        num_rows, vocab_size = buffers.logits.shape
        self._grid = (num_rows, triton.cdiv(vocab_size, BLOCK))
        device = buffers.logits.device
        self._ranks = torch.empty(*self._grid, TOP_K, dtype=torch.int64, device=device)
        self._peaks = torch.empty(self._grid, dtype=torch.int32, device=device)
        self._sums = torch.empty(self._grid, device=device)

    def launch(self) -> None:
        """Find the candidates of all rows."""
        given, (num_rows, num_blocks) = self._buffers, self._grid
        candidates_of_blocks[self._grid](
            given.rows,
            given.logits,
            given.logits.stride(0),
            self._ranks,
            self._peaks,
            self._sums,
            given.logits.shape[1],
            BLOCK=BLOCK,
            TOP=TOP_K,
            num_warps=BLOCK_WARPS,
        )
        candidates_of_rows[(num_rows,)](
            given.rows,
            self._ranks,
            self._peaks,
            self._sums,
            given.ids,
            given.logprobs,
            num_blocks,
            UNLIKELY=UNLIKELY,
            WIDTH=triton.next_power_of_2(num_blocks),
            TOP=TOP_K,
            num_warps=ROW_WARPS,
        )
