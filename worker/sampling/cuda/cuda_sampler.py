"""Sampling on a GPU: one graph and one copy for the rows of a step; the host walks the trees."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.run.run_records import LogprobsMode
from swiftbatch.jobs.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from swiftbatch.worker.kernels.cuda.cuda_graph import Capture, Download, Upload, Work, capture
from swiftbatch.worker.kernels.kernel_sizes import most_slots
from swiftbatch.worker.sampling.batch_sampler import NO_MASKS, Masks, num_top_of, together
from swiftbatch.worker.sampling.cuda.filter_kernels import RowCuts
from swiftbatch.worker.sampling.cuda.logits_kernels import penalise_blocks, update_counts
from swiftbatch.worker.sampling.cuda.logprob_kernels import RowLogprobs
from swiftbatch.worker.sampling.cuda.sampling_rows import (
    BLOCK,
    FILTERED,
    NO_LOGPROBS,
    NUM_DRAFTED,
    PROCESSED,
    RAW,
    SamplingRow,
    SamplingRowLayout,
    SlotBuffers,
    committed_tokens,
    mask_rows,
    needs_slot,
    refuse_vocab,
    rows_of,
)
from swiftbatch.worker.sampling.cuda.top_candidates import ROW_WARPS, TopCandidates, best_of_rows, bounds_of_blocks
from swiftbatch.worker.sampling.draft_tree import ROOT, TOP_K, Candidates, DraftTree, Walk
from swiftbatch.worker.sampling.filters import needs_filters
from swiftbatch.worker.sampling.logits_processors import Context, bias_row, masked_behind, output_counts
from swiftbatch.worker.sampling.sequence import Sequence

NUM_WARPS = 4
MOST_AHEAD = 4  # draws without the host; behind a job's end they are lost, and its place waits for them


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


class Draw:
    """Draws in three launches. With filters, more launches find the cuts of rows."""

    def __init__(self, buffers: SamplingBuffers) -> None:
        self.buffers = buffers
        num_rows, vocab_size = buffers.logits.shape
        refuse_vocab(vocab_size)
        self._grid = (num_rows, triton.cdiv(vocab_size, BLOCK))
        self._width = triton.next_power_of_2(self._grid[1])
        device = buffers.logits.device
        self.scores = torch.empty(num_rows, vocab_size, device=device)
        self.peaks = torch.empty(2, *self._grid, dtype=torch.int32, device=device)
        self._bounds = torch.empty(self._grid, dtype=torch.int64, device=device)
        self.cuts = RowCuts(buffers.rows, self.scores, self.peaks)

    def launch(self, is_filtered: bool = False) -> None:
        self._penalise()
        if is_filtered:
            self.cuts.launch()
        self._choose(self.cuts.ranks if is_filtered else None)

    def _penalise(self) -> None:
        given, slots, vocab_size = self.buffers, self.buffers.slots, self.buffers.logits.shape[1]
        penalise_blocks[self._grid](
            given.logits, given.logits.stride(0), given.rows, slots.counts, given.ancestors, given.leaving,
            slots.output, slots.bias, slots.masked, slots.allowed, self.scores, self.peaks, vocab_size,
            BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip

    def _choose(self, ranks: torch.Tensor | None) -> None:
        given, (num_rows, num_blocks), vocab_size = self.buffers, self._grid, self.buffers.logits.shape[1]
        found = given.rows, self.scores, self.peaks, ranks, self._bounds
        sizes = {"BLOCK": BLOCK, "WIDTH": self._width}
        bounds_of_blocks[self._grid](*found, vocab_size, **sizes, num_warps=NUM_WARPS)
        best_of_rows[(num_rows,)](
            *found, given.tokens, given.highest, vocab_size, num_blocks, **sizes, num_warps=ROW_WARPS
        )


# Graphs for rows with filters, for all others with and without candidates, and for log-probabilities.


# widths of a row's results: token, highest logit, candidates and their log-probabilities; `TokenLogprobs.numbers`
WIDTHS_OUT = (1, 1, TOP_K, TOP_K, 1 + 2 * MAX_TOP_LOGPROBS)


class SampledRows(NamedTuple):
    """Results of rows; what was not asked for is arbitrary."""

    tokens: NDArray[np.int32]  # [num_rows], -1 if nothing can be drawn
    candidates: NDArray[np.int32]  # [num_rows, TOP_K]
    candidate_logprobs: NDArray[np.float32]  # [num_rows, TOP_K]
    logprobs: NDArray[np.int32]  # [num_rows, 1 + 2 * MAX_TOP_LOGPROBS], as `TokenLogprobs.numbers`

    def logprobs_of(self, rows: slice | list[int], num_top: int) -> TokenLogprobs:
        return TokenLogprobs(self.logprobs[rows, : 1 + 2 * num_top])


def parts_out(out: Any) -> list[Any]:
    """Return views of the results of all rows, `[num_rows, width]` int32, in the order of `WIDTHS_OUT`."""
    num_rows, ends = len(out) // sum(WIDTHS_OUT), list(accumulate(WIDTHS_OUT))
    return [
        out[(end - width) * num_rows : end * num_rows].reshape(num_rows, width)
        for width, end in zip(WIDTHS_OUT, ends, strict=True)
    ]


class SamplingGraphs:
    """Fixed buffers and their graphs, which are captured in the constructor, before other threads copy."""

    def __init__(self, logits: torch.Tensor, layout: SamplingRowLayout, capture: Capture) -> None:
        """Inputs are `logits [num_rows, vocab] float32`, which no graph writes, and `table [layout.size] int32`."""
        (num_rows, vocab_size), device = logits.shape, logits.device
        self.logits = logits
        padding = np.zeros(layout.size, dtype=np.int32)
        layout.fill(padding, [], {})
        self.table = torch.from_numpy(padding).to(device)
        self.slots = SlotBuffers.empty(layout.num_slots, num_rows, vocab_size, device)
        rows, ancestors, leaving, arriving, gone = layout.parts(self.table)
        self.out = torch.zeros(num_rows * sum(WIDTHS_OUT), dtype=torch.int32, device=device)
        floats = parts_out(self.out.view(torch.float32))
        tokens, _, ids, _, logprobs = parts_out(self.out)
        self._buffers = SamplingBuffers(
            self.logits, rows, ancestors, self.slots, leaving, tokens[:, 0], floats[1][:, 0]
        )
        self._download = Download(self.out)
        candidates = TopCandidates(self.logits, rows, ids, floats[3])
        counting = functools.partial(update_counts, self.slots.counts, self.slots.output, arriving, gone)
        draw = Draw(self._buffers)
        filtered = functools.partial(draw.launch, is_filtered=True)
        works = (draw.launch,), (draw.launch, candidates.launch), (filtered, candidates.launch)
        graphs = (capture(in_a_row(counting, *work), device) for work in works)
        self._plain, self._plain_with_candidates, self._filtered = graphs
        found = RowLogprobs(self.logits, rows, draw.scores, draw.peaks, draw.cuts.ranks)
        self._logprobs = capture(in_a_row(functools.partial(found.launch, tokens[:, 0], logprobs)), device)

    @property
    def tokens(self) -> torch.Tensor:
        return self._buffers.tokens

    def draw(self, is_filtered: bool, with_candidates: bool = False) -> None:
        """Queue a draw."""
        unfiltered = self._plain_with_candidates if with_candidates else self._plain
        (self._filtered if is_filtered else unfiltered).replay()

    def replay(self, draws: bool, is_filtered: bool, with_candidates: bool, with_logprobs: bool) -> SampledRows:
        """Run what is asked for and wait for the results."""
        if draws:
            self.draw(is_filtered, with_candidates)
        if with_logprobs:
            self._logprobs.replay()
        out = self._download.wait().copy()
        tokens, _, ids, candidate_logprobs, logprobs = parts_out(out)
        return SampledRows(tokens[:, 0], ids, candidate_logprobs.view(np.float32), logprobs)


def in_a_row(*works: Work) -> Work:
    """Return one function that runs all works, without keeping graphs alive."""

    def work() -> None:
        for each in works:
            each()

    return work


GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
NO_SLOT = 0  # sequences without penalties or bias share this slot, which is never read


class TokenCounts:
    """Slot of a sequence's token counts on the device."""

    def __init__(self, sequence: Sequence, slot: int) -> None:
        self.sequence = sequence
        self.slot = slot
        self.num_counted: int | None = None  # tokens counted on the device; None: the slot has another sequence's

    def news(self, slots: SlotBuffers) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens that entered and left the window since the last call."""
        sequence, window = self.sequence, self.sequence.sampling.penalty_window
        num_new = None if self.num_counted is None else len(sequence) - self.num_counted
        self.num_counted = len(sequence)
        if num_new is not None and num_new <= NUM_DRAFTED:
            return committed_tokens(sequence.token_ids, num_new, window)
        for buffer, token_ids in ((slots.counts, sequence.token_ids[-window:]), (slots.output, sequence.output_ids)):
            fresh = np.bincount(token_ids, minlength=buffer.shape[1]).astype(np.int32)
            buffer[self.slot] = torch.from_numpy(fresh).to(buffer.device)
        if (bias := bias_row(sequence, slots.bias.device)) is not None:
            slots.bias[self.slot] = bias
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)


class CudaSampler:
    """Samples the tokens of one sequence, or of its forks."""

    def __init__(self, drawing: CudaBatchSampler, sequence: Sequence, counts: TokenCounts) -> None:
        self.sequence = sequence
        self.counts = counts
        self._batch_sampler = drawing

    def fork(self, sequence: Sequence) -> CudaSampler:
        return CudaSampler(self._batch_sampler, sequence, self.counts)

    @property
    def draws_by_position(self) -> bool:
        """Return whether only the position and the logits decide on a draw, and no earlier token."""
        sequence = self.sequence
        return self.counts.slot == NO_SLOT and not (sequence.bad_word_ids or sequence.sampling.min_tokens)

    def context(self) -> Context:
        sequence, device = self.sequence, self._batch_sampler.device
        return Context(
            bias_row(sequence, device),
            masked_behind(sequence),
            self._seen(),
            output_counts(sequence, sequence.vocab_size, device),
        )

    def _seen(self) -> torch.Tensor | None:
        sampling = self.sequence.sampling
        if sampling.repetition_penalty == 1.0:
            return None
        seen = np.zeros(self.sequence.vocab_size, dtype=bool)
        seen[self.sequence.token_ids[-sampling.penalty_window :]] = True
        return torch.from_numpy(seen).to(self._batch_sampler.device)

    def rows(self, tree: DraftTree, masks: np.ndarray | None, mode: LogprobsMode | None) -> Iterator[SamplingRow]:
        committed = self.counts.sequence
        drafted = self.sequence.token_ids[len(committed) :].tolist()
        return rows_of(committed, self.counts.slot, drafted, tree, masks, self._kind(mode))

    def _kind(self, mode: LogprobsMode | None) -> int:
        if mode is None or self.sequence.logprobs is None:
            return NO_LOGPROBS
        if mode == "raw_logprobs":
            return RAW
        return FILTERED if needs_filters(self.sequence.sampling) else PROCESSED


class CudaBatchSampler:
    """`BatchSampler` in Triton kernels."""

    def __init__(self, logits: torch.Tensor, capture: Capture = capture) -> None:
        """Draw in place from rows of a forward's `logits [num_rows, vocab] float32`; other rows overwrite its first."""
        self.device = logits.device
        num_rows, self._vocab_size = logits.shape
        self._most_slots = most_slots(num_rows)
        self._layout = SamplingRowLayout(self._most_slots + 1, num_rows)
        self._free = list(range(self._most_slots, NO_SLOT, -1))
        self._graphs = SamplingGraphs(logits, self._layout, capture)
        self._table = Upload(self._graphs.table)
        self._ahead = torch.zeros(MOST_AHEAD * num_rows, dtype=torch.int32, device=self.device)  # tokens of draws
        self._download_ahead = Download(self._ahead)
        # counts keep their sequences alive, and so the ids valid
        self._counts = weakref.WeakValueDictionary[int, TokenCounts]()

    @property
    def out(self) -> torch.Tensor:
        return self._graphs.out

    def sampler(self, sequence: Sequence) -> CudaSampler:
        """Return a sampler. Engine and drafter share the token counts of a sequence.

        Raises RuntimeError if all slots are taken, ValueError for a bias of a token outside the vocabulary.
        """
        if not needs_slot(sequence.sampling):
            return CudaSampler(self, sequence, TokenCounts(sequence, NO_SLOT))
        if known := self._counts.get(id(sequence)):
            return CudaSampler(self, sequence, known)
        if not self._free:
            raise RuntimeError(f"more than {self._most_slots} sequences with penalties or a bias at a time")
        counts = TokenCounts(sequence, self._free.pop())
        weakref.finalize(counts, self._free.append, counts.slot)
        self._counts[id(sequence)] = counts
        return CudaSampler(self, sequence, counts)

    def walks(
        self,
        samplers: Many[CudaSampler],
        trees: Many[DraftTree],
        logits: Many[torch.Tensor],
        with_candidates: bool = False,
        masks: Masks = NO_MASKS,
        logprobs_mode: LogprobsMode | None = None,
    ) -> list[Walk]:
        given = zip(samplers, trees, masks or [None] * len(trees), strict=True)
        rows = [row for sampler, tree, words in given for row in sampler.rows(tree, words, logprobs_mode)]
        if not rows:
            return []
        found = self._draw(samplers, rows, together(logits), with_candidates=with_candidates)
        walks, start, drawn = list[Walk](), 0, found.tokens.tolist()
        ids = found.candidates.astype(np.int64) if with_candidates else found.candidates
        for sampler, tree in zip(samplers, trees, strict=True):
            end = start + 1 + len(tree.token_ids)
            candidates = (ids[start:end], found.candidate_logprobs[start:end]) if with_candidates else None
            num_top = num_top_of(sampler.sequence) if rows[start].logprobs else None
            walks.append(_walk(tree, drawn, start, candidates, found, num_top))
            start = end
        return walks

    def draw_ahead(self, samplers: Many[CudaSampler], num_ahead: int) -> None:
        """Queue a draw from a forward's first rows, `num_ahead` positions after the tokens that the host knows."""
        rows = [SamplingRow(each.sequence, NO_SLOT, [0] * num_ahead) for each in samplers]
        self._layout.fill(self._table.buffer(), rows, {})
        self._table.send()
        self._graphs.draw(any(needs_filters(each.sequence.sampling) for each in samplers))
        self._ahead.view(MOST_AHEAD, -1)[num_ahead] = self._graphs.tokens

    def put_tokens(self, token_ids: torch.Tensor) -> None:
        """Write the newest draw's tokens, or some token in place of none."""
        torch.clamp(self._graphs.tokens[: len(token_ids)], min=0, out=token_ids)

    def drawn_ahead(self, number: int, num_rounds: int) -> list[tuple[list[int], bool]]:
        """Wait for draws of `number` sequences. Return the tokens of each until one lacks one, and whether it does."""
        drawn = self._download_ahead.wait().reshape(MOST_AHEAD, -1)[:num_rounds, :number]
        end = next((step for step, tokens in enumerate(drawn) if tokens.min() < 0), num_rounds)
        have_failed = (drawn[: end + 1].min(axis=0) < 0).tolist()
        return [*zip(drawn[:end].T.tolist(), have_failed, strict=True)]

    def top_candidates(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        anyone = Sequence("candidates", [0], GREEDY, self._vocab_size)
        found = self._drawn([SamplingRow(anyone, NO_SLOT, [])] * len(logits), logits, {}, True, True)
        return found.candidates.astype(np.int64), found.candidate_logprobs

    def logprobs(
        self,
        sampler: CudaSampler,
        tree: DraftTree,
        logits: torch.Tensor,
        walked: Walk,
        mode: LogprobsMode,
        mask: np.ndarray | None = None,
    ) -> TokenLogprobs:
        rows = list(sampler.rows(tree, mask, mode))
        for row, token_id in zip((0, *(node + 1 for node in walked.path)), walked.drawn, strict=False):
            rows[row] = replace(rows[row], token=token_id)
        draws = mode == "processed_logprobs"
        found = self._draw([sampler] if draws else [], rows, logits, draws)  # only a draw counts the sequence's tokens
        return found.logprobs_of(
            [0, *(node + 1 for node in walked.path)][: len(walked.drawn)], num_top_of(sampler.sequence)
        )

    def _draw(
        self,
        samplers: Many[CudaSampler],
        rows: list[SamplingRow],
        logits: torch.Tensor,
        draws: bool = True,
        with_candidates: bool = False,
    ) -> SampledRows:
        counted = {each.counts.slot: each.counts for each in samplers if each.counts.slot}  # forks share a slot
        try:
            news = {slot: counts.news(self._graphs.slots) for slot, counts in counted.items()}
            return self._drawn(rows, logits, news, draws, with_candidates)
        except torch.OutOfMemoryError:
            for counts in counted.values():
                counts.num_counted = None  # the news may be lost: the next draw counts anew
            raise

    def _drawn(
        self,
        rows: list[SamplingRow],
        logits: torch.Tensor,
        news: dict[int, tuple[np.ndarray, np.ndarray]],
        draws: bool,
        with_candidates: bool,
    ) -> SampledRows:
        found: list[SampledRows] = []
        num_rows = self._layout.num_rows
        for start in range(0, len(rows), num_rows):
            part = rows[start : start + num_rows]
            first = self._placed(logits[start : start + len(part)])
            placed = [*[None] * first, *part]
            self._layout.fill(self._table.buffer(), placed, news)
            self._table.send()
            mask_rows(self._graphs.slots, placed)
            all_params = {id(row.sequence): row.sequence.sampling for row in part}  # rows of a tree share them
            is_filtered = any(map(needs_filters, all_params.values()))
            out = self._graphs.replay(draws, is_filtered, with_candidates, any(row.logprobs for row in part))
            found.append(SampledRows._make(each[first : len(placed)] for each in out))
            news = {}
        return SampledRows._make(map(_joined, zip(*found, strict=True)))

    def _placed(self, logits: torch.Tensor) -> int:
        """Return the index of the first row in the graphs' buffer; rows that lie elsewhere are copied there."""
        buffer = self._graphs.logits
        distance = logits.data_ptr() - buffer.data_ptr()
        if 0 <= distance < buffer.nbytes:
            return distance // (buffer.nbytes // len(buffer))
        buffer[: len(logits)] = logits
        return 0


def _joined(parts: Many[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _walk(
    tree: DraftTree,
    tokens: list[int],
    root: int,
    candidates: Candidates | None,
    found: SampledRows,
    num_top: int | None,
) -> Walk:
    """Walk along the drawn tokens, up to a row from which none was drawn."""
    token, draft_ids = tokens[root], tree.token_ids
    if token >= 0 and token not in draft_ids:  # the usual case
        own = None if num_top is None else found.logprobs_of(slice(root, root + 1), num_top)
        return Walk([], [token], None, candidates, own)
    parent, path, drawn, rows = ROOT, list[int](), list[int](), [root]
    if token >= 0:
        drawn.append(token)
        for node, token_id in enumerate(draft_ids):
            if token_id == token and tree.parents[node] == parent:
                path.append(node)
                rows.append(root + 1 + node)
                token, parent = tokens[root + 1 + node], node
                if token < 0:
                    break
                drawn.append(token)
    own = None if num_top is None else found.logprobs_of(rows[: len(drawn)], num_top)
    return Walk(path, drawn, None if token >= 0 else parent + 1, candidates, own)
