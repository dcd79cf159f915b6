"""The best token of every row with its noise: of blocks of tokens first, then of the blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.drawing.cuda.cuda_noise import gumbel, noise_words
from swiftbatch.worker.drawing.cuda.parameters import POSITION, SLOT, TEMPERATURE, real, seed_of, whole
from swiftbatch.worker.drawing.cuda.scores import is_greedy, rank_of, row_peak, temper, token_of
from swiftbatch.worker.drawing.filters.filter_kernels import LOG_MIN_P

SMALLEST = tl.constexpr(-0x8000000000000000)


@triton.jit
def kept_by_cut(scores, tokens, cut_scores_ptr, cut_tokens_ptr, row):
    """Return whether tokens lie from a row's cut on, in the order (score, token)."""
    score, first = tl.load(cut_scores_ptr + row), tl.load(cut_tokens_ptr + row)
    return (scores > score) | ((scores == score) & (tokens >= first))


@triton.jit
def best_of_blocks(
    rows_ptr,
    scores_ptr,
    peaks_ptr,
    cut_scores_ptr,
    cut_tokens_ptr,
    best_ptr,
    vocab,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_CUT: tl.constexpr,
):
    """The rank of each block's best token, `[num_rows, num_blocks] int64`."""
    row, block = tl.program_id(0), tl.program_id(1)
    if whole(rows_ptr, row, SLOT) < 0:
        return
    num_rows, num_blocks = tl.num_programs(0), tl.num_programs(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    values = tl.load(scores_ptr + row.to(tl.int64) * vocab + tokens, mask=inside, other=float("-inf"))
    peak = row_peak(peaks_ptr + (num_rows + row) * num_blocks, num_blocks, WIDTH)
    if not is_greedy(rows_ptr, row, peak):
        temperature = real(rows_ptr, row, TEMPERATURE)
        values = temper(values, peak, temperature)
        kept = values >= temper(peak, peak, temperature) + real(rows_ptr, row, LOG_MIN_P)
        if IS_CUT:
            kept = kept & kept_by_cut(values, tokens, cut_scores_ptr, cut_tokens_ptr, row)
        values = tl.where(kept, values, float("-inf"))
        if tl.max(kept.to(tl.int32), 0) > 0:  # else noise changes nothing
            low, high = whole(rows_ptr, row, POSITION), whole(rows_ptr, row, POSITION + 1)
            values += gumbel(noise_words(seed_of(rows_ptr, row), low, high, block * BLOCK, BLOCK))
    ranks = tl.where(inside, rank_of(values, tokens), SMALLEST)
    tl.store(best_ptr + row * num_blocks + block, tl.max(ranks, 0))


@triton.jit
def best_of_rows(rows_ptr, peaks_ptr, best_ptr, tokens_ptr, highest_ptr, num_blocks, WIDTH: tl.constexpr):
    """Each row's token, -1 where nothing can be drawn, and its highest logit, NaN where there is any."""
    row = tl.program_id(0)
    if whole(rows_ptr, row, SLOT) < 0:
        tl.store(tokens_ptr + row, -1)
        tl.store(highest_ptr + row, float("nan"))
        return
    blocks = tl.arange(0, WIDTH)
    rank = tl.max(tl.load(best_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=SMALLEST), 0)
    highest = row_peak(peaks_ptr + row * num_blocks, num_blocks, WIDTH)
    tl.store(highest_ptr + row, highest)
    tl.store(tokens_ptr + row, tl.where(tl.abs(highest) < float("inf"), token_of(rank), -1))
