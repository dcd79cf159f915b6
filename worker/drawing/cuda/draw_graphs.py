"""The draws of one table of rows as graphs: for rows with filters, and for all others."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.drawing.cuda.buffers import SlotBuffers
from swiftbatch.worker.drawing.cuda.candidates import CandidateBuffers, TopCandidates
from swiftbatch.worker.drawing.cuda.counts import update_counts
from swiftbatch.worker.drawing.cuda.draw import UNDECIDED, Draw, DrawBuffers, FilteredDraw, QuickDraw
from swiftbatch.worker.drawing.cuda.draw_rows import DrawLayout
from swiftbatch.worker.drawing.verification import TOP_K
from swiftbatch.worker.kernels.cuda.cuda_graph import Capture, Work
from swiftbatch.worker.kernels.cuda.upload import Download

WORDS_OUT = 2 + 2 * TOP_K  # of a row: token, highest logit, candidates and their log-probabilities


@dataclass(frozen=True)
class DrawnRows:
    """The results of a draw for its rows, on the host."""

    tokens: NDArray[np.int32]  # [num_rows]; -1 where nothing can be drawn
    top_ids: NDArray[np.int32]  # [num_rows, TOP_K]
    top_logprobs: NDArray[np.float32]  # [num_rows, TOP_K]


class DrawGraphs:
    """Static buffers and what runs over them. Captured at once: copies of other threads would disturb it later."""

    def __init__(self, vocab_size: int, layout: DrawLayout, device: torch.device, capture: Capture) -> None:
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
        self._buffers = DrawBuffers(
            self.logits, rows, ancestors, self.slots, leaving, tokens, highest.view(torch.float32)
        )
        top = (ids.view(num_rows, TOP_K), logprobs.view(torch.float32).view(num_rows, TOP_K))
        self._download = Download(self.out)
        candidates = TopCandidates(CandidateBuffers(self.logits, rows, *top))
        counting = functools.partial(update_counts, self.slots.counts, self.slots.output, arriving, gone)
        plain, filtered = Draw(self._buffers), FilteredDraw(self._buffers)
        works = (
            in_a_row(counting, plain.launch, candidates.launch),
            in_a_row(counting, QuickDraw(filtered).launch, candidates.launch),
            filtered.launch,
        )
        self._plain, self._quick, self._sorted = (capture(work, device) for work in works)

    def replay(self, is_filtered: bool) -> DrawnRows:
        """Draw; waits for the tokens."""
        (self._quick if is_filtered else self._plain).replay()
        out = self._download.wait()
        if is_filtered and (out[: self._num_rows] == UNDECIDED).any():
            self._sorted.replay()
            out = self._download.wait()
        num_rows, out = self._num_rows, out.copy()
        top = out[2 * num_rows :].reshape(2, num_rows, TOP_K)
        return DrawnRows(out[:num_rows], top[0], top[1].view(np.float32))


def in_a_row(*works: Work) -> Work:
    """Return the work of all, one after the other. It refers to no graph, so that the last owner frees all buffers."""

    def work() -> None:
        for each in works:
            each()

    return work
