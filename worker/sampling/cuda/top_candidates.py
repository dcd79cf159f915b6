"""Triton kernels that find each row's best tokens, for drafters and for the ranking of a draft model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from swiftbatch.worker.sampling.batch_sampler import UNLIKELY
from swiftbatch.worker.sampling.cuda.filter_kernels import LOG_MIN_P, TOP_K_COLUMN, rank_in_row
from swiftbatch.worker.sampling.cuda.logits_kernels import (
    POSITION,
    SLOT,
    TEMPERATURE,
    gumbel,
    gumbel_bound,
    is_greedy,
    noise_key_of,
    noise_words,
    number_of,
    order_of,
    penalise_blocks,
    rank_of,
    real,
    row_peak,
    temper,
    token_of,
    whole,
)
from swiftbatch.worker.sampling.cuda.sampling_rows import (
    BLOCK,
    SlotBuffers,
    refuse_vocab,
)
from swiftbatch.worker.sampling.draft_tree import TOP_K

SMALLEST = tl.constexpr(-0x8000000000000000)


@triton.jit
def kept_scores(rows_ptr, row, scores, tokens, peak, cut):
    """Return scores divided by the temperature, -inf for tokens that the filters remove, and a mask of the others.

    `cut` is the lowest rank that the searched filters keep, None without such filters.
    """
    temperature = real(rows_ptr, row, TEMPERATURE)
    values = temper(scores, peak, temperature)
    kept = values >= temper(peak, peak, temperature) + real(rows_ptr, row, LOG_MIN_P)
    if cut is not None:
        kept = kept & (rank_in_row(values, tokens) >= cut)
    return tl.where(kept, values, float("-inf")), kept


@triton.jit
def best_of_block(rows_ptr, row, scores_ptr, cuts_ptr, peak, block, vocab, IS_EXACT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rank of a block's best token among those that the cut keeps.

    Without `IS_EXACT`, it is the rank that the token would have with the noise's bound: this one or a higher one.
    """
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    values = tl.load(scores_ptr + row.to(tl.int64) * vocab + tokens, mask=inside, other=float("-inf"))
    if not is_greedy(rows_ptr, row, peak):
        cut = None if cuts_ptr is None else tl.load(cuts_ptr + row)
        values, kept = kept_scores(rows_ptr, row, values, tokens, peak, cut)
        if tl.max(kept.to(tl.int32), 0) > 0:  # without such tokens, noise changes nothing
            low, high = whole(rows_ptr, row, POSITION), whole(rows_ptr, row, POSITION + 1)
            words = noise_words(noise_key_of(rows_ptr, row), low, high, block * BLOCK, BLOCK)
            values += gumbel(words) if IS_EXACT else gumbel_bound(words)
    return tl.max(tl.where(inside, rank_of(values, tokens), SMALLEST), 0)


@triton.jit
def bounds_of_blocks(
    rows_ptr, scores_ptr, peaks_ptr, cuts_ptr, bounds_ptr, vocab, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """Store a rank at or above that of each block's best token, `[num_rows, num_blocks] int64`."""
    row, block = tl.program_id(0), tl.program_id(1)
    if whole(rows_ptr, row, SLOT) < 0:
        return
    num_rows, num_blocks = tl.num_programs(0), tl.num_programs(1)
    peak = row_peak(peaks_ptr + (num_rows + row) * num_blocks, num_blocks, WIDTH)
    bound = best_of_block(rows_ptr, row, scores_ptr, cuts_ptr, peak, block, vocab, False, BLOCK)
    tl.store(bounds_ptr + row * num_blocks + block, bound)


@triton.jit
def best_of_rows(
    rows_ptr, scores_ptr, peaks_ptr, cuts_ptr, bounds_ptr, tokens_ptr, highest_ptr, vocab, num_blocks,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store each row's token, -1 if nothing can be drawn, and its highest logit, NaN if there is any.

    Noise in float64 is computed only in blocks that may have the token, nearly always a single block.
    """
    row = tl.program_id(0)
    if whole(rows_ptr, row, SLOT) < 0:
        tl.store(tokens_ptr + row, -1)
        tl.store(highest_ptr + row, float("nan"))
        return
    peak = row_peak(peaks_ptr + (tl.num_programs(0) + row) * num_blocks, num_blocks, WIDTH)
    blocks = tl.arange(0, WIDTH)
    bounds = tl.load(bounds_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=SMALLEST)
    bound, best = tl.max(bounds, 0), tl.full([], SMALLEST, tl.int64)
    while bound > best:
        block = token_of(bound) // BLOCK
        best = tl.maximum(best, best_of_block(rows_ptr, row, scores_ptr, cuts_ptr, peak, block, vocab, True, BLOCK))
        bounds = tl.where(bounds == bound, SMALLEST, bounds)
        bound = tl.max(bounds, 0)
    highest = row_peak(peaks_ptr + row * num_blocks, num_blocks, WIDTH)
    tl.store(highest_ptr + row, highest)
    tl.store(tokens_ptr + row, tl.where(tl.abs(highest) < float("inf"), token_of(best), -1))


BLOCK_WARPS = 4
ROW_WARPS = 8


@triton.jit
def best_ranks(ranks, out_ptr, TOP: tl.constexpr):
    """Store the `TOP` highest ranks; all ranks are different."""
    for place in tl.static_range(TOP):
        best = tl.max(ranks, 0)
        tl.store(out_ptr + place, best)
        ranks = tl.where(ranks == best, SMALLEST, ranks)


@triton.jit
def store_block(logits, tokens, inside, place, ranks_ptr, peaks_ptr, sums_ptr, TOP: tl.constexpr):
    """Store a block's best ranks, its best order, and the sum of e^(logit - best) in a fixed order.

    The sum is computed in its own type, float32 or float64.
    """
    best_ranks(tl.where(inside, rank_of(logits, tokens), SMALLEST), ranks_ptr + place * TOP, TOP)
    order = tl.max(order_of(logits), 0)
    peak = number_of(order)
    shift = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
    distances = logits.to(sums_ptr.dtype.element_ty) - shift.to(sums_ptr.dtype.element_ty)
    tl.store(peaks_ptr + place, order)
    tl.store(sums_ptr + place, tl.sum(tl.exp(distances), 0))


@triton.jit
def candidates_of_blocks(
    rows_ptr, logits_ptr, logits_stride, ranks_ptr, peaks_ptr, sums_ptr, vocab, BLOCK: tl.constexpr, TOP: tl.constexpr
):
    """Store the best tokens of every block of logits, as `store_block` does."""
    row, block = tl.program_id(0), tl.program_id(1)
    if whole(rows_ptr, row, SLOT) < 0:
        return
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + tokens, mask=inside, other=float("-inf"))
    store_block(logits, tokens, inside, row * tl.num_programs(1) + block, ranks_ptr, peaks_ptr, sums_ptr, TOP)


@triton.jit
def peak_and_log_sum(peaks_ptr, sums_ptr, num_blocks, WIDTH: tl.constexpr):
    """Return the best logit and the logarithm of the sum of e^(logit - best), both float64."""
    blocks = tl.arange(0, WIDTH)
    inside = blocks < num_blocks
    orders = tl.load(peaks_ptr + blocks, mask=inside, other=-0x80000000)
    peak = number_of(tl.max(orders, 0))
    parts = tl.load(sums_ptr + blocks, mask=inside, other=0.0)
    peak = peak.to(parts.dtype)
    distances = tl.where(inside, number_of(orders).to(parts.dtype) - peak, float("-inf"))
    total = tl.sum((parts * tl.exp(distances)).to(tl.float64), 0)
    return peak.to(tl.float64), tl.log(total)


@triton.jit
def candidates_of_rows(
    rows_ptr, ranks_ptr, peaks_ptr, sums_ptr, ids_ptr, logprobs_ptr, num_blocks,
    UNLIKELY: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Store ids and log-probabilities `[num_rows, TOP]`; a padding row gets token 0 with a very low log-probability."""
    row = tl.program_id(0)
    ids, logprobs = ids_ptr + row * TOP, logprobs_ptr + row * TOP
    if whole(rows_ptr, row, SLOT) < 0:
        tl.store(ids + tl.arange(0, TOP), tl.zeros([TOP], tl.int32))
        tl.store(logprobs + tl.arange(0, TOP), tl.full([TOP], UNLIKELY, tl.float32))
        return
    peaks, sums = peaks_ptr + row * num_blocks, sums_ptr + row * num_blocks
    peak, log_sum = peak_and_log_sum(peaks, sums, num_blocks, WIDTH)
    total = tl.where(tl.abs(peak) < float("inf"), peak + log_sum, peak).to(tl.float32)
    places = tl.arange(0, WIDTH * TOP)
    ranks = tl.load(ranks_ptr + row * num_blocks * TOP + places, mask=places < num_blocks * TOP, other=SMALLEST)
    for place in tl.static_range(TOP):
        best = tl.max(ranks, 0)
        ranks = tl.where(ranks == best, SMALLEST, ranks)
        logprob = number_of((best >> 32).to(tl.int32)) - total
        tl.store(ids + place, token_of(best))
        tl.store(logprobs + place, tl.where(logprob == logprob, logprob, UNLIKELY))


class TopCandidates:
    """Finds the best tokens in two launches, the same for all rows."""

    def __init__(self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Find them in fixed buffers: `logits [num_rows, vocab] float32`, and the table of sampling_rows.py.

        `ids [num_rows, TOP_K] int32` get the best first, equal logits by id; `logprobs` of the same shape, float32, are
        all very unlikely in a row with NaN.
        """
        self._logits, self._rows, self._ids, self._logprobs = logits, rows, ids, logprobs
        num_rows, vocab_size = logits.shape
        refuse_vocab(vocab_size, least=TOP_K)
        self._grid = (num_rows, triton.cdiv(vocab_size, BLOCK))
        device = logits.device
        self._ranks = torch.empty(*self._grid, TOP_K, dtype=torch.int64, device=device)
        self._peaks = torch.empty(self._grid, dtype=torch.int32, device=device)
        self._sums = torch.empty(self._grid, device=device)

    def launch(self) -> None:
        num_rows, num_blocks = self._grid
        candidates_of_blocks[self._grid](
            self._rows, self._logits, self._logits.stride(0), self._ranks, self._peaks, self._sums,
            self._logits.shape[1], BLOCK=BLOCK, TOP=TOP_K, num_warps=BLOCK_WARPS,
        )  # fmt: skip
        candidates_of_rows[(num_rows,)](
            self._rows, self._ranks, self._peaks, self._sums, self._ids, self._logprobs, num_blocks,
            UNLIKELY=UNLIKELY, WIDTH=triton.next_power_of_2(num_blocks), TOP=TOP_K, num_warps=ROW_WARPS,
        )  # fmt: skip


# Ranking of a draft model's tokens, with the penalty and the noise that the target will use.


NUM_WARPS = 4


@dataclass(frozen=True)
class RankingBuffers:
    """Fixed buffers of `Ranking`."""

    logits: torch.Tensor  # [num_rows, vocab] float32, penalised in place
    rows: torch.Tensor  # [num_rows, NUM_WORDS] int32: the table of sampling_rows.py
    ancestors: torch.Tensor  # [num_rows, NUM_DRAFTED] int32, as in `SamplingBuffers`
    slots: SlotBuffers
    leaving: torch.Tensor  # [num_slots, NUM_DRAFTED] int32, as in `SamplingBuffers`
    ids: torch.Tensor  # [num_rows, num_candidates] int32, written: best first; `num_candidates` is a power of 2
    # [num_rows, num_candidates] float32, written: logarithms; -inf for tokens that are cut off
    confidences: torch.Tensor


@triton.jit
def rank_blocks(
    rows_ptr, scores_ptr, peaks_ptr, ranks_ptr, tops_ptr, sums_ptr, vocab,
    SPREAD: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Program (row, block): (score + T * noise) / spread of what min-p keeps, as in worker/drafters/ranking.py."""
    row, block = tl.program_id(0), tl.program_id(1)
    if whole(rows_ptr, row, SLOT) < 0:
        return
    num_rows, num_blocks = tl.num_programs(0), tl.num_programs(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    values = tl.load(scores_ptr + row.to(tl.int64) * vocab + tokens, mask=inside, other=float("-inf"))
    temperature = real(rows_ptr, row, TEMPERATURE)
    if (temperature > 0.0) & (whole(rows_ptr, row, TOP_K_COLUMN) != 1):
        peak = row_peak(peaks_ptr + (num_rows + row) * num_blocks, num_blocks, WIDTH)
        kept = values >= peak + temperature * real(rows_ptr, row, LOG_MIN_P)
        values = tl.where(kept, values, float("-inf"))
        if tl.max(kept.to(tl.int32), 0) > 0:  # without such tokens, noise changes nothing
            low, high = whole(rows_ptr, row, POSITION), whole(rows_ptr, row, POSITION + 1)
            words = noise_words(noise_key_of(rows_ptr, row), low, high, block * BLOCK, BLOCK)
            values += temperature * gumbel_bound(words)  # 2^-10 more for all tokens changes no rank
    values = values / SPREAD
    store_block(values, tokens, inside, row * num_blocks + block, ranks_ptr, tops_ptr, sums_ptr, TOP)


class Ranking:
    """Ranks candidates in three launches, the same for all rows."""

    def __init__(self, buffers: RankingBuffers, spread: float) -> None:
        """`spread` is the typical error of the draft model's logits."""
        self._buffers, self._spread = buffers, spread
        num_rows, vocab_size = buffers.logits.shape
        refuse_vocab(vocab_size, least=buffers.ids.shape[1])
        self._grid = (num_rows, triton.cdiv(vocab_size, BLOCK))
        self._width, self._top = triton.next_power_of_2(self._grid[1]), buffers.ids.shape[1]
        device = buffers.logits.device
        self._peaks = torch.empty(2, *self._grid, dtype=torch.int32, device=device)
        self._ranks = torch.empty(*self._grid, self._top, dtype=torch.int64, device=device)
        self._tops = torch.empty(self._grid, dtype=torch.int32, device=device)
        self._sums = torch.empty(self._grid, device=device)

    def launch(self) -> None:
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
