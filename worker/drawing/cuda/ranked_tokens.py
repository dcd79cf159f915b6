"""The tokens that a draft model is surest of at every row, with the penalty and the noise that the target will have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from swiftbatch.worker.drawing.cuda.buffers import BLOCK, SlotBuffers, expect, expect_logits
from swiftbatch.worker.drawing.cuda.candidates import candidates_of_rows, store_block
from swiftbatch.worker.drawing.cuda.cuda_noise import gumbel, noise_words
from swiftbatch.worker.drawing.cuda.parameters import POSITION, SLOT, TEMPERATURE, noise_key_of, real, whole
from swiftbatch.worker.drawing.cuda.row_words import NUM_DRAFTED, NUM_WORDS
from swiftbatch.worker.drawing.cuda.scores import penalise_blocks, row_peak
from swiftbatch.worker.drawing.drawing import UNLIKELY
from swiftbatch.worker.drawing.filters.filter_kernels import LOG_MIN_P, TOP_K

NUM_WARPS = 4
ROW_WARPS = 8


@dataclass(frozen=True)
class RankingBuffers:
    """The buffers that `Ranking` reads and writes; they stay where they are."""

    logits: torch.Tensor  # [num_rows, vocab] float32, penalised in place
    rows: torch.Tensor  # [num_rows, NUM_WORDS] int32: the table of row_words.py; of a padding row nothing is read
    ancestors: torch.Tensor  # [num_rows, NUM_DRAFTED] int32, as in `DrawBuffers`
    slots: SlotBuffers
    leaving: torch.Tensor  # [num_slots, NUM_DRAFTED] int32, as in `DrawBuffers`
    ids: torch.Tensor  # [num_rows, num_candidates] int32, written: best first; their number is a power of 2
    confidences: torch.Tensor  # [num_rows, num_candidates] float32, written: logarithms; -inf for what is cut off

    def check(self) -> None:
        """Raise ValueError for buffers that do not fit each other."""
        num_rows, num_candidates = len(self.rows), self.ids.shape[1]
        expect_logits(self.logits, num_rows, least=num_candidates)
        expect(self.logits, "logits", (num_rows, self.logits.shape[1]), torch.float32)
        expect(self.rows, "rows", (num_rows, NUM_WORDS), torch.int32)
        expect(self.ancestors, "ancestors", (num_rows, NUM_DRAFTED), torch.int32)
        self.slots.check(num_rows, self.logits.shape[1], self.leaving)
        expect(self.ids, "ids", (num_rows, triton.next_power_of_2(num_candidates)), torch.int32)
        expect(self.confidences, "confidences", (num_rows, num_candidates), torch.float32)


@triton.jit
def rank_blocks(
    rows_ptr, scores_ptr, peaks_ptr, ranks_ptr, tops_ptr, sums_ptr, vocab,
    SPREAD: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Program (row, block): (score + T * noise) / spread of what min-p keeps, as worker/drafters/ranking.py has it."""
    row, block = tl.program_id(0), tl.program_id(1)
    if whole(rows_ptr, row, SLOT) < 0:
        return
    num_rows, num_blocks = tl.num_programs(0), tl.num_programs(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    values = tl.load(scores_ptr + row.to(tl.int64) * vocab + tokens, mask=inside, other=float("-inf"))
    temperature = real(rows_ptr, row, TEMPERATURE)
    if (temperature > 0.0) & (whole(rows_ptr, row, TOP_K) != 1):
        peak = row_peak(peaks_ptr + (num_rows + row) * num_blocks, num_blocks, WIDTH)
        kept = values >= peak + temperature * real(rows_ptr, row, LOG_MIN_P)
        values = tl.where(kept, values, float("-inf"))
        if tl.max(kept.to(tl.int32), 0) > 0:  # else noise changes nothing
            low, high = whole(rows_ptr, row, POSITION), whole(rows_ptr, row, POSITION + 1)
            noise = gumbel(noise_words(noise_key_of(rows_ptr, row), low, high, block * BLOCK, BLOCK))
            values += temperature * noise
    values = values / SPREAD
    store_block(values, tokens, inside, row * num_blocks + block, ranks_ptr, tops_ptr, sums_ptr, TOP)


class Ranking:
    """Ranks candidates in three launches, of the same shape whatever the rows are."""

    def __init__(self, buffers: RankingBuffers, spread: float) -> None:
        """`spread` of the guesses' error, in logits. Raises ValueError for buffers that do not fit each other."""
        buffers.check()
        self._buffers, self._spread = buffers, spread
        num_rows, vocab_size = buffers.logits.shape
        self._grid = (num_rows, triton.cdiv(vocab_size, BLOCK))
        self._width, self._top = triton.next_power_of_2(self._grid[1]), buffers.ids.shape[1]
        device = buffers.logits.device
        self._peaks = torch.empty(2, *self._grid, dtype=torch.int32, device=device)
        self._ranks = torch.empty(*self._grid, self._top, dtype=torch.int64, device=device)
        self._tops = torch.empty(self._grid, dtype=torch.int32, device=device)
        self._sums = torch.empty(self._grid, device=device)

    def launch(self) -> None:
        """Rank all rows."""
        given, slots, vocab_size = self._buffers, self._buffers.slots, self._buffers.logits.shape[1]
        penalise_blocks[self._grid](
            given.logits, vocab_size, given.rows, slots.counts, given.ancestors, given.leaving,
            slots.output, slots.bias, slots.masked, slots.allowed, given.logits, self._peaks, vocab_size,
            BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
        rank_blocks[self._grid](
            given.rows, given.logits, self._peaks, self._ranks, self._tops, self._sums, vocab_size,
            SPREAD=self._spread, BLOCK=BLOCK, WIDTH=self._width, TOP=self._top, num_warps=NUM_WARPS,
        )  # fmt: skip
        candidates_of_rows[(self._grid[0],)](
            given.rows, self._ranks, self._tops, self._sums, given.ids, given.confidences, self._grid[1],
            UNLIKELY=UNLIKELY, WIDTH=self._width, TOP=self._top, num_warps=ROW_WARPS,
        )  # fmt: skip
