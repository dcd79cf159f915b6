"""Triton kernels of log-probabilities: in two launches for all rows that ask, in float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from swiftbatch.jobs.logprobs import NO_TOKEN
from swiftbatch.jobs.sampling_params import MAX_TOP_LOGPROBS
from swiftbatch.worker.sampling.cuda import sampling_rows
from swiftbatch.worker.sampling.cuda.logits_kernels import (
    TEMPERATURE,
    number_of,
    real,
    row_peak,
    token_of,
    whole,
)
from swiftbatch.worker.sampling.cuda.top_candidates import SMALLEST, kept_scores, peak_and_log_sum, store_block

LOGPROBS = tl.constexpr(sampling_rows.column_of("logprobs"))
TOKEN = tl.constexpr(sampling_rows.column_of("token"))
NO_LOGPROBS = tl.constexpr(sampling_rows.NO_LOGPROBS)
RAW = tl.constexpr(sampling_rows.RAW)
FILTERED = tl.constexpr(sampling_rows.FILTERED)
NUM_WARPS, ROW_WARPS = 4, 8


@triton.jit
def reported_scores(
    rows_ptr, row, logits_ptr, logits_stride, scores_ptr, peaks_ptr, cuts_ptr, tokens, inside, vocab, num_blocks, kind,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the logits of tokens, or their scores that the row's token was drawn from, without noise."""
    if kind == RAW:
        values = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + tokens, mask=inside, other=float("-inf"))
    else:
        values = tl.load(scores_ptr + row.to(tl.int64) * vocab + tokens, mask=inside, other=float("-inf"))
        if real(rows_ptr, row, TEMPERATURE) > 0.0:
            peak = row_peak(peaks_ptr + (tl.num_programs(0) + row) * num_blocks, num_blocks, WIDTH)
            cut = tl.load(cuts_ptr + row, mask=kind == FILTERED, other=0)
            values, _ = kept_scores(rows_ptr, row, values, tokens, peak, cut)
    return values


@triton.jit
def logprobs_of_blocks(
    rows_ptr, logits_ptr, logits_stride, scores_ptr, peaks_ptr, cuts_ptr, ranks_ptr, tops_ptr, masses_ptr, vocab,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Store the best tokens of every block of a row's reported scores, as `store_block` does."""
    row, block, num_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    kind = whole(rows_ptr, row, LOGPROBS)
    if kind == NO_LOGPROBS:
        return
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    values = reported_scores(
        rows_ptr, row, logits_ptr, logits_stride, scores_ptr, peaks_ptr, cuts_ptr, tokens, inside, vocab, num_blocks,
        kind, WIDTH,
    )  # fmt: skip
    store_block(values, tokens, inside, row * num_blocks + block, ranks_ptr, tops_ptr, masses_ptr, TOP)


@triton.jit
def logprob_of(score, peak, log_mass):
    """Return a float32, -inf if the score or the row's best score is not finite."""
    is_finite = (tl.abs(peak) < float("inf")) & (tl.abs(score) < float("inf"))
    return tl.where(is_finite, score.to(tl.float64) - peak - log_mass, float("-inf")).to(tl.float32)


@triton.jit
def logprobs_of_rows(
    rows_ptr, logits_ptr, logits_stride, scores_ptr, peaks_ptr, cuts_ptr, ranks_ptr, tops_ptr, masses_ptr, tokens_ptr,
    numbers_ptr, vocab, num_blocks,
    NO_TOKEN: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, NUM_RANKS: tl.constexpr,
):  # fmt: skip
    """Store the bits of the log-probability of each row's token, then ids and bits of the `TOP` best.

    Impossible tokens have -inf, and no id.
    """
    row = tl.program_id(0)
    kind = whole(rows_ptr, row, LOGPROBS)
    if kind == NO_LOGPROBS:
        return
    peak, log_mass = peak_and_log_sum(tops_ptr + row * num_blocks, masses_ptr + row * num_blocks, num_blocks, WIDTH)
    known = whole(rows_ptr, row, TOKEN)
    token = tl.where(known >= 0, known, tl.load(tokens_ptr + row))
    value = reported_scores(
        rows_ptr, row, logits_ptr, logits_stride, scores_ptr, peaks_ptr, cuts_ptr, token, token >= 0, vocab, num_blocks,
        kind, WIDTH,
    )  # fmt: skip
    numbers_ptr += row * (1 + 2 * TOP)
    tl.store(numbers_ptr, logprob_of(value, peak, log_mass).to(tl.int32, bitcast=True))
    places = tl.arange(0, NUM_RANKS)
    ranks = tl.load(ranks_ptr + row * num_blocks * TOP + places, mask=places < num_blocks * TOP, other=SMALLEST)
    for place in tl.static_range(TOP):
        best = tl.max(ranks, 0)
        ranks = tl.where(ranks == best, SMALLEST, ranks)
        logprob = logprob_of(number_of((best >> 32).to(tl.int32)), peak, log_mass)
        tl.store(numbers_ptr + 1 + 2 * place, tl.where(logprob > float("-inf"), token_of(best), NO_TOKEN))
        tl.store(numbers_ptr + 2 + 2 * place, logprob.to(tl.int32, bitcast=True))


class RowLogprobs:
    """Computes log-probabilities after a draw. Rows that ask for none cost no work, and their results are arbitrary."""

    def __init__(
        self, logits: torch.Tensor, rows: torch.Tensor, scores: torch.Tensor, peaks: torch.Tensor, cuts: torch.Tensor
    ) -> None:
        """Take fixed buffers: `logits` and penalised `scores [num_rows, vocab] float32`, and the table of rows.

        `peaks [2, num_rows, num_blocks] int32` order the best of each block, before and after the penalties. `cuts
        [num_rows] int64` are the lowest ranks that filters keep.
        """
        self._given = rows, logits, logits.stride(0), scores, peaks, cuts
        num_rows, self._vocab_size = logits.shape
        self._grid = (num_rows, peaks.shape[2])
        device = logits.device
        self._found = (
            torch.empty(*self._grid, MAX_TOP_LOGPROBS, dtype=torch.int64, device=device),
            torch.empty(self._grid, dtype=torch.int32, device=device),
            torch.empty(self._grid, dtype=torch.float64, device=device),
        )

    def launch(self, tokens: torch.Tensor, numbers: torch.Tensor) -> None:
        """Fill `numbers [num_rows, 1 + 2 * MAX_TOP_LOGPROBS] int32` as `TokenLogprobs` has them.

        They are of the drawn `tokens [num_rows] int32`, unless the table has others.
        """
        num_rows, num_blocks = self._grid
        width, top = triton.next_power_of_2(num_blocks), MAX_TOP_LOGPROBS
        logprobs_of_blocks[self._grid](
            *self._given, *self._found, self._vocab_size,
            BLOCK=sampling_rows.BLOCK, WIDTH=width, TOP=top, num_warps=NUM_WARPS,
        )  # fmt: skip
        logprobs_of_rows[(num_rows,)](
            *self._given, *self._found, tokens, numbers, self._vocab_size, num_blocks,
            NO_TOKEN=NO_TOKEN, WIDTH=width, TOP=top, NUM_RANKS=triton.next_power_of_2(num_blocks * top),
            num_warps=ROW_WARPS,
        )  # fmt: skip
