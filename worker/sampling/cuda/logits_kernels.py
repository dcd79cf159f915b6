"""Triton kernels of logits: bias, masks, penalties and their counts, temperature, Gumbel noise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from swiftbatch.worker.sampling.cuda import sampling_rows as rows

NUM_WORDS = tl.constexpr(rows.NUM_WORDS)
NUM_DRAFTED = tl.constexpr(rows.NUM_DRAFTED)
NUM_MASKED = tl.constexpr(rows.NUM_MASKED)
NOISE_KEY = tl.constexpr(rows.column_of("noise_key"))
POSITION = tl.constexpr(rows.column_of("position"))
SLOT = tl.constexpr(rows.column_of("slot"))
DEPTH = tl.constexpr(rows.column_of("depth"))
WINDOW = tl.constexpr(rows.column_of("window"))
TEMPERATURE = tl.constexpr(rows.column_of("temperature"))
PENALTY = tl.constexpr(rows.column_of("penalty"))
FREQUENCY = tl.constexpr(rows.column_of("frequency"))
PRESENCE = tl.constexpr(rows.column_of("presence"))
HAS_BIAS = tl.constexpr(rows.column_of("has_bias"))
MASKS = tl.constexpr(rows.column_of("num_masked"))
IS_RESTRICTED = tl.constexpr(rows.column_of("is_restricted"))


@triton.jit
def whole(rows_ptr, row, COLUMN: tl.constexpr):
    return tl.load(rows_ptr + row * NUM_WORDS + COLUMN)


@triton.jit
def real(rows_ptr, row, COLUMN: tl.constexpr):
    return tl.load(rows_ptr + row * NUM_WORDS + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def noise_key_of(rows_ptr, row):
    low = whole(rows_ptr, row, NOISE_KEY).to(tl.uint32).to(tl.uint64)
    high = whole(rows_ptr, row, NOISE_KEY + 1).to(tl.uint32).to(tl.uint64)
    return (high << 32) | low


# Changes of a row's logits before the noise, and the order of scores.


LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def order_of(x):
    """Return an int32 that sorts like the float32. Both zeros are equal, and NaN is above all numbers."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, LARGEST, tl.where(bits < 0, bits ^ LARGEST, bits))


@triton.jit
def number_of(order):
    return tl.where(order < 0, order ^ LARGEST, order).to(tl.float32, bitcast=True)


@triton.jit
def rank_of(x, token_ids):
    """Return an int64 that orders tokens by float32; of equal tokens, the lower id is higher."""
    return (order_of(x).to(tl.int64) << 32) | (token_ids ^ LARGEST).to(tl.int64)


@triton.jit
def token_of(rank):
    return (rank & 0xFFFFFFFF).to(tl.int32) ^ LARGEST


@triton.jit
def occurrences(rows_ptr, row, counts_ptr, ancestors_ptr, leaving_ptr, tokens, inside, vocab):
    """Count each token `[BLOCK]` in the penalty window of a row, int32.

    For each drafted token of the row's path one token leaves the window: the committed one in `leaving` or, if that is
    -1, a token of the path itself.
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
    """Divide positive, multiply negative scores of found tokens (Keskar et al. 2019)."""
    penalised = tl.where(scores < 0.0, scores * penalty, tl.math.div_rn(scores, penalty))
    return tl.where(found > 0, penalised, scores)


@triton.jit
def restricted(rows_ptr, row, allowed_ptr, scores, tokens, inside, vocab):
    """Mask all tokens outside the row's mask, if it has one."""
    if whole(rows_ptr, row, IS_RESTRICTED) != 0:
        words = allowed_ptr + row.to(tl.int64) * tl.cdiv(vocab, 32)
        word = tl.load(words + tokens // 32, mask=inside, other=0)
        scores = tl.where((word >> (tokens % 32)) & 1 != 0, scores, float("-inf"))
    return scores


@triton.jit
def biased(rows_ptr, row, bias_ptr, masked_ptr, scores, tokens, inside, vocab):
    """Add the slot's bias, and mask the row's forbidden tokens."""
    if whole(rows_ptr, row, HAS_BIAS) != 0:
        slot = whole(rows_ptr, row, SLOT).to(tl.int64)
        scores += tl.load(bias_ptr + slot * vocab + tokens, mask=inside, other=0.0)
    for i in range(0, whole(rows_ptr, row, MASKS)):
        scores = tl.where(tokens == tl.load(masked_ptr + row * NUM_MASKED + i), float("-inf"), scores)
    return scores


@triton.jit
def held_back(rows_ptr, row, output_ptr, ancestors_ptr, scores, tokens, inside, vocab):
    """Subtract the frequency and presence penalties in float64, where count times penalty is exact."""
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
    """Return the highest value of a row's blocks, or NaN if any is NaN."""
    blocks = tl.arange(0, WIDTH)
    return number_of(tl.max(tl.load(peaks_ptr + blocks, mask=blocks < num_blocks, other=-0x80000000), 0))


@triton.jit
def temper(scores, peak, temperature):
    """Divide by the temperature; on overflow, first subtract the best score, which draws the same token."""
    leaves = (temperature < 1.0) & (tl.abs(tl.math.div_rn(peak, temperature)) == float("inf"))
    shift = tl.where(leaves, peak, 0.0)
    return tl.math.div_rn(scores - shift, temperature)


@triton.jit
def is_greedy(rows_ptr, row, peak):
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
    """Store penalised scores `[num_rows, vocab]`, and orders of each block's best, before and after the changes."""
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


# Token counts of each slot's penalty window and output.


BLOCK = 64
NUM_WARPS = 1


@triton.jit
def count_tokens(counts_ptr, output_ptr, arriving_ptr, leaving_ptr, vocab, width, BLOCK: tl.constexpr):
    """Add 1 to the count of each arriving token, and subtract 1 for each leaving token."""
    slot = tl.program_id(0)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counts, output = counts_ptr + slot.to(tl.int64) * vocab, output_ptr + slot.to(tl.int64) * vocab
    arriving = tl.load(arriving_ptr + slot * width + places, mask=places < width, other=-1)
    leaving = tl.load(leaving_ptr + slot * width + places, mask=places < width, other=-1)
    tl.atomic_add(counts + arriving, 1, mask=arriving >= 0, sem="relaxed")
    tl.atomic_add(output + arriving, 1, mask=arriving >= 0, sem="relaxed")
    tl.atomic_add(counts + leaving, -1, mask=leaving >= 0, sem="relaxed")


def update_counts(counts: torch.Tensor, output: torch.Tensor, arriving: torch.Tensor, leaving: torch.Tensor) -> None:
    """Update `counts` and `output [num_slots, vocab] int32`.

    `arriving` and `leaving [num_slots, width] int32` have tokens below `vocab` (unchecked), or -1.
    """
    num_slots, vocab_size = counts.shape
    width = arriving.shape[-1]
    grid = (num_slots, triton.cdiv(width, BLOCK))
    count_tokens[grid](counts, output, arriving, leaving, vocab_size, width, BLOCK=BLOCK, num_warps=NUM_WARPS)


# Noise of worker/sampling/noise.py: Philox4x32-10 with the same key, on (token / 4, position).


@triton.jit
def noise_words(key, position_low, position_high, first, BLOCK: tl.constexpr):
    """Return words `[BLOCK] uint32` of the tokens from `first` on, a multiple of 4."""
    quads = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)  # four tokens share a counter
    zeros = tl.zeros_like(quads)
    low, high = zeros + position_low.to(tl.uint32), zeros + position_high.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, quads, low, high, zeros)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # in the order of tokens


WORD_UNIT = tl.constexpr(2.0**-32)
MARGIN = tl.constexpr(2.0**-10)  # eight times the greatest error of an estimate


@triton.jit
def gumbel(words):
    """Return standard Gumbel noise, float32."""
    uniform = (words.to(tl.float64) + 0.5) * WORD_UNIT  # exact, inside (0, 1)
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def gumbel_bound(words):
    """Return float32 numbers above the noise by up to 2^-9: estimates from float32 logarithms, plus a margin.

    An estimate is off by the relative error of -log(uniform). The series' two terms have one below 2^-13.5. Elsewhere,
    where -log(uniform) is at least 1/64, it is below 2^-15: a logarithm errs by 2^-22 at most, near 1 absolutely and
    elsewhere of itself (PTX's `lg2.approx`), and `uniform` by 2^-23.
    """
    uniform = (words.to(tl.float32) + 0.5) * WORD_UNIT
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * WORD_UNIT  # 1 - uniform, without its rounding near 1
    inner = tl.where(rest < 0.015625, rest + rest * rest * 0.5, -tl.log(uniform))
    return -tl.log(inner) + MARGIN
