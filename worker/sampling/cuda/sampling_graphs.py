"""Sampling of a step's rows on a GPU as CUDA graphs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from swiftbatch.worker.kernels.cuda.cuda_graph import Capture, Download, Work
from swiftbatch.worker.sampling.cuda.filter_kernels import RowCuts
from swiftbatch.worker.sampling.cuda.logits_kernels import penalise_blocks, update_counts
from swiftbatch.worker.sampling.cuda.sampling_rows import (
    BLOCK,
    NUM_DRAFTED,
    NUM_WORDS,
    SamplingRowLayout,
    SlotBuffers,
    expect,
    expect_logits,
)
from swiftbatch.worker.sampling.cuda.top_candidates import CandidateBuffers, TopCandidates, best_of_blocks, best_of_rows
from swiftbatch.worker.sampling.verification import TOP_K

NUM_WARPS = 4


@dataclass(frozen=True)
class SamplingBuffers:
    """Fixed buffers of a draw."""

    logits: torch.Tensor  # [num_rows, vocab] float32
    rows: torch.Tensor  # [num_rows, NUM_WORDS] int32: the table of sampling_rows.py
    ancestors: torch.Tensor  # [num_rows, NUM_DRAFTED] int32: tokens of the row's path, from the root to its own
    slots: SlotBuffers
    # [num_slots, NUM_DRAFTED] int32: committed tokens in the order in which they leave the window; -1 for none
    leaving: torch.Tensor
    tokens: torch.Tensor  # [num_rows] int32, written: drawn tokens, -1 if nothing can be drawn and for padding
    highest: torch.Tensor  # [num_rows] float32, written: the highest logit, NaN if there is any and for padding

    def check(self) -> None:
        """Raise ValueError for buffers that do not fit together."""
        num_rows = len(self.rows)
        expect_logits(self.logits, num_rows)
        expect(self.rows, "rows", (num_rows, NUM_WORDS), torch.int32)
        expect(self.ancestors, "ancestors", (num_rows, NUM_DRAFTED), torch.int32)
        self.slots.check(num_rows, self.logits.shape[1], self.leaving)
        expect(self.tokens, "tokens", (num_rows,), torch.int32)
        expect(self.highest, "highest", (num_rows,), torch.float32)


class Draw:
    """Draws in three launches. If `is_filtered`, more launches find the cuts of rows."""

    def __init__(self, buffers: SamplingBuffers, is_filtered: bool = False) -> None:
        buffers.check()
        self.buffers = buffers
        num_rows, vocab_size = buffers.logits.shape
        self._grid = (num_rows, triton.cdiv(vocab_size, BLOCK))
        self._width = triton.next_power_of_2(self._grid[1])
        device = buffers.logits.device
        self._scores = torch.empty(num_rows, vocab_size, device=device)
        self._peaks = torch.empty(2, *self._grid, dtype=torch.int32, device=device)
        self._best = torch.empty(self._grid, dtype=torch.int64, device=device)
        self.cuts = RowCuts(buffers.rows, self._scores, self._peaks) if is_filtered else None

    def launch(self) -> None:
        self._penalise()
        if self.cuts is not None:
            self.cuts.launch()
        self._choose()

    def _penalise(self) -> None:
        given, slots, vocab_size = self.buffers, self.buffers.slots, self.buffers.logits.shape[1]
        penalise_blocks[self._grid](
            given.logits, given.logits.stride(0), given.rows, slots.counts, given.ancestors, given.leaving,
            slots.output, slots.bias, slots.masked, slots.allowed, self._scores, self._peaks, vocab_size,
            BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip

    def _choose(self) -> None:
        given, (num_rows, num_blocks) = self.buffers, self._grid
        ranks = None if self.cuts is None else self.cuts.ranks
        best_of_blocks[self._grid](
            given.rows, self._scores, self._peaks, ranks, self._best, given.logits.shape[1],
            BLOCK=BLOCK, WIDTH=self._width, num_warps=NUM_WARPS,
        )  # fmt: skip
        best_of_rows[(num_rows,)](
            given.rows, self._peaks, self._best, given.tokens, given.highest, num_blocks,
            WIDTH=self._width, num_warps=NUM_WARPS,
        )  # fmt: skip


# Graphs for rows with filters, and for all others.


WORDS_OUT = 2 + 2 * TOP_K  # a row has token, highest logit, candidates and their log-probabilities


@dataclass(frozen=True)
class SampledRows:
    """Results of a draw on the host."""

    tokens: NDArray[np.int32]  # [num_rows]; -1 if nothing can be drawn
    top_ids: NDArray[np.int32]  # [num_rows, TOP_K]
    top_logprobs: NDArray[np.float32]  # [num_rows, TOP_K]


class SamplingGraphs:
    """Fixed buffers and their graphs, which are captured in the constructor, before other threads copy."""

    def __init__(self, vocab_size: int, layout: SamplingRowLayout, device: torch.device, capture: Capture) -> None:
        """Inputs go to `logits [num_rows, vocab] float32` and `table [layout.size] int32`."""
        num_rows = self._num_rows = layout.num_rows
        self.logits = torch.zeros(num_rows, vocab_size, device=device)
        padding = np.zeros(layout.size, dtype=np.int32)
        layout.fill(padding, [], {})
        self.table = torch.from_numpy(padding).to(device)
        self.slots = SlotBuffers.empty(layout.num_slots, num_rows, vocab_size, device)
        rows, ancestors, leaving, arriving, gone = layout.parts(self.table)
        self.out = torch.zeros(num_rows * WORDS_OUT, dtype=torch.int32, device=device)
        tokens, highest, ids, logprobs = self.out.split([num_rows, num_rows, num_rows * TOP_K, num_rows * TOP_K])
        self._buffers = SamplingBuffers(
            self.logits, rows, ancestors, self.slots, leaving, tokens, highest.view(torch.float32)
        )
        top = (ids.view(num_rows, TOP_K), logprobs.view(torch.float32).view(num_rows, TOP_K))
        self._download = Download(self.out)
        candidates = TopCandidates(CandidateBuffers(self.logits, rows, *top))
        counting = functools.partial(update_counts, self.slots.counts, self.slots.output, arriving, gone)
        draws = Draw(self._buffers), Draw(self._buffers, is_filtered=True)
        works = (in_a_row(counting, draw.launch, candidates.launch) for draw in draws)
        self._plain, self._filtered = (capture(work, device) for work in works)

    def replay(self, is_filtered: bool) -> SampledRows:
        """Draw and wait for the tokens."""
        (self._filtered if is_filtered else self._plain).replay()
        out = self._download.wait()
        num_rows, out = self._num_rows, out.copy()
        top = out[2 * num_rows :].reshape(2, num_rows, TOP_K)
        return SampledRows(out[:num_rows], top[0], top[1].view(np.float32))


def in_a_row(*works: Work) -> Work:
    """Return one function that runs all works, without keeping graphs alive."""

    def work() -> None:
        for each in works:
            each()

    return work
