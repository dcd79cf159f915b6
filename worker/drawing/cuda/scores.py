"""Changes a row's logits in front of the noise: bias, masks, penalties, temperature; and how scores are ordered."""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.drawing.cuda.parameters import (
    DEPTH,
    FREQUENCY,
    HAS_BIAS,
    IS_RESTRICTED,
    MASKS,
    NUM_DRAFTED,
    NUM_MASKED,
    PENALTY,
    PRESENCE,
    SLOT,
    TEMPERATURE,
    WINDOW,
    real,
    whole,
)

LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def order_of(x):
    """An int32 that orders float32 as it is ordered: both zeros are one, and NaN is above all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, LARGEST, tl.where(bits < 0, bits ^ LARGEST, bits))


@triton.jit
def number_of(order):
    """The float32 that has this order."""
    return tl.where(order < 0, order ^ LARGEST, order).to(tl.float32, bitcast=True)


@triton.jit
def rank_of(x, token_ids):
    """An int64 that orders tokens by their float32 and puts the lower one of equals above the other."""
    return (order_of(x).to(tl.int64) << 32) | (token_ids ^ LARGEST).to(tl.int64)


@triton.jit
def token_of(rank):
    """The token of a rank, int32."""
    return (rank & 0xFFFFFFFF).to(tl.int32) ^ LARGEST


@triton.jit
def occurrences(rows_ptr, row, counts_ptr, ancestors_ptr, leaving_ptr, tokens, inside, vocab):
    """Count how often each token `[BLOCK]` lies in the penalty window at a row, int32.

    The slot's counts are those behind its committed tokens. Each token of the row's own path comes into the window, and
    one goes: a committed one, listed in `leaving`, or, where that has -1, in a short window, one of the path itself.
    """
    slot, depth, window = whole(rows_ptr, row, SLOT), whole(rows_ptr, row, DEPTH), whole(rows_ptr, row, WINDOW)
    found = tl.load(counts_ptr + slot.to(tl.int64) * vocab + tokens, mask=inside, other=0)
    for i in range(tl.maximum(depth - window, 0), depth):
        found += (tokens == tl.load(ancestors_ptr + row * NUM_DRAFTED + i)).to(tl.int32)
    for i in range(0, depth):
        found -= (tokens == tl.load(leaving_ptr + slot * NUM_DRAFTED + i)).to(tl.int32)
    return found


@triton.jit
def penalise(scores, found, penalty):
    """Divide positive, multiply negative scores of the tokens that were found (Keskar et al. 2019)."""
    penalised = tl.where(scores < 0.0, scores * penalty, tl.math.div_rn(scores, penalty))
    return tl.where(found > 0, penalised, scores)


@triton.jit
def restricted(rows_ptr, row, allowed_ptr, scores, tokens, inside, vocab):
    """Leave only what the row's mask has, where it has one."""
    if whole(rows_ptr, row, IS_RESTRICTED) != 0:
        words = allowed_ptr + row.to(tl.int64) * tl.cdiv(vocab, 32)
        word = tl.load(words + tokens // 32, mask=inside, other=0)
        scores = tl.where((word >> (tokens % 32)) & 1 != 0, scores, float("-inf"))
    return scores


@triton.jit
def biased(rows_ptr, row, bias_ptr, masked_ptr, scores, tokens, inside, vocab):
    """Add the slot's bias, and mask what can't come at this row."""
    if whole(rows_ptr, row, HAS_BIAS) != 0:
        slot = whole(rows_ptr, row, SLOT).to(tl.int64)
        scores += tl.load(bias_ptr + slot * vocab + tokens, mask=inside, other=0.0)
    for i in range(0, whole(rows_ptr, row, MASKS)):
        scores = tl.where(tokens == tl.load(masked_ptr + row * NUM_MASKED + i), float("-inf"), scores)
    return scores


@triton.jit
def held_back(rows_ptr, row, output_ptr, ancestors_ptr, scores, tokens, inside, vocab):
    """Take off what the penalties by counts say, in float64: a count's product is exact there, fused or not.

    The slot's counts are those of its committed output; the row's own path comes on top.
    """
    frequency, presence = real(rows_ptr, row, FREQUENCY), real(rows_ptr, row, PRESENCE)
    if (frequency != 0.0) | (presence != 0.0):
        slot = whole(rows_ptr, row, SLOT).to(tl.int64)
        found = tl.load(output_ptr + slot * vocab + tokens, mask=inside, other=0)
        for i in range(0, whole(rows_ptr, row, DEPTH)):
            found += (tokens == tl.load(ancestors_ptr + row * NUM_DRAFTED + i)).to(tl.int32)
        taken = frequency.to(tl.float64) * found.to(tl.float64) + presence.to(tl.float64)
        scores = tl.where(found > 0, scores - taken.to(tl.float32), scores)
    return scores


@triton.jit
def row_peak(peaks_ptr, num_blocks, WIDTH: tl.constexpr):
    """The best of all blocks of a row, float32; NaN where there is any."""
    blocks = tl.arange(0, WIDTH)
    return number_of(tl.max(tl.load(peaks_ptr + blocks, mask=blocks < num_blocks, other=-0x80000000), 0))


@triton.jit
def temper(scores, peak, temperature):
    """Scores over temperature; where that leaves float32, their distances from the best one, which draw the same."""
    leaves = (temperature < 1.0) & (tl.abs(tl.math.div_rn(peak, temperature)) == float("inf"))
    shift = tl.where(leaves, peak, 0.0)
    return tl.math.div_rn(scores - shift, temperature)


@triton.jit
def is_greedy(rows_ptr, row, peak):
    """Return whether a row's best token is drawn without noise."""
    return (real(rows_ptr, row, TEMPERATURE) == 0.0) | (tl.abs(peak) == float("inf"))


@triton.jit
def penalise_blocks(
    logits_ptr,
    logits_stride,
    rows_ptr,
    counts_ptr,
    ancestors_ptr,
    leaving_ptr,
    output_ptr,
    bias_ptr,
    masked_ptr,
    allowed_ptr,
    scores_ptr,
    peaks_ptr,
    vocab,
    BLOCK: tl.constexpr,
):
    """Penalised scores `[num_rows, vocab]`, and the best of each block, before and behind all that, as orders."""
    row, block = tl.program_id(0), tl.program_id(1)
    if whole(rows_ptr, row, SLOT) < 0:
        return
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + tokens, mask=inside, other=float("-inf"))
    scores = restricted(rows_ptr, row, allowed_ptr, logits, tokens, inside, vocab)
    scores = biased(rows_ptr, row, bias_ptr, masked_ptr, scores, tokens, inside, vocab)
    penalty = real(rows_ptr, row, PENALTY)
    if penalty != 1.0:
        found = occurrences(rows_ptr, row, counts_ptr, ancestors_ptr, leaving_ptr, tokens, inside, vocab)
        scores = penalise(scores, found, penalty)
    scores = held_back(rows_ptr, row, output_ptr, ancestors_ptr, scores, tokens, inside, vocab)
    tl.store(scores_ptr + row.to(tl.int64) * vocab + tokens, scores, mask=inside)
    peaks = peaks_ptr + row * tl.num_programs(1) + block
    tl.store(peaks, tl.max(order_of(logits), 0))
    tl.store(peaks + tl.num_programs(0) * tl.num_programs(1), tl.max(order_of(scores), 0))
