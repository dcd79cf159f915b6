"""Sampling of all rows of a step on a GPU: its kernel launches, captured as CUDA graphs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from swiftbatch.worker.kernels.cuda.cuda_graph import Capture, Download, Work
from swiftbatch.worker.sampling.cuda.filter_kernels import find_cuts, find_cuts_of_best, list_best, temper_blocks
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
SORTED_BLOCK = 4096  # places of a sorted row that are looked at together
SORTED_WARPS, LISTED_WARPS = 16, 8
NUM_LISTED = 1024  # best tokens of a row, among which nearly all rows are cut
UNDECIDED = -2  # in place of a token


@dataclass(frozen=True)
class SamplingBuffers:
    """The buffers that a draw reads and writes; they stay where they are."""

    logits: torch.Tensor  # [num_rows, vocab] float32
    rows: torch.Tensor  # [num_rows, NUM_WORDS] int32: the table of sampling_rows.py
    ancestors: torch.Tensor  # [num_rows, NUM_DRAFTED] int32: tokens of the row's path, root side first, its own last
    slots: SlotBuffers
    leaving: torch.Tensor  # [num_slots, NUM_DRAFTED] int32: committed tokens that leave it next, in turn; -1: none does
    tokens: torch.Tensor  # [num_rows] int32, written: the drawn tokens, -1 where nothing can be drawn and for padding
    highest: torch.Tensor  # [num_rows] float32, written: the highest logit, NaN where there is any and for padding

    def check(self) -> None:
        """Raise ValueError for buffers that do not fit each other."""
        num_rows = len(self.rows)
        expect_logits(self.logits, num_rows)
        expect(self.rows, "rows", (num_rows, NUM_WORDS), torch.int32)
        expect(self.ancestors, "ancestors", (num_rows, NUM_DRAFTED), torch.int32)
        self.slots.check(num_rows, self.logits.shape[1], self.leaving)
        expect(self.tokens, "tokens", (num_rows,), torch.int32)
        expect(self.highest, "highest", (num_rows,), torch.float32)


class Draw:
    """Draws in three launches. Min-p alone cuts rows: those that want another filter go through `FilteredSampling`."""

    def __init__(self, buffers: SamplingBuffers) -> None:
        """Allocate what lies between the launches. Raises ValueError for buffers that do not fit each other."""
        buffers.check()
        self.buffers = buffers
        num_rows, vocab_size = buffers.logits.shape
        self._grid = (num_rows, triton.cdiv(vocab_size, BLOCK))
        self.width = triton.next_power_of_2(self._grid[1])
        device = buffers.logits.device
        self._scores = torch.empty(num_rows, vocab_size, device=device)
        self.peaks = torch.empty(2, *self._grid, dtype=torch.int32, device=device)
        self._best = torch.empty(self._grid, dtype=torch.int64, device=device)
        # [num_rows]: where each row is cut, in the order (score, token); used in a filtered draw alone
        self.cut_scores = torch.empty(num_rows, device=device)
        self.cut_tokens = torch.empty(num_rows, dtype=torch.int32, device=device)

    def launch(self) -> None:
        """Draw all rows."""
        self.penalise()
        self.choose(is_cut=False)

    def penalise(self) -> None:
        """Find the scores in front of the temperature, and the best of each block."""
        given, vocab_size = self.buffers, self.buffers.logits.shape[1]
        penalise_blocks[self._grid](
            given.logits,
            given.logits.stride(0),
            given.rows,
            given.slots.counts,
            given.ancestors,
            given.leaving,
            given.slots.output,
            given.slots.bias,
            given.slots.masked,
            given.slots.allowed,
            self._scores,
            self.peaks,
            vocab_size,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )

    def choose(self, is_cut: bool) -> None:
        """Draw from the scores, from each row's cut on where there are some."""
        given, (num_rows, num_blocks) = self.buffers, self._grid
        best_of_blocks[self._grid](
            given.rows,
            self._scores,
            self.peaks,
            self.cut_scores,
            self.cut_tokens,
            self._best,
            given.logits.shape[1],
            BLOCK=BLOCK,
            WIDTH=self.width,
            IS_CUT=is_cut,
            num_warps=NUM_WARPS,
        )
        best_of_rows[(num_rows,)](
            given.rows,
            self.peaks,
            self._best,
            given.tokens,
            given.highest,
            num_blocks,
            WIDTH=self.width,
            num_warps=NUM_WARPS,
        )


class FilteredSampling(Draw):
    """Draws behind all filters, by sorted rows; rows that want none of them come out as from `Draw`."""

    def __init__(self, buffers: SamplingBuffers) -> None:
        super().__init__(buffers)
        self.tempered = torch.zeros_like(self._scores)
        self._sorted = torch.empty_like(self._scores)
        self._order = torch.empty(self._scores.shape, dtype=torch.int64, device=self._scores.device)

    def launch(self) -> None:
        """Draw all rows."""
        self.penalise()
        self._sort()
        self._find_cuts()
        self.choose(is_cut=True)

    def _sort(self) -> None:
        self.temper()
        torch.sort(self.tempered, stable=True, out=(self._sorted, self._order))

    def temper(self) -> None:
        """Find the scores that rows are cut by."""
        rows, vocab_size = self.buffers.rows, self._scores.shape[1]
        temper_blocks[self._grid](
            rows,
            self._scores,
            self.peaks,
            self.tempered,
            vocab_size,
            BLOCK=BLOCK,
            WIDTH=self.width,
            num_warps=NUM_WARPS,
        )

    def _find_cuts(self) -> None:
        num_rows, num_blocks = self._grid
        find_cuts[(num_rows,)](
            self.buffers.rows,
            self.peaks,
            self._sorted,
            self._order,
            self.cut_scores,
            self.cut_tokens,
            self._scores.shape[1],
            num_blocks,
            num_rows,
            BLOCK=SORTED_BLOCK,
            WIDTH=self.width,
            num_warps=SORTED_WARPS,
        )


class TopTokensSampling:
    """Draws as a `FilteredSampling`, in its buffers, but sorts only the best tokens of a row.

    A row that is cut below these has `UNDECIDED` as its token: the other one has to draw it.
    """

    def __init__(self, draw: FilteredSampling, num_listed: int = NUM_LISTED) -> None:
        """Allocate room for the best tokens of each row, fewer than `num_listed` where there are more."""
        self._draw, self._num_listed = draw, num_listed
        num_rows, device = len(draw.buffers.rows), draw.buffers.rows.device
        self._ranks, self._sorted, self._order = (
            torch.zeros(num_rows, num_listed, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._num_best = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._undecided = torch.zeros(num_rows, dtype=torch.bool, device=device)

    def launch(self) -> None:
        """Draw all rows."""
        self._draw.penalise()
        self._draw.temper()
        self._find_cuts()
        self._draw.choose(is_cut=True)
        self._draw.buffers.tokens.masked_fill_(self._undecided, UNDECIDED)

    def _find_cuts(self) -> None:
        draw, rows = self._draw, self._draw.buffers.rows
        sizes = draw.tempered.shape[1], draw.peaks.shape[2], len(rows)
        constants = {"BLOCK": SORTED_BLOCK, "WIDTH": draw.width, "MOST": self._num_listed}
        given = rows, draw.peaks, draw.tempered
        list_best[(len(rows),)](*given, self._ranks, self._num_best, *sizes, **constants, num_warps=SORTED_WARPS)
        torch.sort(self._ranks, stable=True, out=(self._sorted, self._order))
        cuts = draw.cut_scores, draw.cut_tokens, self._undecided
        find_cuts_of_best[(len(rows),)](
            *given, self._sorted, self._num_best, *cuts, *sizes, **constants, num_warps=LISTED_WARPS
        )


# The draws of one table of rows as graphs: for rows with filters, and for all others.


WORDS_OUT = 2 + 2 * TOP_K  # of a row: token, highest logit, candidates and their log-probabilities


@dataclass(frozen=True)
class SampledRows:
    """The results of a draw for its rows, on the host."""

    tokens: NDArray[np.int32]  # [num_rows]; -1 where nothing can be drawn
    top_ids: NDArray[np.int32]  # [num_rows, TOP_K]
    top_logprobs: NDArray[np.float32]  # [num_rows, TOP_K]


class SamplingGraphs:
    """Static buffers and what runs over them. Captured at once: copies of other threads would disturb it later."""

    def __init__(self, vocab_size: int, layout: SamplingRowLayout, device: torch.device, capture: Capture) -> None:
        """Allocate and capture. Inputs go to `logits [num_rows, vocab] float32` and `table [layout.size] int32`."""
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
        plain, filtered = Draw(self._buffers), FilteredSampling(self._buffers)
        works = (
            in_a_row(counting, plain.launch, candidates.launch),
            in_a_row(counting, TopTokensSampling(filtered).launch, candidates.launch),
            filtered.launch,
        )
        self._plain, self._quick, self._sorted = (capture(work, device) for work in works)

    def replay(self, is_filtered: bool) -> SampledRows:
        """Draw; waits for the tokens."""
        (self._quick if is_filtered else self._plain).replay()
        out = self._download.wait()
        if is_filtered and (out[: self._num_rows] == UNDECIDED).any():
            self._sorted.replay()
            out = self._download.wait()
        num_rows, out = self._num_rows, out.copy()
        top = out[2 * num_rows :].reshape(2, num_rows, TOP_K)
        return SampledRows(out[:num_rows], top[0], top[1].view(np.float32))


def in_a_row(*works: Work) -> Work:
    """Return the work of all, one after the other. It refers to no graph, so that the last owner frees all buffers."""

    def work() -> None:
        for each in works:
            each()

    return work
